"""`kilter restore` as a user or a Slurm epilog runs it, after a death of job and watcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kilter.core.setting import Setting
from kilter.lease.journal import PATIENCE_S
from kilter.testing.box import FOUND, OWN, Box, BoxJob, find_watcher, kill_watcher
from kilter.testing.box import LOW as LOW_KNOBS

LOW = Setting(sm_clock_hz=1.2e9, power_limit_w=400.0)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfd")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    box.close()
    kill_watcher(box.state_directory)  # a test may have frozen it


@pytest.fixture
def left(box: Box) -> Box:
    """What nobody is going to put back."""
    job = box.low()
    kill_watcher(box.state_directory)
    job.kill()
    assert box.setting() == LOW
    return box


def restore(box: Box, *options: str, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kilter", "restore", *options],
        env=box.environ(**environ),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def restore_json(box: Box, *options: str, **environ: str) -> tuple[int, dict[str, Any]]:
    code, text = restore(box, "--json", *options, **environ)
    answer: dict[str, Any] = json.loads(text)
    assert answer["schema"] == "kilter.restore/1"
    assert answer["label"] == "measured"
    return code, answer


def test_it_puts_back_once_and_then_has_nothing_to_do(left: Box) -> None:
    code, answer = restore_json(left)
    [gpu] = answer["gpus"]
    assert (code, gpu["uuid"], gpu["state"], gpu["left"]) == (0, left.uuid, "restored", [])
    assert gpu["found"] == {
        "sm_clock_hz": None,
        "memory_clock_hz": None,
        "power_limit_w": 600.0,
    }
    assert gpu["pid"] == left.jobs[0].pid
    assert left.setting() == FOUND
    assert restore(left) == (0, "nothing to restore\n")


def test_only_visible_gpus_unless_all_are_asked_for(left: Box) -> None:
    code, answer = restore_json(left, CUDA_VISIBLE_DEVICES="")
    assert (code, answer["gpus"], answer["not_visible"]) == (0, [], [left.uuid])
    assert left.setting() == LOW
    code, text = restore(left, "--all", CUDA_VISIBLE_DEVICES="")
    assert code == 0
    assert "restored" in text
    assert left.setting() == FOUND


def test_a_live_run_is_named_and_left_alone(box: Box) -> None:
    job = box.low()
    code, text = restore(box, "--all")
    assert code == 0
    assert f"process {job.pid}" in text
    assert box.setting() == LOW
    job.end()


def frozen_watcher(box: Box) -> None:
    watcher = find_watcher(box.state_directory)
    assert watcher is not None
    os.kill(watcher, signal.SIGSTOP)


def low(box: Box, hold_s: float) -> BoxJob:
    job = box.start()
    job.ask("enter")
    job.ask("set", hold_s=hold_s, **LOW_KNOBS)
    return job


def let_deadline_pass(box: Box) -> None:
    """For whoever reads the lock of a job that cannot renew it, with nobody there to act."""
    holder = box.place.holder()
    assert holder is not None
    assert not holder.late
    told = box.place.lock_path.read_bytes()
    past = repr(time.monotonic() - PATIENCE_S - 1.0).encode()
    deadline = repr(holder.deadline_s).encode()
    assert told.count(deadline) == 1
    box.place.lock_path.write_bytes(told.replace(deadline, past.ljust(len(deadline))))
    holder = box.place.holder()
    assert holder is not None
    assert holder.overdue


def test_a_dead_run_whose_watcher_is_frozen_is_an_error_until_it_is_forced(box: Box) -> None:
    job = low(box, hold_s=3600.0)
    frozen_watcher(box)
    job.kill()
    code, text = restore(box, "--all")
    assert code == 1
    assert f"process {job.pid}" in text
    assert "--force" in text
    assert box.setting() == LOW
    let_deadline_pass(box)
    assert restore(box, "--all")[0] == 1
    assert restore(box, "--all", "--force")[0] == 0
    assert box.setting() == FOUND
    assert restore(box, "--all") == (0, "nothing to restore\n")


def test_a_dead_run_whose_child_keeps_the_lock_is_an_error_until_it_is_forced(box: Box) -> None:
    job = low(box, hold_s=3600.0)
    child = job.ask("fork", in_c=True)
    try:
        kill_watcher(box.state_directory)
        job.kill()
        assert restore(box, "--all")[0] == 1
        assert box.setting() == LOW
        let_deadline_pass(box)
        assert restore(box, "--all", "--force")[0] == 0
        assert box.setting() == FOUND
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_run_that_is_frozen_with_its_watcher_is_forced_after_its_deadline(box: Box) -> None:
    job = low(box, hold_s=3600.0)
    frozen_watcher(box)
    os.kill(job.pid, signal.SIGSTOP)
    code, text = restore(box, "--all", "--force")
    assert (code, box.setting()) == (0, LOW), "within its deadline it is a live run"
    assert f"process {job.pid} controls" in text
    let_deadline_pass(box)
    code, text = restore(box, "--all")
    assert code == 1
    assert "deadline" in text
    assert restore(box, "--all", "--force")[0] == 0
    assert box.setting() == FOUND


def test_a_frozen_run_whose_watcher_has_kept_the_deadline_is_no_error(box: Box) -> None:
    job = low(box, hold_s=0.05)
    os.kill(job.pid, signal.SIGSTOP)
    end = time.monotonic() + 60.0
    while box.setting() != FOUND:
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(PATIENCE_S)
    assert restore(box, "--all")[0] == 0


def test_a_renewed_run_is_not_late(box: Box) -> None:
    job = low(box, hold_s=5.0)
    assert job.ask("renew")
    holder = box.place.holder()
    assert holder is not None
    assert holder.deadline_s > time.monotonic() + 10.0
    assert restore(box, "--all", "--force")[0] == 0
    job.end()


def test_a_run_that_closes_all_descriptors_loses_the_gpu_and_nothing_of_its_own(box: Box) -> None:
    job = box.low()
    job.ask("close_all")
    assert job.ask("set", sm_mhz=900)["error"] == "Held"
    assert box.setting() == FOUND
    assert job.end()["state"] == "restored"
    files = sorted(box.root.glob("own-*"))
    assert len(files) == 24
    assert {file.read_bytes() for file in files} == {OWN}
    box.until_free()


def test_a_lost_gpu_is_an_error_and_the_journal_stays(left: Box) -> None:
    left.refuse("nvmlDevice*", code="GPU_IS_LOST")
    code, text = restore(left, "--all")
    assert code == 1
    assert "dmesg" in text
    left.obey_again()
    assert restore(left, "--all")[0] == 0
    assert left.setting() == FOUND


def test_read_only_refuses_and_says_so(left: Box) -> None:
    setters = len(left.fake.setters())
    code, text = restore(left, KILTER_READ_ONLY="1")
    assert code == 1
    assert "KILTER_READ_ONLY" in text
    assert (left.setting(), len(left.fake.setters())) == (LOW, setters)


def test_a_state_directory_that_cannot_be_used_is_one_clear_line(box: Box, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, text = restore(box, KILTER_STATE_DIR=str(tmp_path / "file" / "state"))
    assert code == 1
    assert text.count("\n") == 1
    assert "KILTER_STATE_DIR" in text
