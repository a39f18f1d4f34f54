"""Rows of `kilter bench faults` for `kilter daemon`: deaths, and clients that mean harm.

The daemon, its clients and their deaths are real processes; the cards are fake.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kilter.app.bench.accidents import Accidents
from kilter.app.bench.faults_of_trust import contained, locked_by_site
from kilter.core.daemon_protocol import Ask, Hello, Hold, Look, Release, encode
from kilter.core.setting import Setting
from kilter.testing.box import FOUND, LOW, until
from kilter.testing.daemon_box import DaemonBox

MESSAGES, CONNECTIONS = 10_000, 2_000
HOSTILE_SEED = 15
DAEMON_ACCIDENTS = Accidents()
_row = DAEMON_ACCIDENTS.row


@_row("daemon: SIGKILL of the job")
def daemon_job_killed(box: DaemonBox) -> None:
    box.low_job().kill()
    until(lambda: box.setting() == FOUND)


@_row("daemon: SIGKILL of daemon and job, the daemon starts again")
def daemon_and_job_killed(box: DaemonBox) -> None:
    job = box.low_job()
    box.kill_daemon()
    job.kill()
    box.start_daemon()


@_row("daemon: SIGKILL of the daemon, which starts again, the job goes on and ends")
def daemon_killed(box: DaemonBox) -> None:
    job = box.low_job()
    box.kill_daemon()
    box.start_daemon()
    box.note(f"renewal {job.ask('renew')}, set {job.ask('set', **LOW) or 'again'}")
    job.end()


@_row("daemon: SM clock locked by `nvidia-smi -lgc` before the job, no baseline")
def daemon_clock_locked_by_site(box: DaemonBox) -> Setting:
    return locked_by_site(box, box.job())


@_row("daemon: SIGKILL of the init of the job's container")
def daemon_container_killed(box: DaemonBox) -> None:
    job = contained(box)
    if job is None:
        return
    answer = job.ask("set", **LOW)
    if answer is not None:
        box.wrong(f"the job was told {answer}")
    job.kill_init()
    until(lambda: box.setting() == FOUND)


@_row("daemon: stopped by systemd (SIGTERM) under a job")
def daemon_ended(box: DaemonBox) -> None:
    box.low_job()
    box.end_daemon()


@_row("daemon: the job's cgroup is frozen (SIGSTOP), its deadline passes")
def daemon_job_stopped(box: DaemonBox) -> None:
    job = box.lowered_by(box.job(), hold_s=0.5)
    os.kill(job.pid, signal.SIGSTOP)
    until(lambda: box.setting() == FOUND)


@dataclass
class Attack:
    """What hostile clients have done, and what an honest one saw meanwhile."""

    sent: int = 0
    connected: int = 0
    honest_s: list[float] = field(default_factory=list)
    honest_errors: list[str] = field(default_factory=list)


@_row("daemon: 10,000 hostile messages and 2,000 connections, an honest client beside them")
def daemon_hostile(box: DaemonBox) -> None:
    attack = Attack()
    before_bytes, before_files = _memory_bytes(box), _open_files(box)
    over = threading.Event()
    job = box.job("honest", card=1)
    job.ask("enter")
    honest = threading.Thread(target=_honest, args=(job, attack, over))
    honest.start()
    box.change(pids=(os.getpid(),))  # the attacker computes on a card of its own
    _send_messages(box, attack)
    _open_connections(box, attack)
    over.set()
    honest.join()
    job.end()
    until(lambda: not box.place.journal_path.exists())
    grown_mib = (_memory_bytes(box) - before_bytes) / 2**20
    outside = [call for call in box.fake.setters() if call.name in _BOUNDS and not _inside(call)]
    box.note(
        f"{attack.sent} messages, {attack.connected} connections: {len(outside)} settings outside "
        f"the policy, daemon's memory {grown_mib:+.1f} MiB, descriptors "
        f"{_open_files(box) - before_files:+d}; honest client: {len(attack.honest_s)} sets, "
        f"median {statistics.median(attack.honest_s) * 1e3:.0f} ms, longest "
        f"{max(attack.honest_s) * 1e3:.0f} ms, {len(attack.honest_errors)} errors"
    )
    if outside or attack.honest_errors or grown_mib > 64 or not box.answers():
        box.wrong(f"see above {attack.honest_errors[:1]}")


_BOUNDS = {
    "nvmlDeviceSetGpuLockedClocks": (600, 1980),
    "nvmlDeviceSetMemoryLockedClocks": (1, 0),
    "nvmlDeviceSetPowerManagementLimit": (300_000, 700_000),
}


def _inside(call: object) -> bool:
    low, high = _BOUNDS[call.name]  # type: ignore[attr-defined]
    return bool(low <= call.arguments[-1] <= high)  # type: ignore[attr-defined]


def _honest(job: object, attack: Attack, over: threading.Event) -> None:
    for mhz in itertools.cycle((1200, 1500)):
        begin_s = time.monotonic()
        answer = job.ask("set", sm_mhz=mhz, limit_w=400)  # type: ignore[attr-defined]
        attack.honest_s.append(time.monotonic() - begin_s)
        if answer is not None:
            attack.honest_errors.append(str(answer))
            return
        if over.wait(0.2):
            return


def _send_messages(box: DaemonBox, attack: Attack) -> None:
    """As fast as the daemon takes them, on connections that it may close at any time."""
    chance = random.Random(HOSTILE_SEED)
    messages = _hostile(chance, box.uuid)
    while attack.sent < MESSAGES:
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(5.0)
            connection.connect(str(box.socket))
            if chance.random() < 0.9:
                connection.sendall(encode(Hello(version=1)))
            for _ in range(20):
                raw = next(messages)
                attack.sent += 1
                if chance.random() < 0.05:  # passed descriptors
                    socket.send_fds(connection, [raw[:1024]], [0, 1, 2])
                else:
                    connection.sendall(raw)


def _hostile(chance: random.Random, uuid: str) -> Iterator[bytes]:
    """Garbage, too much, too deep, replayed, out of order, of other GPUs, outside the policy."""
    makers: tuple[Callable[[int], bytes], ...] = (
        lambda n: chance.randbytes(chance.randrange(1, 200)) + b"\n",
        lambda n: b"x" * 9000,
        lambda n: b"[" * 3000 + b"\n",
        lambda n: encode(Look(number=1, uuid=uuid)),
        lambda n: encode(Look(number=n, uuid="GPU-" + "9" * 200)),
        lambda n: encode(Look(number=n, uuid="../../etc/passwd")),
        lambda n: encode(Release(number=n, uuid=uuid)),
        lambda n: encode(Hold(number=n, uuid=uuid, hold_s=1e300)),
        lambda n: encode(
            Ask(
                number=n,
                uuid=uuid,
                setting=Setting(
                    sm_clock_hz=chance.choice((None, 345e6, 1e18, -5.0, 1200e6)),
                    memory_clock_hz=chance.choice((None, 3201e6)),
                    power_limit_w=chance.choice((None, 200.0, 0.0, 1e30, 400.0)),
                ),
                hold_s=chance.choice((1e-9, 0.01, 60.0, 1e300)),
                why="\n" * 400,
            )
        ),
        lambda n: encode(Hello(version=n)),
    )
    for number in itertools.count(2):
        yield chance.choice(makers)(number)


def _open_connections(box: DaemonBox, attack: Attack) -> None:
    """As many at once as this process may have open; they are opened and say nothing."""
    while attack.connected < CONNECTIONS:
        with ExitStack() as stack:
            for _ in range(min(400, CONNECTIONS - attack.connected)):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(5.0)
                with suppress(OSError):
                    connection.connect(str(box.socket))
                attack.connected += 1


def _memory_bytes(box: DaemonBox) -> int:
    status = Path(f"/proc/{box.daemon.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _open_files(box: DaemonBox) -> int:
    return len(os.listdir(f"/proc/{box.daemon.pid}/fd"))
