"""One fake card, and real processes that hold a lease on it and may be killed.

`Box` is a machine in a directory: the card of `kilter.testing.fake_nvml`, whose settings outlive
processes as a real card's do, a state directory, and the jobs that meet there. The card starts with
a power limit that is not its default, so that putting back "the default" would be noticed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kilter.core.errors import KilterError
from kilter.core.messages import RankMessages
from kilter.core.setting import Setting
from kilter.core.units import MHZ, MILLI
from kilter.device.find import find
from kilter.lease.journal import STATE_VARIABLE, JournalPlace
from kilter.lease.lease import Lease
from kilter.testing.fake_card import Card, Rule
from kilter.testing.fake_nvml import FakeNvml

FOUND_LIMIT_W = 600.0
FOUND = Setting(power_limit_w=FOUND_LIMIT_W)
LOW = {"sm_mhz": 1200, "limit_w": 400}
"""What a job sets."""
OWN = b"the program's own file"
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
TIMEOUT_S = 60.0
"""A condition is waited for this long; it normally takes a fraction of a second."""


class Box:
    """One fake card, one state directory, and the jobs that meet there."""

    def __init__(self, root: Path, *, cards: int = 1) -> None:
        self.root = root
        self.state_directory = root / "state"
        self.state_directory.mkdir(mode=0o700)
        machine = root / "machine"
        machine.mkdir()
        machine.chmod(0o1777)
        self.fake = FakeNvml.create(
            root / "cards.json",
            *(Card(load=1.0, limit_mw=round(FOUND_LIMIT_W / MILLI)) for _ in range(cards)),
        )
        self.uuid = self.fake.state().cards[0].uuid
        self.place = JournalPlace(self.state_directory, self.uuid, machine=machine)
        self.names: dict[int, str] = {}
        """Who is who in the cards' log, by pid; the watcher's is not known."""
        self.notes: list[str] = []
        self.wrongs: list[str] = []
        self.jobs: list[BoxJob] = []

    def environ(self, **more: str) -> dict[str, str]:
        """Of a process in the box: fake cards, and nothing that is meant for real ones."""
        base = {name: value for name, value in os.environ.items() if not name.startswith("KILTER")}
        own = {STATE_VARIABLE: str(self.state_directory), "BOX_ROOT": str(self.root)}
        return self.fake.environ(base) | own | more

    def setting(self, card_index: int = 0) -> Setting:
        """What the card itself has, whoever asks."""
        card = self.fake.state().cards[card_index]
        lock = card.sm_lock_mhz
        return Setting(
            sm_clock_hz=None if lock is None else lock[1] * MHZ,
            power_limit_w=card.enforced_limit_mw * MILLI,
        )

    def last_setter(self) -> str:
        setters = self.fake.setters()
        if not setters:
            return "nobody"
        return self.names.get(setters[-1].pid, "watcher")

    def lowered(self) -> Setting:
        """What the card was last set to before it was put back, from the log of its calls."""
        sm_hz = limit_w = None
        for call in self.fake.setters():
            if call.error is None and self.names.get(call.pid, "").endswith(
                ("job", "daemon", "conductor")
            ):
                if call.name == "nvmlDeviceSetGpuLockedClocks":
                    sm_hz = call.arguments[1] * MHZ
                if call.name == "nvmlDeviceSetPowerManagementLimit":
                    limit_w = min(limit_w or FOUND_LIMIT_W, call.arguments[0] * MILLI)
        return Setting(sm_clock_hz=sm_hz, power_limit_w=limit_w)

    def start(self, name: str = "job", **environ: str) -> BoxJob:
        job = BoxJob(self, environ)
        self.jobs.append(job)
        self.names[job.pid] = name
        return job

    def start_contained(self) -> BoxJob:
        """A job that is the init process of a pid namespace of its own (`may_contain`)."""
        job = BoxJob(self, {}, contained=True)
        self.jobs.append(job)
        self.names[1] = "job"  # its own number in there
        until(lambda: job.init_pid is not None)
        return job

    def entered(self, name: str = "job") -> BoxJob:
        """A job that has a lease, and has set nothing."""
        job = self.start(name)
        job.ask("enter")
        return job

    def low(self, name: str = "job", *, hold_s: float = 60.0, **environ: str) -> BoxJob:
        """A job that has lowered both knobs."""
        return self.lowered_by(self.start(name, **environ), hold_s=hold_s)

    def lowered_by(self, job: BoxJob, *, hold_s: float = 60.0) -> BoxJob:
        for answer in (job.ask("enter"), job.ask("set", hold_s=hold_s, **LOW)):
            if isinstance(answer, dict):
                raise RuntimeError(f"the scenario does not begin: {answer}")
        return job

    def killed_in_set(self) -> None:
        """A job that one of the rules kills while it sets."""
        job = self.entered()
        job.ask("set", **LOW)
        job.wait()

    def refused_set(self) -> BoxJob:
        """A job whose first set is refused; the row says how."""
        job = self.entered()
        self.note(job.ask("set", **LOW)["error"])
        return job

    def rule(self, call: str, **how: Any) -> None:
        """How the cards answer some calls from now on."""
        with self.fake.edit() as state:
            state.rules.append(Rule(call=call, **how))

    def refuse(self, call: str, code: str = "NO_PERMISSION", **how: Any) -> None:
        self.rule(call, error=getattr(self.fake, f"NVML_ERROR_{code}"), **how)

    def change(self, **fields: Any) -> None:
        """What somebody else does to the first card, or the card to itself."""
        with self.fake.edit() as state:
            for name, value in fields.items():
                setattr(state.cards[0], name, value)

    def note(self, text: str) -> None:
        """Something worth a word in the table."""
        self.notes.append(text)

    def wrong(self, text: str) -> None:
        """Something that makes the scenario a failure, whatever the card stands at."""
        self.wrongs.append(text)

    def obey_again(self) -> None:
        with self.fake.edit() as state:
            state.rules.clear()

    def restore(self, *options: str) -> int:
        """`kilter restore`, as a user or an epilog runs it; its exit code."""
        process = subprocess.Popen(
            [sys.executable, "-m", "kilter", "restore", "--all", "--json", *options],
            env=self.environ(),
            stdout=subprocess.DEVNULL,
        )
        self.names[process.pid] = "kilter restore"
        return process.wait(TIMEOUT_S)

    def until_free(self) -> None:
        """Wait until nobody controls the card: job and watcher are done, or dead."""
        self.place.lock(patience_s=TIMEOUT_S).close()

    def close(self) -> None:
        for job in self.jobs:
            job.kill()


def until(condition: Callable[[], bool]) -> None:
    """Wait for it; `TimeoutError` if it never comes true."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise TimeoutError("the condition never came true")
        time.sleep(0.005)


