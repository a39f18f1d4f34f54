"""Long waits: the clock goes down in them, and what that costs stays within its share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kilter.clocks.plan.waits import READ_S, WaitPlan, WaitWatch, wait_plan
from kilter.clocks.plan.worth import ClockCosts
from kilter.clocks.section_card import card_of
from kilter.device.sim.profile import load_profile

TICK_S = 0.005
SENSOR_S = 0.1
CARD = card_of(load_profile("h200"), levels=12)
LOW = CARD.levels[-1]


def planned(card: ClockCosts = CARD, *, share: float = 0.05, usual_w: float = 600.0) -> WaitPlan:
    plan = made(card, share=share, usual_w=usual_w)
    assert plan is not None
    return plan


def made(
    card: ClockCosts = CARD, *, share: float = 0.05, usual_w: float = 600.0
) -> WaitPlan | None:
    return wait_plan(
        card,
        max_slowdown=share,
        usual_w=usual_w,
        compute_share=0.9,
        sensor_period_s=SENSOR_S,
    )


class Part(msgspec.Struct, frozen=True):
    """Of an iteration: some computing at the default clock, then a wait."""

    compute_s: float
    wait_s: float


class Truth:
    """A device whose clock follows commands late and whose sensor shows the past, a job on it, and
    the watch. `lost_s` is what low clocks have cost, `low_s` how long it was low."""

    def __init__(self, plan: WaitPlan, delays: Iterable[float]) -> None:
        self.watch = WaitWatch(plan, acts=True)
        self.ticks = 0
        self.lost_s = self.low_s = 0.0
        self.downs: list[float] = []
        self._delays = itertools.cycle(list(delays))
        self._low = False
        self._changes: list[tuple[float, bool]] = []
        self._shown_w = self._power_w = 0.0
        self.iteration = 0

    @property
    def now_s(self) -> float:
        return self.ticks * TICK_S

    def command(self, *, low: bool) -> None:
        latency = CARD.down if low else CARD.up
        delay_s = next(self._delays) * latency.quantile(0.95)
        self._changes = [(self.now_s + delay_s, low)]  # the last request counts

    def tick(self, *, computing: bool) -> float:
        """Progress of the work in one tick."""
        if self._changes and self._changes[0][0] <= self.now_s:
            self._low = self._changes.pop()[1]
        if computing:
            self._power_w = LOW.computing_w if self._low else CARD.computing_w
        else:
            self._power_w = LOW.waiting_w if self._low else CARD.waiting_w
        if self.ticks % round(SENSOR_S / TICK_S) == 0:
            self._shown_w = self._power_w
        if self.watch.due_s <= self.now_s + 1e-9:
            verdict = self.watch.read(self.now_s, self._shown_w)
            if verdict is not None:
                self.command(low=verdict == "down")
            if verdict == "down":
                self.downs.append(self.now_s)
        self.ticks += 1
        self.low_s += TICK_S * self._low
        speed = 1.0 / LOW.stretch if self._low else 1.0
        self.lost_s += TICK_S * (1.0 - speed) * computing
        return TICK_S * speed

    def on_time(self, iterations: int) -> None:
        """So many of a second each, all computing."""
        for _ in range(iterations):
            self.watch.passed(self.iteration, self.now_s)
            self.iteration += 1
            self.ticks += round(1.0 / TICK_S)

    def iterate(self, parts: Sequence[Part]) -> None:
        for part in parts:
            left_s = part.compute_s
            while left_s > 0.0:
                left_s -= self.tick(computing=True)
            for _ in range(round(part.wait_s / TICK_S)):
                self.tick(computing=False)
        if self.watch.low:
            self.command(low=False)
        self.watch.passed(self.iteration, self.now_s)
        self.iteration += 1


parts = st.builds(
    Part,
    st.floats(0.3, 1.5),
    st.one_of(st.floats(0.0, 0.8), st.floats(0.8, 1.6), st.floats(1.6, 9.0)),
)


@settings(max_examples=20, deadline=None)
@given(
    share=st.floats(0.002, 0.2),
    saved=st.floats(0.0, 3.0),
    iterations=st.lists(st.lists(parts, min_size=1, max_size=4), min_size=1, max_size=10),
    delays=st.lists(st.one_of(st.floats(0.01, 1.0), st.just(1.0)), min_size=1, max_size=5),
)
@example(share=0.01, saved=1.5, iterations=[[Part(0.5, 2.0)] * 4] * 4, delays=[1.0])
def test_what_is_lost_stays_within_its_share_of_the_time(
    share: float, saved: float, iterations: list[list[Part]], delays: list[float]
) -> None:
    """Also when waits come thick after a time without any, which has saved for so many returns."""
    plan = planned(share=share)
    truth = Truth(plan, delays)
    truth.on_time(max(9, round(saved * plan.return_s / share)))
    for iteration in iterations:
        truth.iterate([*iteration, Part(0.4, 0.0)])
        assert truth.lost_s <= share * truth.now_s
    for _ in range(2):
        truth.iterate([Part(1.0, 0.0)])
    lost_s = truth.lost_s
    truth.iterate([Part(1.0, 0.0)])
    assert truth.lost_s == lost_s  # never low on time


def test_an_overdue_iteration_that_computes_keeps_the_default_clock() -> None:
    truth = Truth(planned(share=0.1), [0.5])
    truth.on_time(100)
    truth.iterate([Part(20.0, 0.0)])
    assert not truth.downs
    assert truth.lost_s == 0.0


def test_long_waits_have_the_low_clock_nearly_all_the_time() -> None:
    plan = planned(share=0.02)
    truth = Truth(plan, [1.0])
    waited_s = 0.0
    for n in range(60):
        wait_s = 30.0 if n % 20 == 19 else 0.0
        waited_s += wait_s
        truth.iterate([Part(0.4, wait_s), Part(0.6, 0.0)])
    assert len(truth.downs) == 3
    late_s = 1.0 + plan.after_s + 2 * READ_S + CARD.down.quantile(0.95)
    assert truth.low_s >= waited_s - 3 * late_s
    assert 0.0 < truth.lost_s <= 3 * plan.return_s


def test_no_wait_is_seen_while_iterations_are_on_time() -> None:
    watch = WaitWatch(planned(), acts=True)
    for n in range(100):
        watch.passed(n, n * 0.4)
        if n >= 3:
            assert watch.due_s == pytest.approx(n * 0.4 + 0.6)


def test_without_a_budget_a_second_wait_keeps_the_default_clock() -> None:
    truth = Truth(planned(share=0.01), [0.5])
    for _ in range(40):
        truth.iterate([Part(1.0, 0.0)])
    truth.iterate([Part(0.4, 4.0), Part(0.6, 0.0)])
    truth.iterate([Part(0.4, 4.0), Part(0.6, 0.0)])
    assert len(truth.downs) == 1


def test_a_watch_that_was_not_called_in_time_owes_what_that_may_have_cost() -> None:
    plan = planned(share=0.05)
    watch = WaitWatch(plan, acts=True)
    for n in range(40):
        watch.passed(n, float(n))
    t_s = watch.due_s
    while watch.read(t_s, CARD.waiting_w) != "down":
        t_s += READ_S
    assert watch.read(t_s + 20.0, LOW.computing_w) == "up"
    watch.passed(40, t_s + 20.0)
    waiting_s = [t_s + 23.0 + k * READ_S for k in range(100)]  # ten seconds pay for 0.5 s only
    assert all(watch.read(at_s, CARD.waiting_w) is None for at_s in waiting_s)


def test_a_busy_moment_begins_the_wait_anew() -> None:
    watch = WaitWatch(planned(), acts=True)
    for n in range(40):
        watch.passed(n, float(n))
    t_s = 40.5
    watch.read(t_s, CARD.waiting_w)
    watch.read(t_s + 0.5 * watch.plan.after_s, CARD.computing_w)
    assert watch.read(t_s + 1.1 * watch.plan.after_s, CARD.waiting_w) is None


def test_the_low_clock_may_draw_more_than_the_profile_says() -> None:
    """Half of the expected rise over what this wait has drawn is the return to computing."""
    watch = WaitWatch(planned(), acts=True)
    for n in range(40):
        watch.passed(n, float(n))
    t_s = watch.due_s
    while watch.read(t_s, CARD.waiting_w) != "down":
        t_s += READ_S
    waits_w = LOW.waiting_w - 20.0
    for _ in range(20):
        t_s += READ_S
        assert watch.read(t_s, waits_w) is None
    assert watch.read(t_s + READ_S, waits_w + watch.plan.rise_w) == "up"


def test_in_a_dry_run_the_power_stays_that_of_the_default_clock() -> None:
    watch = WaitWatch(planned(), acts=False)
    for n in range(40):
        watch.passed(n, float(n))
    t_s = watch.due_s
    while watch.read(t_s, CARD.waiting_w) != "down":
        t_s += READ_S
    for _ in range(50):
        t_s += READ_S
        assert watch.read(t_s, CARD.waiting_w) is None
    assert watch.read(t_s + READ_S, CARD.computing_w) == "up"


def test_the_plan_pays_and_can_be_told() -> None:
    plan = planned()
    assert plan.after_s >= CARD.break_even_s
    assert CARD.waiting_w < plan.high_w < 273.0 < CARD.computing_w  # of a transfer over NVLink
    assert LOW.waiting_w < plan.low_w < LOW.computing_w
    assert planned(usual_w=300.0).high_w < plan.high_w


@pytest.mark.parametrize("card", [CARD, msgspec.structs.replace(CARD, levels=())])
def test_where_waits_cannot_pay_there_is_no_plan(card: ClockCosts) -> None:
    assert made(card, share=0.0) is None
    assert made(card, usual_w=CARD.waiting_w + 10.0) is None  # computes at the power of waiting
    assert (made(card) is None) == (not card.levels)


def test_nothing_is_due_before_the_usual_length_is_known() -> None:
    watch = WaitWatch(planned(), acts=True)
    watch.passed(0, 0.0)
    watch.passed(1, 1.0)
    assert math.isinf(watch.due_s)
