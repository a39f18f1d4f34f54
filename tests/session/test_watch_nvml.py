"""`kilter watch` as a real process, beside a real process as the job, on cards that are a file.

The job is no Python of ours that could mark anything: its card is busy and less busy, in turn,
until the test takes the job's lamp away or kills it. The card, its sensors and the watch live in
virtual time, which goes on with each reading of the sensors: what the watch finds does not depend
on how fast or loaded the machine is. Processes, signals and the lease are real.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kilter.core.events import Block, Decided, Started, Stopped, read_events
from kilter.testing.fake_card import Card
from kilter.testing.fake_nvml import FakeNvml

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc, pidfd and flock of Linux")

KILTER = str(Path(sys.executable).with_name("kilter"))
PATIENCE_S = 900.0

# Sensors of 40 ms, iterations of 0.4 s, and fewer of them: a low clock after some ten seconds.
FASTER = """
import kilter.device.nvidia, kilter.clocks.job_telemetry, kilter.clocks.outside
import kilter.clocks.plan.rhythm
kilter.device.nvidia.SENSOR_PERIOD_S = {9: 0.04}
kilter.clocks.outside.FIRST_LOOK_S = 2.0
kilter.clocks.outside.OBSERVED_PERIODS = 10
kilter.clocks.job_telemetry.IDLE_S = 2.0
kilter.clocks.plan.rhythm.LEAST_WATCHED_ITERATIONS = 8
kilter.clocks.plan.rhythm.LEAST_WATCHED_BLOCK_S = 2.0
kilter.clocks.plan.rhythm.MOST_BLOCK_S = 4.0
"""

# Each time that the watch waits for new readings, its sensors are read 40 ms later.
VIRTUAL_TIME = """
import os, threading, types
import kilter.app.cli.watch, kilter.device.nvidia, kilter.session.watched_gpu
from kilter.observe.sampler import Sampler
from kilter.testing.fake_nvml import FakeNvml

fake, samplers, ticks = FakeNvml({path!r}), [], 0

def now_s():
    return ticks * 0.04

class Stop(threading.Event):
    def wait(self, timeout):
        global ticks
        ticks += 1
        with fake.edit() as state:
            state.virtual_s = now_s()
            for card in state.cards:
                works = any(os.path.exists(f"/proc/{{pid}}") for pid in card.pids)
                card.load = works * (1.0 if now_s() % 0.4 < 0.25 else 0.3)
        for sampler in samplers:
            sampler.poll()
        return self.is_set()

Sampler.start = lambda self: samplers.append(self)
kilter.app.cli.watch.threading = types.SimpleNamespace(Event=Stop)
kilter.session.watched_gpu.monotonic = now_s
kilter.device.nvidia.time = types.SimpleNamespace(monotonic=now_s)
"""

JOB = """
import os, sys, time
from kilter.testing.fake_nvml import FakeNvml

with FakeNvml(sys.argv[1]).edit() as state:
    for card in map(int, sys.argv[2].split(",")):
        state.cards[card].pids += (os.getpid(),)
while os.path.exists("lamp"):
    time.sleep(0.05)
"""


class Box:
    """A directory with cards, a job, and a watch of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fake = FakeNvml.create(root / "cards.json", Card(), Card())
        (root / "lamp").touch()
        (root / "job.py").write_text(JOB)
        (root / "faster").mkdir()
        (root / "faster" / "sitecustomize.py").write_text(
            FASTER + VIRTUAL_TIME.format(path=str(self.fake.path))
        )
        environ = self.fake.environ()
        environ["PYTHONPATH"] = f"{root / 'faster'}{os.pathsep}{environ['PYTHONPATH']}"
        environ |= {"KILTER_STATE_DIR": str(root / "state"), "OMP_NUM_THREADS": "1"}
        environ.pop("KILTER_READ_ONLY", None)
        self.environ = environ
        self.job: subprocess.Popen[str] | None = None
        self.watch: subprocess.Popen[str] | None = None

    @property
    def run(self) -> Path:
        return self.root / "run"

    def start_job(self, cards: str = "0") -> int:
        self.job = self._start(sys.executable, "job.py", str(self.fake.path), cards)
        self.wait_for(lambda: any(card.pids for card in self.fake.state().cards), self.job)
        return self.job.pid

    def start_watch(self, *flags: str) -> None:
        command = (KILTER, "watch", "--max-slowdown", "20%", "--out", str(self.run), *flags)
        self.watch = self._start(*command)

    def _start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, what: Callable[[], object], alive: subprocess.Popen[str]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < end_s
            assert alive.poll() is None, alive.communicate()
            time.sleep(0.05)

    def wait_for_a_low_clock(self) -> None:
        assert self.watch is not None
        self.wait_for(lambda: self.lock() is not None, self.watch)

    def lock(self, card: int = 0) -> tuple[int, int] | None:
        return self.fake.state().cards[card].sm_lock_mhz

    def memory_lock(self) -> tuple[int, int] | None:
        return self.fake.state().cards[0].memory_lock_mhz

    def end(self) -> tuple[int, str, str]:
        assert self.watch is not None
        out, err = self.watch.communicate(timeout=PATIENCE_S)
        return self.watch.returncode, out, err

    def is_as_found(self) -> bool:
        card = self.fake.state().cards[0]
        return (card.sm_lock_mhz, card.memory_lock_mhz, card.limit_mw) in (
            (None, None, None),
            (None, None, card.default_limit_mw),
        )

    def close(self) -> None:
        for process in (self.watch, self.job):
            if process is not None:
                process.kill()
                process.communicate()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    box.close()