def may_contain() -> bool:
    """Whether a job can have a pid namespace of its own here."""
    if shutil.which(CONTAINER[0]) is None:
        return False
    return subprocess.run([*CONTAINER, "true"], stderr=subprocess.DEVNULL).returncode == 0


def find_watcher(directory: Path) -> int | None:
    """The process that watches over the cards of a state directory."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"kilter.lease.watcher" in words and os.fsencode(directory) in words:
            return int(process.name)
    return None


def kill_watcher(directory: Path) -> None:
    """SIGKILL to the watcher, if there is one; it is dead when this returns."""
    pid = find_watcher(directory)
    if pid is not None:
        death = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(death, select.POLLIN)
        poll.poll(TIMEOUT_S * 1e3)
        os.close(death)


class ToldProcess:
    """A Python program in a box that takes commands and answers them, line by line."""

    def __init__(
        self,
        box: Box,
        code: str,
        environ: dict[str, str],
        *,
        before: Sequence[str] = (),
        own_session: bool = False,
    ) -> None:
        """`before` is the command line that starts Python."""
        self._process = subprocess.Popen(
            [*before, sys.executable, "-c", code],
            env=box.environ(**environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=own_session,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self.pid = self._process.pid

    def tell(self, line: str) -> str:
        """The answer; empty if the program has died."""
        self._in.write(line + "\n")
        self._in.flush()
        return self._out.readline()

    def kill(self) -> None:
        """SIGKILL, of this process only."""
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        code = self._process.wait(TIMEOUT_S)
        with suppress(BrokenPipeError):  # what it was still to be told
            self._in.close()
        self._out.close()
        return code


class BoxJob(ToldProcess):
    """A process that holds a lease and takes commands."""

    def __init__(
        self,
        box: Box,
        environ: dict[str, str],
        *,
        uuid: str = "",
        uid: int | None = None,
        contained: bool = False,
    ) -> None:
        """`contained`: in a pid namespace of its own, where the job is the init process."""
        served = f"serve({uuid or box.uuid!r}, uid={uid})"
        code = f"from {__name__} import serve; {served}"
        super().__init__(
            box, code, environ, before=CONTAINER if contained else (), own_session=True
        )

    def ask(self, verb: str, **what: Any) -> Any:
        """The job's answer; a `KilterError` of its own comes as `{"error": its name}`."""
        return _answer(self.tell(json.dumps({"verb": verb, **what})))

    @property
    def init_pid(self) -> int | None:
        """Of a job in a container, from outside; None where its process does not live."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def kill_init(self) -> None:
        """SIGKILL of a container's init, and so of all that is in the container."""
        if (pid := self.init_pid) is not None:
            os.kill(pid, signal.SIGKILL)

    def signal(self, number: int) -> None:
        """To the whole group, as the terminal does."""
        os.killpg(self.pid, number)
        self.wait()

    def end(self) -> Any:
        """Let it end in good order; what it says about that."""
        self._in.close()
        line = self._out.readline()
        self.wait()
        return _answer(line)


