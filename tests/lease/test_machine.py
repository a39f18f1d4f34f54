"""One holder per GPU and machine: other users, other state directories, what others plant."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kilter.lease.machine import machine_directory, take_for_root
from kilter.lease.risks import risks
from kilter.testing.box import FOUND, Box, BoxJob

STRANGER = 61003
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and flock")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="jobs of other users need root")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    box = Box(tmp_path)
    yield box
    box.close()


def elsewhere(box: Box) -> BoxJob:
    directory = box.root / "another state"
    directory.mkdir(mode=0o700)
    return box.start(KILTER_STATE_DIR=str(directory))


def test_a_job_with_another_state_directory_is_refused_and_sets_nothing(box: Box) -> None:
    job = box.low()
    low = box.setting()
    answer = elsewhere(box).ask("enter")
    assert answer["error"] == "Held"
    assert "with another state directory" in answer["message"]
    assert box.setting() == low
    assert job.end()["state"] == "restored"
    assert box.setting() == FOUND


def test_a_lock_that_a_cleaner_has_removed_ends_the_lease(box: Box) -> None:
    job = box.low()
    assert box.place.machine is not None
    shutil.rmtree(box.place.machine)
    assert job.ask("set", sm_mhz=900)["error"] == "Held"
    assert box.setting() == FOUND


@needs_root
def test_two_users_with_the_right_to_set_do_not_meet_on_a_gpu() -> None:
    """Each with a state directory of its own; the cards permit both."""
    with tempfile.TemporaryDirectory(prefix="kilter-machine-") as root:
        box = Box(Path(root))
        box.root.chmod(0o1777)
        for name in ("cards.json", "cards.json.lock", "cards.json.calls"):
            (box.root / name).touch()
            (box.root / name).chmod(0o666)
        first = box.low()
        directory = box.root / "of the stranger"
        directory.mkdir(mode=0o700)
        os.chown(directory, STRANGER, STRANGER)
        second = BoxJob(box, {"KILTER_STATE_DIR": str(directory)}, uid=STRANGER)
        box.jobs.append(second)
        answer = second.ask("enter")
        assert answer["error"] == "Held"
        assert "another state directory" in answer["message"]
        assert first.end()["state"] == "restored"
        assert second.ask("enter") is None  # and now root has to wait
        assert box.start().ask("enter")["error"] == "Held"
        box.close()


@needs_root
def test_no_user_can_lock_a_gpu_once_the_daemon_has_the_place(tmp_path: Path) -> None:
    place = machine_directory({"KILTER_LOCK_DIR": str(tmp_path / "machine")})
    assert place is not None
    assert place.stat().st_mode & 0o7777 == 0o1777
    (place / "GPU-1.lock").touch(0o644)
    take_for_root(place)
    pid = os.fork()
    if pid == 0:
        os.setresuid(STRANGER, STRANGER, STRANGER)
        try:
            fcntl.flock(os.open(place / "GPU-1.lock", os.O_RDONLY), fcntl.LOCK_EX)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


@needs_root
def test_a_place_that_another_user_has_made_is_none(tmp_path: Path) -> None:
    place = tmp_path / "machine"
    place.mkdir()
    os.chown(place, STRANGER, STRANGER)
    environ = {"KILTER_LOCK_DIR": str(place)}
    assert machine_directory(environ) is None
    [risk] = [risk for risk in risks(environ) if "other users" in risk]
    assert f"install -d -m 1777 {place}" in risk


def test_a_place_that_others_may_change_or_a_link_is_none(tmp_path: Path) -> None:
    place = tmp_path / "machine"
    place.mkdir()
    place.chmod(0o777)
    assert machine_directory({"KILTER_LOCK_DIR": str(place)}) is None
    place.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(place)
    assert machine_directory({"KILTER_LOCK_DIR": str(link)}) is None


def test_something_planted_that_is_no_file_sets_nothing(box: Box) -> None:
    assert box.place.machine_path is not None
    os.mkfifo(box.place.machine_path)
    assert box.start().ask("enter")["error"] == "FileError"
    assert box.fake.setters() == []


@pytest.mark.parametrize(
    ("namespace", "group", "shared"),
    [
        ("pid:[4026531836]", "0::/user.slice/user-1000.slice/session-3.scope", None),
        ("pid:[4026532999]", "0::/", "one container"),
        ("pid:[4026531836]", "0::/system.slice/slurmstepd.scope/job_7/step_0", "cgroup"),
        ("pid:[4026531836]", "0::/kubepods.slice/pod1/cri-containerd-ab.scope", "cgroup"),
    ],
)
def test_a_watcher_that_dies_with_the_job_is_said(
    tmp_path: Path, namespace: str, group: str, shared: str | None
) -> None:
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to(namespace)
    (tmp_path / "self" / "cgroup").write_text(f"{group}\n")
    (tmp_path / "machine").mkdir()
    told = risks({"KILTER_LOCK_DIR": str(tmp_path / "machine")}, tmp_path)
    assert [shared in risk for risk in told] == ([] if shared is None else [True])


UNSHARE = shutil.which("unshare")


@needs_root
@pytest.mark.skipif(UNSHARE is None, reason="needs unshare(1)")
def test_doctor_in_a_pid_namespace_says_that_the_watcher_dies_with_it(box: Box) -> None:
    command = [UNSHARE, "--pid", "--fork", "--mount-proc", sys.executable, "-m", "kilter", "doctor"]
    done = subprocess.run(
        [str(word) for word in command],
        env=box.environ(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "both are in one container" in done.stdout, done.stdout + done.stderr
