"""`kilter daemon` and its clients as real processes, on fake cards that only root may set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kilter.app.bench.daemon_faults import DAEMON_ACCIDENTS
from kilter.app.bench.faults import try_out
from kilter.app.bench.random_faults import RANDOM_DAEMON_ACCIDENTS
from kilter.core.setting import Setting
from kilter.testing.box import FOUND, LOW
from kilter.testing.daemon_box import DaemonBox

LOWERED = Setting(sm_clock_hz=1.2e9, power_limit_w=400.0)
ALICE, BOB = 61001, 61002
"""Numbers without an account, as a container has them."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs SO_PEERCRED and pidfd")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="jobs of other users need root")

MakeBox = Callable[..., DaemonBox]


@pytest.fixture
def make_box() -> Iterator[MakeBox]:
    """In a directory that other users can reach."""
    boxes: list[DaemonBox] = []
    with tempfile.TemporaryDirectory(prefix="kilter-daemon-") as root:

        def make(**options: object) -> DaemonBox:
            place = Path(root, str(len(boxes)))
            place.mkdir()
            boxes.append(DaemonBox(place, **options))  # type: ignore[arg-type]
            return boxes[-1]

        Path(root).chmod(0o755)
        yield make
        for box in boxes:
            box.close()


def until(condition: Callable[[], bool], timeout_s: float = 55.0) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s, "the condition never came true"
        time.sleep(0.01)


