"""The conductor of sections: when its commands leave, and that the found clock comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.clocks.plan.timing import NOTHING, Command, Commanded, CommandSchedule, ScheduleArm
from kilter.clocks.plan.waits import WaitPlan
from kilter.clocks.section_conductor import Follow, SectionConductor
from kilter.clocks.section_process import CommandLog, LowWaits
from kilter.core.setting import Setting
from kilter.testing.box import until
from kilter.testing.section_box import DRY_WAIT, WAIT, SectionBox

LOW_HZ = 1.2e9
WAITING_W, COMPUTING_W = 110.0, 600.0
WAITS = WaitPlan(
    sm_clock_hz=LOW_HZ,
    after_s=0.5,
    return_s=0.2,
    share=0.05,
    high_w=200.0,
    low_w=150.0,
    rise_w=40.0,
    settle_s=0.2,
    calls_per_s=10.0,
)
T = 1.0
"""Length of an iteration."""


class Bench:
    """A conductor with a clock that the test moves, and a setter that only remembers."""

    sets = True

    def __init__(self, *, memory_clock_hz: float | None = None, **schedule: float) -> None:
        self.now_s = 0.0
        self.log: list[Commanded] = []
        self.low = False
        self.calls: list[float] = []
        self.power_w: float | None = WAITING_W
        self.conductor = SectionConductor(
            self, self.log.append, lambda: self.now_s, lambda: self.power_w
        )
        self.wanted = Setting(sm_clock_hz=LOW_HZ, memory_clock_hz=memory_clock_hz)
        self.conductor.follow(Follow(schedule=made(memory_clock_hz=memory_clock_hz, **schedule)))

    def down(self, low: Setting, hold_s: float) -> None:
        assert low == self.wanted
        self.low = True
        self.calls += low.calls * [self.now_s]

    def up(self) -> None:
        self.low = False
        self.calls += self.wanted.calls * [self.now_s]

    def until(self, t_s: float) -> None:
        """Let time pass, and act whenever something is due."""
        while self.conductor.due_s <= t_s:
            self.now_s = max(self.now_s, self.conductor.due_s)
            self.conductor.act()
        self.now_s = t_s

    def mark(self, iteration: int, t_s: float, within_s: float = 0.0) -> None:
        self.until(t_s)
        self.conductor.passed(iteration, t_s, within_s)
        self.conductor.act()

    def sent(self) -> list[tuple[str, int, float]]:
        return [(c.edge, c.iteration, round(c.t_s, 6)) for c in self.log if c.state != "left out"]


def made(
    down_s: float = 0.4,
    up_s: float = 0.7,
    hold_s: float = 0.9,
    calls_per_s: float = 10.0,
    memory_clock_hz: float | None = None,
) -> CommandSchedule:
    down = Command(
        edge="down",
        key="a",
        sm_clock_hz=LOW_HZ,
        memory_clock_hz=memory_clock_hz,
        at_s=down_s,
        lead_s=min(0.1, (up_s - down_s) / 2),
        hold_s=hold_s,
    )
    up = Command(edge="up", key="a", sm_clock_hz=None, at_s=up_s, lead_s=0.05, hold_s=0.0)
    return CommandSchedule(commands=(down, up), iteration_s=T, calls_per_s=calls_per_s)


def test_commands_leave_at_their_times_after_every_marker() -> None:
    bench = Bench()
    for i in range(3):
        bench.mark(i, i * T)
    bench.until(3 * T)
    assert bench.sent() == [
        (edge, i, i * T + at) for i in range(3) for edge, at in (("down", 0.4), ("up", 0.7))
    ]
    assert bench.log[0].edge_s == pytest.approx(0.5)
    assert not bench.low


def test_a_command_before_its_marker_leaves_in_the_iteration_before() -> None:
    bench = Bench(down_s=-0.05)
    bench.mark(0, 0.0)
    bench.until(0.96)
    assert bench.sent() == [("down", 1, 0.95)]
    bench.mark(1, 1.02)
    bench.until(1.8)
    assert ("up", 1, 1.72) in bench.sent()


def test_a_marker_that_comes_early_sends_at_once_what_belongs_before_it() -> None:
    bench = Bench(down_s=-0.05)
    bench.mark(0, 0.0)
    bench.mark(1, 0.9)
    assert bench.sent()[-1] == ("down", 1, 0.9)
    assert bench.low


def test_the_time_to_the_next_marker_is_learned() -> None:
    bench = Bench(down_s=-0.05)
    for i in range(10):
        bench.mark(i, i * 0.8)
    bench.until(9 * 0.8 + 0.76)
    assert bench.sent()[-1] == ("down", 10, 9 * 0.8 + 0.75)


def test_an_iteration_that_ends_early_puts_the_clock_back_at_once() -> None:
    bench = Bench()
    bench.mark(0, 0.0)
    bench.mark(1, 0.5)
    assert not bench.low
    assert bench.log[-1].why == "the iteration was over before"


def test_a_section_that_does_not_end_is_put_back_at_its_deadline() -> None:
    bench = Bench(up_s=50.0, hold_s=0.9)
    bench.mark(0, 0.0)
    bench.until(1.2)
    assert bench.low
    bench.until(1.31)
    assert not bench.low
    assert bench.log[-1].why == "the deadline has passed"


@pytest.mark.parametrize("memory_clock_hz", [None, 5e9], ids=["one clock", "both clocks"])
def test_calls_are_limited_and_never_leave_the_clock_low(memory_clock_hz: float | None) -> None:
    bench = Bench(down_s=0.01, up_s=0.02, calls_per_s=8.0, memory_clock_hz=memory_clock_hz)
    for i in range(100):
        bench.mark(i, i * 0.05)
    bench.until(6.0)
    for call in bench.calls:
        assert sum(call <= other < call + 1.0 for other in bench.calls) <= 8
    assert {c.why for c in bench.log if c.state == "left out"} >= {"at most 8 calls per second"}
    assert not bench.low


def test_another_schedule_puts_the_clock_back() -> None:
    bench = Bench()
    bench.mark(0, 0.0)
    bench.until(0.5)
    assert bench.low
    bench.conductor.follow(Follow(schedule=NOTHING))
    assert not bench.low
    assert bench.conductor.idle


@pytest.mark.parametrize("down_s", [0.4, -0.05])
def test_arms_rule_from_their_iterations_on(down_s: float) -> None:
    bench = Bench()
    low = made(down_s=down_s)
    arms = (ScheduleArm(first=2, schedule=low), ScheduleArm(first=4, schedule=NOTHING))
    bench.conductor.follow(Follow(schedule=NOTHING, arms=arms))
    assert not bench.conductor.idle
    for i in range(6):
        bench.mark(i, i * T)
    assert [(edge, i) for edge, i, _ in bench.sent()] == [
        ("down", 2),
        ("up", 2),
        ("down", 3),
        ("up", 3),
    ]
    assert bench.conductor.idle


@given(
    lengths=st.lists(st.floats(0.05, 3.0), min_size=1, max_size=40),
    down_s=st.floats(-0.3, 0.5),
    length_s=st.floats(0.05, 0.5),
    calls=st.floats(2.0, 20.0),
)
def test_whatever_the_iterations_do_no_low_clock_outlives_its_deadline(
    lengths: list[float], down_s: float, length_s: float, calls: float
) -> None:
    bench = Bench(down_s=down_s, up_s=down_s + length_s, hold_s=0.6, calls_per_s=calls)
    t_s = 0.0
    for i, taken_s in enumerate(lengths):
        bench.mark(i, t_s)
        t_s += taken_s
    bench.until(t_s + 5.0)  # as late as a command for the next iteration, and its deadline, may be
    assert not bench.low
    assert len(bench.calls) % 2 == 0
    for down, up in zip(bench.calls[::2], bench.calls[1::2], strict=True):
        assert up - down <= 0.6 + 1e-9


# Long waits.


def waiting(bench: Bench, iterations: int = 20) -> Bench:
    """After so many iterations on time, the present one is overdue."""
    for i in range(iterations):
        bench.mark(i, i * T)
    return bench


def waits(**schedule: float) -> Bench:
    bench = Bench(**schedule)
    planned = made(**schedule) if schedule else NOTHING
    bench.conductor.follow(Follow(schedule=planned, waits=WAITS))
    return bench


@pytest.mark.parametrize("within_s", [0.0, 0.05])
def test_a_long_wait_has_a_low_clock_until_the_marker_passes(within_s: float) -> None:
    """Also by markers whose times are not well known."""
    bench = waits()
    assert not bench.conductor.idle
    for i in range(20):
        bench.mark(i, i * T, within_s)
    assert not bench.log
    bench.until(40.0)  # ten deadlines
    assert bench.low
    bench.mark(20, 40.0, within_s)
    assert not bench.low
    down, up = bench.log
    assert (down.edge, down.key, down.state, down.iteration) == ("down", "wait", "set", 19)
    assert down.t_s == pytest.approx(19.0 + 1.5 + WAITS.after_s, abs=0.11)
    assert (up.edge, up.key, up.t_s) == ("up", "wait", 40.0)


def test_power_ends_a_wait_inside_its_iteration() -> None:
    bench = waiting(waits())
    bench.until(25.0)
    assert bench.low
    bench.power_w = COMPUTING_W
    bench.until(25.2)
    assert not bench.low
    assert "the wait is over" in bench.log[-1].why
    bench.until(60.0)
    assert len(bench.log) == 2


def test_a_long_iteration_that_computes_is_left_alone() -> None:
    bench = waits()
    bench.power_w = COMPUTING_W
    waiting(bench).until(60.0)
    assert not bench.log


def test_a_power_that_cannot_be_read_ends_all_waits() -> None:
    bench = waiting(waits())
    bench.until(25.0)
    assert bench.low
    bench.power_w = None
    bench.until(25.2)
    assert not bench.low
    bench.power_w = WAITING_W
    bench.conductor.follow(Follow(schedule=NOTHING, waits=WAITS))
    assert bench.conductor.idle


def test_another_schedule_ends_a_wait() -> None:
    bench = waiting(waits())
    bench.until(25.0)
    assert bench.low
    bench.conductor.follow(Follow(schedule=NOTHING))
    assert not bench.low
    assert bench.conductor.idle


def test_a_wait_that_nobody_renewed_ends_at_its_deadline() -> None:
    bench = waiting(waits())
    bench.until(25.0)
    assert bench.low
    bench.now_s = 30.0  # this process was stopped
    bench.conductor.act()
    assert not bench.low
    assert bench.log[-1].why == "the deadline has passed"


def test_waits_leave_the_commands_of_the_schedule_alone() -> None:
    bench = waiting(waits(down_s=0.4, up_s=0.7))
    of_schedule = bench.sent()
    assert len(of_schedule) == 2 * 19
    bench.until(30.0)
    assert bench.low
    bench.mark(20, 30.0)
    bench.until(31.0)
    keys = [line.key for line in bench.log[len(of_schedule) :]]
    assert keys == ["a", "a", "wait", "wait", "a", "a"]


def test_what_is_counted_of_waits() -> None:
    bench = waiting(waits())
    bench.until(25.0)
    bench.mark(20, 25.0)
    bench.mark(21, 26.0)
    bench.until(40.0)
    found = LowWaits()
    for line in bench.log:
        found = found.after(line)
    assert found.count == 2
    assert found.low_s == pytest.approx(25.0 - bench.log[0].t_s)
    assert found.sm_clock_hz == LOW_HZ


# Real processes that are really killed, on the fake card whose settings outlive them.


@pytest.fixture
def box(tmp_path: Path) -> Iterator[SectionBox]:
    box = SectionBox(tmp_path)
    yield box
    box.close()
    box.until_free()


def test_the_end_of_the_program_restores(box: SectionBox) -> None:
    program = box.begin()
    program.ask("mark")
    until(box.low)
    assert "restored=True" in program.ask("stop")
    assert box.found()


def test_a_conductor_that_dies_is_noticed(box: SectionBox) -> None:
    program = box.begin()
    os.kill(program.conductor, signal.SIGKILL)
    until(box.free)
    assert "the conductor has died" in program.ask("look")


def test_a_wait_on_a_card_is_seen_by_its_power_and_ends(box: SectionBox) -> None:
    """By the card's power, by the marker, and where the power cannot be read any more."""
    program = box.begin(WAIT)
    until(box.low)
    box.change(load=1.0)
    until(box.found)
    box.change(load=0.0)
    until(box.low)
    program.ask("mark")
    until(box.found)
    until(box.low)
    for call in ("nvmlDeviceGetFieldValues", "nvmlDeviceGetPowerUsage"):
        box.refuse(call, "NOT_SUPPORTED")
    until(box.found)
    assert "this device tells no power" in program.ask("look")


def test_a_dry_run_reads_the_power_and_sets_nothing(box: SectionBox) -> None:
    program = box.begin(DRY_WAIT)
    log = CommandLog(program.log)

    def waits(wanted: int) -> bool:
        log.read()
        return len(log.recent) >= wanted

    until(lambda: waits(1))
    program.ask("mark")
    until(lambda: waits(2))
    assert [(c.edge, c.key, c.state) for c in log.recent] == [
        ("down", "wait", "would set"),
        ("up", "wait", "would set"),
    ]
    assert log.waits.count == 1
    assert log.waits.low_s > 0.0
    assert not box.fake.setters()
    assert box.free()