def _answer(line: str) -> Any:
    return json.loads(line) if line else {"error": "died"}


def serve(uuid: str, *, uid: int | None = None) -> None:
    """The job's side of `BoxJob`: obeys the lines of its stdin, ends when they end. As another
    user from here on, if root: that user may not be able to read this Python's files."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    device = find("nvml", uuid=uuid, environ=os.environ)
    lease = Lease(device)
    with ExitStack() as stack:

        def enter() -> str | None:
            stack.enter_context(lease)
            return None if lease.recovered is None else lease.recovered.reason

        def set_(*, hold_s: float = 60.0, **knobs: float) -> None:
            lease.set(_setting(**knobs), hold_s=hold_s)

        def verify() -> None:
            sample = device.sample()
            lease.verify(sample)
            lease.verify(replace(sample, t_s=sample.t_s + 60.0))  # had time to act

        def fork(*, in_c: bool) -> int:
            pid = ctypes.CDLL(None).fork() if in_c else os.fork()
            while pid == 0:
                signal.pause()
            return int(pid)

        def close_all() -> None:
            """As a daemon does; then files of its own have the numbers."""
            os.closerange(3, 4096)
            for number in range(24):
                file = os.open(f"{os.environ['BOX_ROOT']}/own-{number}", os.O_RDWR | os.O_CREAT)
                os.write(file, OWN)

        talks: list[RankMessages] = []

        def talk(*, port: int) -> None:
            """To the other ranks, through the store that is served there."""
            import torch.distributed as dist

            from kilter.session.messages import StoreMessages

            if not talks:
                store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
                talks.append(StoreMessages(lambda: store))
            talks[0].post("block", b"a message")

        def fail() -> None:
            raise ValueError("an error of the script itself")

        verbs: dict[str, Callable[..., Any]] = {
            "enter": enter,
            "set": set_,
            "renew": lease.renew,
            "verify": verify,
            "fork": fork,
            "close_all": close_all,
            "talk": talk,
            "fail": fail,
        }
        for line in sys.stdin:
            order = json.loads(line)
            try:
                answer = verbs[order.pop("verb")](**order)
            except KilterError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(answer), flush=True)
    outcome = lease.outcome
    print(json.dumps(outcome and {"state": outcome.state, "reason": outcome.reason}), flush=True)


def _setting(*, sm_mhz: float | None = None, limit_w: float | None = None) -> Setting:
    return Setting(sm_clock_hz=None if sm_mhz is None else sm_mhz * MHZ, power_limit_w=limit_w)