def test_a_job_sets_through_the_daemon_and_its_end_puts_back(make_box: MakeBox) -> None:
    box = make_box()
    job = box.low_job()
    assert box.setting() == LOWERED
    assert box.last_setter() == "daemon"
    assert job.end()["state"] == "restored"
    assert box.setting() == FOUND
    [was_set] = box.audited("set")
    [restored] = box.audited("restored")
    assert (was_set["pid"], was_set["uid"], was_set["gpu"]) == (job.pid, os.geteuid(), box.uuid)
    assert was_set["setting"]["sm_clock_hz"] == 1.2e9
    assert restored["pid"] == job.pid
    assert restored["time"] >= was_set["time"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_dead_job_is_put_back(make_box: MakeBox, number: int) -> None:
    box = make_box()
    job = box.low_job()
    assert box.setting() == LOWERED
    job.signal(number)
    until(lambda: box.setting() == FOUND)
    assert box.setting() == FOUND


def test_a_forked_child_does_not_keep_the_lease(make_box: MakeBox) -> None:
    box = make_box()
    job = box.low_job()
    child = job.ask("fork", in_c=True)
    job.kill()
    try:
        until(lambda: box.setting() == FOUND)
        assert Path("/proc", str(child)).exists()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_job_that_hangs_past_its_deadline_is_put_back_and_may_go_on(make_box: MakeBox) -> None:
    box = make_box()
    job = box.job()
    job.ask("enter")
    job.ask("set", hold_s=0.3, **LOW)
    until(lambda: box.setting() == FOUND)
    assert job.ask("renew") is False
    assert job.ask("set", **LOW) is None
    assert box.setting() == LOWERED
    job.end()
    assert box.setting() == FOUND


def test_a_stopped_job_is_put_back(make_box: MakeBox) -> None:
    box = make_box()
    job = box.job()
    job.ask("enter")
    assert job.ask("set", hold_s=0.5, **LOW) is None
    os.kill(job.pid, signal.SIGSTOP)
    until(lambda: box.setting() == FOUND)
    assert box.setting() == FOUND


def test_renewing_keeps_a_setting_beyond_its_first_deadline(make_box: MakeBox) -> None:
    box = make_box()
    job = box.job()
    job.ask("enter")

    def renewed() -> bool:
        """Anew where a busy machine let the first deadline pass before it was renewed."""
        job.ask("set", hold_s=0.3, **LOW)
        return job.ask("renew", hold_s=60.0) is True

    until(renewed)
    time.sleep(0.5)
    assert box.setting() == LOWERED


def test_a_killed_daemon_is_followed_by_one_that_puts_back(make_box: MakeBox) -> None:
    box = make_box()
    job = box.low_job()
    box.kill_daemon()
    assert box.setting() == LOWERED
    box.start_daemon()
    assert box.setting() == FOUND
    # The job learns that its setting is gone, and may ask for it again.
    assert job.ask("renew") is False
    assert job.ask("set", **LOW) is None
    assert box.setting() == LOWERED
    job.end()
    assert box.setting() == FOUND


def test_killed_together_with_the_job(make_box: MakeBox) -> None:
    box = make_box()
    job = box.low_job()
    box.kill_daemon()
    job.kill()
    box.start_daemon()
    assert box.setting() == FOUND


def test_restore_puts_back_what_a_killed_daemon_has_left(make_box: MakeBox) -> None:
    box = make_box()
    box.low_job()
    box.kill_daemon()
    assert box.restore() == 0
    assert box.setting() == FOUND


def test_the_end_of_the_daemon_puts_back(make_box: MakeBox) -> None:
    box = make_box()
    box.low_job()
    assert box.end_daemon() == 0
    assert box.setting() == FOUND


def test_only_one_daemon(make_box: MakeBox) -> None:
    box = make_box()
    arguments = ["--config", box.config, "--socket", box.root / "2", "--audit", box.audit]
    second = subprocess.run(
        [sys.executable, "-m", "kilter", "daemon", *map(str, arguments)],
        env=box.environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 1
    assert "another kilter daemon" in second.stderr


def test_without_a_process_on_the_gpu_nothing_is_set(make_box: MakeBox) -> None:
    box = make_box()
    job = box.job(computes=False)
    assert job.ask("enter") is None
    answer = job.ask("set", **LOW)
    assert answer["error"] == "NotPermitted"
    assert "no process of yours computes" in answer["message"]
    assert box.fake.setters() == []


@pytest.mark.parametrize("knobs", [{"sm_mhz": 345}, {"limit_w": 200}, {"sm_mhz": 510}])
def test_outside_the_policy_nothing_is_set(make_box: MakeBox, knobs: dict[str, float]) -> None:
    box = make_box()
    job = box.job()
    job.ask("enter")
    answer = job.ask("set", **knobs)
    assert answer["error"] == "NotPermitted"
    assert "outside the operator's policy" in answer["message"]
    assert box.fake.setters() == []


def test_mig_is_refused(make_box: MakeBox) -> None:
    box = make_box()
    with box.fake.edit() as state:
        state.cards[0].mig = True
    job = box.job()
    answer = job.ask("enter")
    assert answer["error"] == "NotPermitted"
    assert "MIG" in answer["message"]


def test_an_administrators_limit_is_left_alone(make_box: MakeBox) -> None:
    box = make_box()
    job = box.low_job()
    with box.fake.edit() as state:
        state.cards[0].limit_mw = 500_000
    job.kill()
    until(lambda: box.setting() == Setting(power_limit_w=500.0))
    box.until_free()
    assert box.setting() == Setting(power_limit_w=500.0)


def test_no_set_without_an_audit_log(make_box: MakeBox) -> None:
    box = make_box()
    box.audit.unlink()
    box.audit.symlink_to(box.root / "elsewhere")
    job = box.job()
    job.ask("enter")
    assert job.ask("set", **LOW)["error"] == "FileError" or box.fake.setters() == []
    assert box.fake.setters() == []
    assert not (box.root / "elsewhere").exists()


@needs_root
def test_two_users_govern_a_gpu_each_and_cannot_touch_the_others(make_box: MakeBox) -> None:
    box = make_box(cards=2, uids=(ALICE, BOB))
    alice = box.low_job("alice", uid=ALICE, card=0)
    bob = box.low_job("bob", uid=BOB, card=1)
    assert (box.setting(0), box.setting(1)) == (LOWERED, LOWERED)
    intruder = box.job("intruder", uid=BOB, card=0, computes=False)
    intruder.ask("enter")
    assert intruder.ask("set", sm_mhz=900)["error"] in ("Held", "NotPermitted")
    assert box.setting(0) == LOWERED
    for call in box.fake.setters():
        assert call.pid == box.daemon.pid  # no user has set anything directly
    alice.kill()
    until(lambda: box.setting(0) == FOUND)
    assert box.setting(1) == LOWERED
    bob.kill()
    until(lambda: box.setting(1) == FOUND)


@needs_root
def test_a_gpu_that_another_user_computes_on_is_refused(make_box: MakeBox) -> None:
    box = make_box(uids=(ALICE, BOB))
    box.job("bob", uid=BOB)
    alice = box.job("alice", uid=ALICE)
    assert alice.ask("enter") is None
    answer = alice.ask("set", **LOW)
    assert answer["error"] == "NotPermitted"
    assert f"of user {BOB} computes on this GPU, too" in answer["message"]


@needs_root
def test_another_users_process_ends_the_lease_at_the_next_renewal(make_box: MakeBox) -> None:
    box = make_box(uids=(ALICE, BOB))
    alice = box.low_job("alice", uid=ALICE)
    box.job("bob", uid=BOB)
    assert alice.ask("renew")["error"] == "NotPermitted"
    assert box.setting() == FOUND


@needs_root
def test_a_user_without_a_rule_is_refused(make_box: MakeBox) -> None:
    box = make_box(uids=(ALICE,))
    bob = box.job("bob", uid=BOB)
    answer = bob.ask("enter")
    assert answer["error"] == "NotPermitted"
    assert f"does not name user {BOB}" in answer["message"]


def check(box: DaemonBox, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kilter", "daemon", "--config", str(box.config), *words],
        env=box.environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_check_explains_a_decision(make_box: MakeBox) -> None:
    box = make_box()
    me = str(os.geteuid())
    code, text = check(box, "check", me, "0")
    assert code == 1
    assert "may set later" in text
    assert "no process of yours computes" in text
    assert "600 to 1980 MHz" in text
    box.job()
    code, text = check(box, "--json", "check", me, box.uuid)
    answer = json.loads(text)
    assert (code, answer["may"], answer["now"], answer["reason"]) == (0, True, True, None)
    code, text = check(box, "check", "61009", "0")
    assert code == 1
    assert "does not name user 61009" in text
    assert check(box, "check", "nobody-of-that-name", "0")[0] == 2
    assert check(box, "check", me, "7")[0] == 2
    assert check(box, "chekc", me, "0")[0] == 2


@pytest.mark.parametrize(
    "text",
    ["[[allow]]\nuser = ['a']", "not toml", "[[allow]]\nsm-clock-mhz = [900, 600]", "\xff" * 3],
)
def test_a_bad_policy_is_one_line(make_box: MakeBox, text: str) -> None:
    box = make_box()
    box.config.write_text(text)
    code, told = check(box, "check", "0", "0")
    assert code == 1
    assert len(told.splitlines()) == 1
    assert str(box.config) in told


def test_a_policy_that_others_may_write_is_not_obeyed(make_box: MakeBox) -> None:
    box = make_box()
    box.config.chmod(0o666)
    code, told = check(box, "check", "0", "0")
    assert code == 1
    assert "writable by others" in told


@needs_root
def test_a_changed_policy_is_read_on_sighup(make_box: MakeBox) -> None:
    box = make_box(uids=(ALICE,))
    assert "does not name" not in str(box.job(uid=ALICE).ask("enter"))
    box.config.write_text("")
    box.daemon.send_signal(signal.SIGHUP)
    until(lambda: "does not name" in str(box.job(uid=ALICE).ask("enter")))
    assert "does not name" in str(box.job(uid=ALICE).ask("enter"))


@pytest.mark.parametrize("name", DAEMON_ACCIDENTS)
def test_row_of_the_bench(name: str, tmp_path: Path) -> None:
    row = try_out(name, DAEMON_ACCIDENTS[name], DaemonBox(tmp_path, cards=2))
    assert row.ok, row


@pytest.mark.parametrize("name", RANDOM_DAEMON_ACCIDENTS)
def test_random_moments(name: str, tmp_path: Path) -> None:
    row = try_out(name, RANDOM_DAEMON_ACCIDENTS[name], DaemonBox(tmp_path, cards=2), 3)
    assert row.ok, row
