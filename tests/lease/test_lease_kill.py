"""Really killed processes: a job, its watcher, or both, at the lines of the lease's protocol.

The card is a file, so it keeps what the dead have set. Which lines are tried is generated: a first
run counts them, then they are taken evenly; `KILTER_TEST_ALL_LINES=1` takes every one (minutes).
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kilter.app.bench.faults import ACCIDENTS, try_out
from kilter.app.bench.faults_of_trust import TRUST_ACCIDENTS
from kilter.app.bench.random_faults import RANDOM_ACCIDENTS
from kilter.device.nvidia import NvidiaDevice
from kilter.lease.journal import Journal, restore_all, start_ticks
from kilter.testing.box import FOUND, Box, find_watcher
from kilter.testing.fake_nvml import shim_path

HERE = Path(__file__).parent / "kill_at_line"
NEVER = 10**9
TRIED = 16
"""Lines per test, unless all are asked for."""
TIMEOUT_S = 60.0
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs /proc, pidfd and flock as Linux has them"
)


class Victims:
    """A process that forks jobs on demand; see `kill_at_line/victims.py`."""

    def __init__(self) -> None:
        paths = [str(HERE), str(shim_path()), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "victims.py")],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @contextmanager
    def job(self, box: Box, **order: Any) -> Iterator[int]:
        """A job that runs while the block runs; it is dead afterwards."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        environ = box.environ(**order.pop("environ", {}))
        environ["PYTHONPATH"] = os.pathsep.join([str(HERE), environ["PYTHONPATH"]])
        order |= {"uuid": box.uuid, "environ": environ, "report": str(box.root / "report")}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        yield int(self._process.stdout.readline())
        assert self._process.stdout.readline() == "over\n"

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[tuple[ThreadPoolExecutor, Callable[[], Victims]]]:
    """A few at once: most of the time is spent waiting for processes to start."""
    mine = threading.local()
    all_victims: list[Victims] = []

    def victims() -> Victims:
        if not hasattr(mine, "victims"):
            mine.victims = Victims()
            all_victims.append(mine.victims)
        return mine.victims  # type: ignore[no-any-return]

    with ThreadPoolExecutor(max_workers=3) as executor:
        yield executor, victims
    for each in all_victims:
        each.close()


@pytest.fixture(autouse=True)
def fake_cards_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KILTER_READ_ONLY", raising=False)


def run_job(victims: Victims, box: Box, at: int, *, both: bool) -> str:
    with victims.job(box, role="job", at=at, both=both):
        pass
    return (box.root / "report").read_text()


def lines(total: str) -> range:
    """Which of them are tried."""
    word, _, number = total.partition(" ")
    assert word == "count", total
    every = 1 if os.environ.get("KILTER_TEST_ALL_LINES") else math.ceil(int(number) / TRIED)
    return range(1, int(number) + 1, every)


def heal(box: Box) -> None:
    """What `kilter restore` does."""

    def open_device(journal: Journal) -> NvidiaDevice:
        return NvidiaDevice(journal.uuid, nvml=box.fake, privilege=lambda: None)

    for outcome in restore_all(box.state_directory, open_device=open_device):
        assert outcome.restored, outcome


def until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up_s, "the condition never came true"
        time.sleep(0.001)


def box_at(root: Path, name: object) -> Box:
    path = root / str(name)
    path.mkdir()
    return Box(path)


def nonce_of(box: Box) -> str:
    journal = box.place.read()
    assert journal is not None
    return journal.nonce


def test_a_job_killed_at_any_line_is_put_back_by_its_watcher(pool: Any, tmp_path: Path) -> None:
    executor, victims = pool
    count = run_job(victims(), box_at(tmp_path, "count"), NEVER, both=False)

    def check(at: int) -> None:
        box = box_at(tmp_path, at)
        where = run_job(victims(), box, at, both=False)
        box.until_free()
        if box.setting() != FOUND or box.place.journal_path.exists():
            # Nothing may have been set without a watcher; a journal alone is for the next start.
            assert box.fake.setters() == [], where
            heal(box)
        assert box.setting() == FOUND, where
        assert not box.place.journal_path.exists(), where

    list(executor.map(check, lines(count)))


def test_job_and_watcher_killed_at_any_line_are_healed_later(pool: Any, tmp_path: Path) -> None:
    executor, victims = pool
    count = run_job(victims(), box_at(tmp_path, "count"), NEVER, both=False)

    def check(at: int) -> None:
        box = box_at(tmp_path, at)
        where = run_job(victims(), box, at, both=True)
        box.until_free()
        heal(box)
        assert box.setting() == FOUND, where
        assert not box.place.journal_path.exists(), where

    list(executor.map(check, lines(count)))


@pytest.mark.parametrize("hold_s", [60.0, 0.02], ids=["after a death", "after a deadline"])
def test_a_watcher_killed_at_any_line_leaves_it_to_the_next_start(
    pool: Any, tmp_path: Path, hold_s: float
) -> None:
    executor, victims = pool

    def run_watcher(box: Box, at: int) -> str:
        report = box.root / "watcher report"
        environ = {"KILL_WATCHER_AT": str(at), "KILL_WATCHER_REPORT": str(report)}
        with victims().job(box, role="watcher", hold_s=hold_s, environ=environ) as job:
            if hold_s < 60.0:
                # A hanging job: its deadline passes, or its watcher dies over it.
                until(
                    lambda: (
                        report.exists()
                        or start_ticks(job) is None
                        or (bool(box.fake.calls("nvmlDeviceSetPower*")) and box.setting() == FOUND)
                    )
                )
                if start_ticks(job) is not None:
                    os.kill(job, signal.SIGKILL)
        box.until_free()
        until(lambda: report.exists() or find_watcher(box.state_directory) is None)
        return report.read_text() if report.exists() else "died before it was up"

    count = run_watcher(box_at(tmp_path, "count"), NEVER)

    def check(at: int) -> None:
        box = box_at(tmp_path, at)
        where = run_watcher(box, at)
        heal(box)
        assert box.setting() == FOUND, where
        assert not box.place.journal_path.exists(), where

    list(executor.map(check, lines(count)))


def test_a_stopped_watcher_is_replaced_and_does_no_harm_when_it_goes_on(tmp_path: Path) -> None:
    """It sees its connection closed while the job lives, under a journal that is no longer its."""
    box = Box(tmp_path)
    job = box.low()
    stopped = find_watcher(box.state_directory)
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    nonce = nonce_of(box)
    until(lambda: job.ask("renew") and nonce_of(box) != nonce)  # until it hears no more
    os.kill(stopped, signal.SIGCONT)
    until(lambda: start_ticks(stopped) is None)
    low = box.setting()
    job.kill()
    box.until_free()
    assert low != FOUND
    assert box.setting() == FOUND


EVERY = ACCIDENTS | TRUST_ACCIDENTS


@pytest.mark.parametrize("name", EVERY)
def test_accidents(name: str, tmp_path: Path) -> None:
    """The rows of `kilter bench faults`."""
    row = try_out(name, EVERY[name], Box(tmp_path))
    assert row.ok, row


@pytest.mark.parametrize("name", RANDOM_ACCIDENTS)
def test_random_moments(name: str, tmp_path: Path) -> None:
    row = try_out(name, RANDOM_ACCIDENTS[name], Box(tmp_path), 3)
    assert row.ok, row
