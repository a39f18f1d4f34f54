"""Accidents and attacks of a shared machine, as rows of `kilter bench faults`.

Files that are deleted, damaged, planted or full; an administrator at work; a deadline that passes
at the worst moment.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from kilter.app.bench.accidents import Accidents
from kilter.core.setting import Setting
from kilter.core.units import MHZ
from kilter.lease.journal import STATE_VARIABLE
from kilter.lease.lease import WATCHER_START_S
from kilter.testing.box import (
    FOUND,
    FOUND_LIMIT_W,
    OWN,
    Box,
    BoxJob,
    find_watcher,
    kill_watcher,
    may_contain,
    until,
)

TRUST_ACCIDENTS = Accidents()
_row = TRUST_ACCIDENTS.row
LOG_BYTES = 2**30
"""A watcher's log of this size may not grow any more."""


@_row("state directory deleted by a cleaner, SIGKILL of the job")
def state_deleted(box: Box) -> None:
    job = box.low()
    shutil.rmtree(box.state_directory)
    job.kill()
    until(lambda: find_watcher(box.state_directory) is None)
    box.state_directory.mkdir(mode=0o700)


@_row("state directory deleted by a cleaner, the job sets again")
def state_deleted_in_use(box: Box) -> None:
    job = box.low()
    shutil.rmtree(box.state_directory)
    box.note(job.ask("set", sm_mhz=900)["error"])
    job.end()
    until(lambda: find_watcher(box.state_directory) is None)
    box.state_directory.mkdir(mode=0o700)


@_row("journal deleted, SIGKILL of the job")
def journal_deleted(box: Box) -> None:
    job = box.low()
    box.place.journal_path.unlink()
    job.kill()


@_row("journal overwritten with garbage, SIGKILL of the job")
def journal_damaged(box: Box) -> None:
    job = box.low()
    box.place.journal_path.write_bytes(b"\xff[[[")
    job.kill()


@_row("journal deleted, the job hangs, its deadline passes")
def journal_deleted_and_late(box: Box) -> None:
    job = box.low(hold_s=0.5)
    box.place.journal_path.unlink()
    until(lambda: box.setting() == FOUND)
    box.note("put back while the job hung")
    job.kill()


@_row("lock planted as a link to another file")
def lock_planted(box: Box) -> None:
    _plant(box, box.place.lock_path)


def _plant(box: Box, lock: Path) -> None:
    """A job begins where its lock is a link to another file."""
    victim = box.root / "victim"
    victim.write_text("precious")
    lock.symlink_to(victim)
    job = box.start()
    box.note(job.ask("enter")["error"])
    job.end()
    box.note(f"the other file holds {victim.read_text()!r}")
    lock.unlink()


@_row("journal of another user that says 200 W were found, then root's `kilter restore`")
def journal_forged(box: Box) -> None:
    job = box.low()
    journal = box.place.read()
    assert journal is not None
    job.end()
    forged = msgspec.structs.replace(journal, found=Setting(power_limit_w=200.0))
    path = box.place.journal_path
    if os.geteuid() == 0:
        path.write_bytes(msgspec.json.encode(forged))
        os.chown(path, 65534, 65534)
    else:  # only root can give a file away; a link is refused for the same reason
        (box.root / "forged.json").write_bytes(msgspec.json.encode(forged))
        path.symlink_to(box.root / "forged.json")
    box.note(f"kilter restore: exit code {box.restore()}")
    path.unlink()


@_row("watcher's log cannot grow any more, the deadline passes, SIGKILL of the job")
def log_full(box: Box) -> None:
    job = box.low(hold_s=1.0)
    watcher = find_watcher(box.state_directory)
    assert watcher is not None
    os.truncate(box.state_directory / "watcher.log", LOG_BYTES)
    resource.prlimit(watcher, resource.RLIMIT_FSIZE, (LOG_BYTES, LOG_BYTES))
    until(lambda: box.setting() == FOUND)
    job.ask("set", sm_mhz=900, limit_w=300)
    job.kill()


@_row("deadline passes, and the job sets again while the watcher starts the driver")
def set_while_late(box: Box) -> None:
    job = box.low(hold_s=3.0)
    # the next to start the driver is the watcher
    box.rule(call="nvmlInit", hang_s=1.0, times=1)
    until(lambda: box.fake.state().rules[0].seen > 0)
    job.ask("set", sm_mhz=900, limit_w=300)
    time.sleep(1.5)
    box.note(f"then {box.setting()} in force, the job's renewal {job.ask('renew')}")
    job.kill()


@_row("administrator sets another limit while the first set of an SM clock waits for its watcher")
def limit_changed_at_first_set(box: Box) -> Setting:
    job = box.entered()
    _set_under_administrator(box, job, at="nvmlInit")
    box.note(f"then {box.setting()} in force")
    job.end()
    return Setting(power_limit_w=500.0)


@_row("administrator sets another limit in the middle of a set of the SM clock alone")
def limit_never_asked_for(box: Box) -> Setting:
    job = box.entered()
    answer = _set_under_administrator(box, job, at="nvmlDeviceSetGpuLockedClocks")
    if box.setting() != Setting(sm_clock_hz=1200 * MHZ, power_limit_w=500.0):
        box.note(f"then {box.setting()} in force, the job was told {answer}")
    job.end()
    return Setting(power_limit_w=500.0)


def _set_under_administrator(box: Box, job: BoxJob, *, at: str) -> Any:
    """The job's answer to a set of the SM clock; a call of it takes a second, in which an
    administrator sets another power limit."""
    box.rule(at, hang_s=1.0, times=1)

    def administrator() -> None:
        until(lambda: box.fake.state().rules[0].seen > 0)
        box.change(limit_mw=500_000)

    at_work = threading.Thread(target=administrator)
    at_work.start()
    answer = job.ask("set", sm_mhz=1200)
    at_work.join()
    return answer


