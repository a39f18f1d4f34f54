"""`kilter restore` as a user or a Slurm epilog runs it, after a death of job and watcher."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kilter.core.setting import Setting
from kilter.testing.box import FOUND, Box, kill_watcher

LOW = Setting(sm_clock_hz=1.2e9, power_limit_w=400.0)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfd")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    box.close()


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
