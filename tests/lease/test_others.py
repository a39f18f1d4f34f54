"""Root's `kilter restore --all` and what other users have left, or have planted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kilter.core.setting import Setting
from kilter.lease.others import user_directories
from kilter.testing.box import FOUND, Box, kill_watcher

STRANGER = 61004
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="other users' files need root"
)


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Box]:
    """What a dead job of the stranger and its dead watcher have left."""
    box = Box(tmp_path)
    directory = tmp_path / "tmp" / f"kilter-{STRANGER}"
    directory.mkdir(parents=True, mode=0o700)
    job = box.low(KILTER_STATE_DIR=str(directory))
    kill_watcher(directory)
    job.kill()
    for path in (directory, *directory.iterdir()):
        os.chown(path, STRANGER, STRANGER)
    yield box
    box.close()


def theirs(box: Box) -> Path:
    return box.root / "tmp" / f"kilter-{STRANGER}"


def kilter(box: Box, *words: str) -> tuple[int, str]:
    environ = box.environ(
        TMPDIR=str(box.root / "tmp"), KILTER_BASELINE=str(box.root / "baseline.toml")
    )
    done = subprocess.run(
        [sys.executable, "-m", "kilter", *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def baseline(box: Box) -> None:
    text = f'[gpu."{box.uuid}"]\npower-limit-w = 600.0\n'
    (box.root / "baseline.toml").write_text(text)


def test_without_a_baseline_it_is_named_and_left(left: Box) -> None:
    code, told = kilter(left, "restore", "--all")
    assert code == 1
    assert f"user {STRANGER}" in told
    assert "kilter baseline save" in told
    assert left.setting() != FOUND


def test_with_a_baseline_the_gpu_is_put_to_it_once(left: Box) -> None:
    baseline(left)
    code, told = kilter(left, "restore", "--all")
    assert (code, left.setting()) == (0, FOUND), told
    assert kilter(left, "restore", "--all") == (0, "nothing to restore\n")


def test_a_forged_journal_sets_nothing_but_the_baseline(left: Box) -> None:
    baseline(left)
    [path] = theirs(left).glob("*.json")
    journal = msgspec.json.decode(path.read_bytes())
    journal["found"] = {"power_limit_w": 200.0}
    path.write_bytes(msgspec.json.encode(journal))
    assert kilter(left, "restore", "--all")[0] == 0
    assert left.setting() == FOUND
    limits = [call.arguments for call in left.fake.setters() if "PowerManagement" in call.name]
    assert (200_000,) not in limits


def test_planted_links_lead_nowhere(left: Box) -> None:
    baseline(left)
    victim = left.root / "victim.json"
    victim.write_text("precious")
    [path] = theirs(left).glob("*.json")
    path.unlink()
    path.symlink_to(victim)
    [lock] = theirs(left).glob("*.lock")
    lock.unlink()
    lock.symlink_to(victim)
    assert kilter(left, "restore", "--all")[0] == 1
    assert victim.read_text() == "precious"
    assert left.setting() == Setting(sm_clock_hz=1.2e9, power_limit_w=400.0)


def test_only_directories_of_the_user_they_are_named_after(tmp_path: Path) -> None:
    users, temporary = tmp_path / "user", tmp_path / "tmp"
    for path in (users / "61005" / "kilter", temporary / "kilter-61005", temporary / "kilter-7"):
        path.mkdir(parents=True)
        os.chown(path, 61005, 61005)
    (temporary / "kilter-8").symlink_to("/etc")
    found = list(user_directories(users, temporary))
    assert found == [users / "61005" / "kilter", temporary / "kilter-61005"]