@_row("SIGKILL of job and watcher beside damaged journals of other GPUs, then `kilter restore`")
def damaged_beside_whole(box: Box) -> None:
    job = box.low()
    kill_watcher(box.state_directory)
    job.kill()
    (box.state_directory / "GPU-0.json").write_bytes(b"[" * 10_000)
    (box.state_directory / "GPU-00.json").write_bytes(b"\xff\xfe")
    os.mkfifo(box.state_directory / "GPU-000.json")
    (box.state_directory / "GPU-zz.json").mkdir()
    box.note(f"kilter restore: exit code {box.restore()}")


@_row("SM clock locked by `nvidia-smi -lgc` before the job, no baseline")
def clock_locked_by_site(box: Box) -> Setting:
    return locked_by_site(box, box.start())


def locked_by_site(box: Box, job: BoxJob) -> Setting:
    """What is found, and stays: the job's set is refused."""
    box.change(sm_lock_mhz=(345, 1410))
    job.ask("enter")
    box.note(job.ask("set", sm_mhz=1200)["error"])
    job.end()
    return Setting(sm_clock_hz=1410 * MHZ, power_limit_w=FOUND_LIMIT_W)


@_row("SIGKILL of the init of the job's container takes the watcher along, then `kilter restore`")
def container_killed(box: Box) -> None:
    job = contained(box)
    if job is None:
        return
    job.ask("set", sm_mhz=1200, limit_w=400)
    job.kill_init()
    job.wait()
    if box.setting() == FOUND:
        box.wrong("nothing was left, so that this row shows nothing")
    box.restore()


def contained(box: Box) -> BoxJob | None:
    """A job with a lease in a pid namespace of its own; None where there is no right to make one,
    and the row says so."""
    if not may_contain():
        box.note("not tried: needs unshare(1) and the right to make a pid namespace")
        return None
    job = box.start_contained()
    job.ask("enter")
    return job


@_row("the cgroup of job and watcher is frozen (SIGSTOP), the deadline passes, `restore --force`")
def frozen(box: Box) -> None:
    job = box.low(hold_s=1.0)
    watcher = find_watcher(box.state_directory)
    assert watcher is not None
    for pid in (job.pid, watcher):
        os.kill(pid, signal.SIGSTOP)
    until(lambda: (holder := box.place.holder()) is not None and holder.overdue)
    box.note(f"kilter restore: exit code {box.restore()}")
    box.restore("--force")
    job.kill()
    kill_watcher(box.state_directory)


@_row("the program closes all descriptors, and opens files of its own under their numbers")
def descriptors_reused(box: Box) -> None:
    job = box.low()
    job.ask("close_all")
    box.note(job.ask("set", sm_mhz=900)["error"])
    job.end()
    if {path.read_bytes() for path in box.root.glob("own-*")} != {OWN}:
        box.wrong("something was written into a file of the program")


STORE_HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@_row("host of the ranks' store is stopped while the job talks to it, the job ends")
def store_host_stopped(box: Box) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STORE_HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout is not None
        try:
            port = int(host.stdout.readline())
            job = box.low()
            job.ask("talk", port=port)
            host.send_signal(signal.SIGSTOP)
            job.ask("talk", port=port)
            if job.end()["state"] != "restored":
                box.wrong("the lease did not end as restored")
        finally:
            host.kill()


@_row("SIGKILL of the watcher while it starts the driver, before the first set")
def watcher_killed_at_start(box: Box) -> None:
    job = box.entered()
    # the next to start the driver is the watcher
    box.rule(call="nvmlInit", sigkill="before", times=1)
    begin_s = time.monotonic()
    box.note(job.ask("set", sm_mhz=1200, limit_w=400)["error"])
    if time.monotonic() - begin_s > WATCHER_START_S / 2:
        box.wrong("the job waited for a dead watcher")
    job.end()


def _elsewhere(box: Box) -> dict[str, str]:
    """The environment of a job that has another state directory, as another user has."""
    directory = box.root / "another state"
    directory.mkdir(mode=0o700)
    return {STATE_VARIABLE: str(directory)}


@_row("second job on the same GPU, with a state directory of its own")
def two_directories(box: Box) -> None:
    two_jobs(box, **_elsewhere(box))


def two_jobs(box: Box, **environ: str) -> None:
    first = box.low("first job")
    second = box.start("second job", **environ)
    box.note(second.ask("enter")["error"])
    second.end()
    first.end()


@_row("SIGKILL of the job, the next one comes at once, with a state directory of its own")
def next_waits_elsewhere(box: Box) -> None:
    next_job(box, **_elsewhere(box))


def next_job(box: Box, **environ: str) -> None:
    job = box.low("first job")
    following = box.start("next job", **environ)
    job.kill()
    following.ask("enter")
    following.ask("set", sm_mhz=900)
    following.end()


@_row("job ends, the next one comes while the driver is still putting the first one's clocks back")
def next_while_ending(box: Box) -> None:
    job = box.low("first job")
    box.rule(call="nvmlDeviceReset*", hang_s=1.0, times=1)
    following = box.start("next job")
    ending = threading.Thread(target=job.end)
    ending.start()
    until(lambda: box.fake.state().rules[0].seen > 0)
    answer = following.ask("enter")
    if answer is not None:
        box.wrong(f"the next job was told {answer}")
    following.ask("set", sm_mhz=900)
    following.end()
    ending.join()


@_row("the machine's lock planted as a link to another file")
def machine_lock_planted(box: Box) -> None:
    path = box.place.machine_path
    assert path is not None
    _plant(box, path)