def test_it_governs_a_job_and_restores_when_the_job_ends(box: Box) -> None:
    pid = box.start_job()
    box.start_watch("--pid", str(pid), "--json")
    box.wait_for_a_low_clock()
    (box.root / "lamp").unlink()
    code, out, err = box.end()
    assert code == 0, err
    assert box.is_as_found()
    document = json.loads(out)
    assert document["schema"] == "kilter.watch/1"
    assert document["ended"] == f"process {pid} has ended"
    assert document["period_s"] == pytest.approx(0.4, rel=0.05)
    assert document["report"]["restored"] is True
    events = list(read_events(box.run / "events-rank0.jsonl"))
    assert isinstance(events[0], Started)
    assert events[0].mode == "govern"
    assert any(isinstance(event, Decided) for event in events)
    assert isinstance(events[-1], Stopped)
    for block in (event for event in events if isinstance(event, Block)):
        assert block.iteration_s == pytest.approx(0.4, rel=0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_and_reports(box: Box, number: int) -> None:
    box.start_job()
    box.start_watch("--gpu", "0")
    box.wait_for_a_low_clock()
    assert box.watch is not None
    box.watch.send_signal(number)
    code, _, err = box.end()
    assert code == 0, err
    assert "it was stopped" in err
    assert box.is_as_found()
    assert (box.run / "report.html").exists()


def test_a_killed_watch_leaves_nothing(box: Box) -> None:
    box.start_job()
    box.start_watch("--gpu", "0")
    box.wait_for_a_low_clock()
    assert box.watch is not None
    assert box.job is not None
    box.watch.kill()
    box.wait_for(box.is_as_found, box.job)


@pytest.mark.parametrize("seed", range(4))
def test_a_job_killed_at_any_moment_leaves_the_card_as_found(box: Box, seed: int) -> None:
    pid = box.start_job()
    box.start_watch(*(("--pid", str(pid)) if seed % 2 else ("--gpu", "0")))
    assert box.watch is not None
    assert box.job is not None
    moment_s = random.Random(seed).uniform(1.0, 15.0)
    box.wait_for(lambda: box.fake.state().virtual_s > moment_s, box.watch)
    box.job.kill()
    box.job.communicate()
    code, _, err = box.end()
    assert code == 0, err
    assert box.is_as_found()


def test_another_process_on_the_card_ends_it(box: Box) -> None:
    box.start_job()
    box.start_watch("--gpu", "0")
    box.wait_for_a_low_clock()
    with box.fake.edit() as state:
        state.cards[0].pids += (os.getpid(),)  # not a child of the job
    code, _, err = box.end()
    assert code == 0, err
    assert f"process {os.getpid()} has come onto the GPU" in err
    assert box.is_as_found()


def test_a_gpu_that_is_governed_already_is_refused(box: Box) -> None:
    box.start_job()
    box.start_watch("--gpu", "0")
    assert box.watch is not None
    box.wait_for(lambda: (box.run / "events-rank0.jsonl").exists(), box.watch)
    second = subprocess.run(
        [KILTER, "watch", "--gpu", "0", "--out", str(box.root / "second")],
        env=box.environ,
        cwd=box.root,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert second.returncode == 1
    assert len(second.stderr.splitlines()) == 1
    assert str(box.watch.pid) in second.stderr
