"""`kilter baseline`, and what a lease makes of it, with real processes on fake cards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kilter.core.setting import Setting
from kilter.testing.box import FOUND, LOW, Box, kill_watcher
from kilter.testing.daemon_box import DaemonBox

LOWERED = Setting(sm_clock_hz=1.2e9, power_limit_w=400.0)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    box.close()
    kill_watcher(box.state_directory)


def baseline(box: Box, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kilter", "baseline", *arguments],
        env=box.environ(KILTER_BASELINE=str(box.root / "baseline.toml")),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_leftovers_of_a_container_are_never_taken_for_what_was_found(box: Box) -> None:
    """The ratchet: each container's death takes its watcher and its journal along."""
    assert baseline(box, "save")[0] == 0
    job = box.low(KILTER_BASELINE=str(box.root / "baseline.toml"))
    kill_watcher(box.state_directory)
    job.kill()
    shutil.rmtree(box.state_directory)
    box.state_directory.mkdir(mode=0o700)
    assert box.setting() == LOWERED
    following = box.start("next job", KILTER_BASELINE=str(box.root / "baseline.toml"))
    answer = following.ask("enter")
    assert answer["error"] == "Held"
    assert "400 W, and the operator's baseline says 600 W" in answer["message"]
    following.kill()
    assert baseline(box, "show")[0] == 1
    code, text = baseline(box, "restore")
    assert (code, box.setting()) == (0, FOUND), text
    assert baseline(box, "show")[0] == 0


def test_a_clock_that_the_operator_has_capped_is_capped_again(box: Box) -> None:
    with box.fake.edit() as state:
        state.cards[0].sm_lock_mhz = (345, 1410)
    code, text = baseline(box, "save", "--sm-clock-mhz", "1410", "--json")
    assert code == 0, text
    assert json.loads(text)["gpus"][0]["baseline"]["sm-clock-mhz"] == 1410
    box.low(KILTER_BASELINE=str(box.root / "baseline.toml")).end()
    assert box.setting() == Setting(sm_clock_hz=1.41e9, power_limit_w=600.0)


def test_a_gpu_under_a_lease_is_left_alone(box: Box) -> None:
    assert baseline(box, "save")[0] == 0
    box.low(KILTER_BASELINE=str(box.root / "baseline.toml"))
    code, text = baseline(box, "restore")
    assert code == 1
    assert "controls this GPU" in text
    assert box.setting() == LOWERED


@pytest.mark.parametrize("text", ["[gpu]\nx = 1", "\xff", "gpu = [", '[gpu."a"]\nlimit = 1'])
def test_a_bad_baseline_is_one_line(box: Box, text: str) -> None:
    (box.root / "baseline.toml").write_text(text)
    code, told = baseline(box, "show")
    assert (code, len(told.splitlines())) == (1, 1)
    assert "baseline.toml" in told


def test_an_unknown_gpu_or_clock_is_wrong_usage(box: Box) -> None:
    assert baseline(box, "save", "--gpu", "7")[0] == 2
    assert baseline(box, "save", "--sm-clock-mhz", "1411")[0] == 2
    assert not (box.root / "baseline.toml").exists()


def test_the_daemon_refuses_leftovers_too(tmp_path: Path) -> None:
    box = DaemonBox(tmp_path)
    path = tmp_path / "baseline.toml"
    path.write_text(f'[gpu."{box.uuid}"]\npower-limit-w = 700.0\n')
    path.chmod(0o644)
    try:
        job = box.job()
        job.ask("enter")
        answer = job.ask("set", **LOW)
        assert answer["error"] == "Held"
        assert "baseline says 700 W" in answer["message"]
        assert box.fake.setters() == []
    finally:
        box.close()
