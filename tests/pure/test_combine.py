"""Memory and clocks together: never worse than apart, within the slowdown, as simulated."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kilter.core.errors import PlanError, UsageError
from kilter.core.setting import Setting
from kilter.plan.combine import Point, combine, stretched
from kilter.plan.swap.choose import plan
from kilter.plan.swap.problem import Interval, Link, Problem
from kilter.plan.swap.simulate import simulate

DEFAULT = Point(setting=Setting(), stretch=1.0, busy_w=300.0, stalled_w=100.0)


def lower(stretch: float) -> Point:
    return Point(
        setting=Setting(sm_clock_hz=1e9 / stretch),
        stretch=stretch,
        busy_w=300.0 / stretch**1.5,
        stalled_w=100.0 / stretch**0.5,
    )


def chain(layers: int, rate: float, share: float, recompute_s: float | None = 0.3) -> Problem:
    """`layers` forward and backward, a datum of 10 bytes each over 20 bytes that stay."""
    count = 2 * layers
    resident = [20 + 10 * (min(k, count - 1 - k) + 1) for k in range(count)]
    intervals = tuple(
        Interval(
            name=f"layer{i}",
            size_bytes=10,
            after=i,
            before=count - 1 - i,
            recompute_s=recompute_s,
        )
        for i in range(layers - 1)
    )
    link = Link(to_host_bytes_per_s=rate, to_device_bytes_per_s=rate, both_bytes_per_s=2 * rate)
    return Problem((1.0,) * count, tuple(resident), intervals, link, int(share * max(resident)))


@settings(deadline=None, max_examples=30)
@given(
    layers=st.integers(3, 8),
    rate=st.floats(1.0, 40.0),
    share=st.floats(0.55, 1.0),
    bound=st.floats(0.0, 0.3),
    planner=st.sampled_from(["mix", "spanning"]),
)
def test_within_the_slowdown_and_never_worse_than_apart(
    layers, rate, share, bound, planner
) -> None:
    problem = chain(layers, rate, share)
    assume(problem.floor_bytes <= problem.budget_bytes)
    points = [DEFAULT, *(lower(1 + i / 20) for i in range(1, 7))]
    found = combine(problem, points, max_slowdown=bound, planner=planner)
    assert found.together.energy_j <= found.apart.energy_j <= found.default.energy_j
    for choice in (found.apart, found.together):
        assert choice.iteration_s <= (1 + bound) * found.default.iteration_s * (1 + 1e-12)
        assert choice.plan.peak_bytes <= problem.budget_bytes
        there = stretched(problem, choice.point.stretch)
        outcome = simulate(there, choice.plan.schedule)
        assert not outcome.faults
        assert outcome.iteration_s == pytest.approx(choice.iteration_s)


def test_a_stall_is_where_the_clock_may_fall() -> None:
    """All time is spent waiting for the link: the work may take half as long again for nothing."""
    slow = chain(6, 2.0, 0.6, recompute_s=None)
    found = combine(slow, [DEFAULT, lower(1.5)], max_slowdown=0.2, planner="spanning")
    assert found.default.plan.stall_s > 0.3 * found.default.iteration_s
    assert found.together.point.stretch == 1.5
    assert found.together.iteration_s / found.default.iteration_s < 1.2 < 1.5


def test_planned_anew_more_is_swapped_and_less_made_again() -> None:
    problem = chain(8, 4.0, 0.6, recompute_s=0.9)
    found = combine(problem, [DEFAULT, lower(1.4)], max_slowdown=1.0)
    anew = plan(stretched(problem, 1.4))
    assert anew.remade < found.default.plan.remade
    assert found.together.energy_j < found.apart.energy_j
    assert found.together.plan.swapped > found.apart.plan.swapped


def test_where_nothing_moves_only_the_work_counts() -> None:
    found = combine(chain(4, 10.0, 1.0), [DEFAULT, lower(1.05), lower(1.2)], max_slowdown=0.1)
    assert found.together.point.stretch == 1.05
    assert found.together.plan.swapped == found.together.plan.remade == 0


def test_without_allowance_the_default_stands() -> None:
    found = combine(chain(4, 10.0, 1.0), [DEFAULT, lower(1.05)], max_slowdown=0.0)
    assert found.together == found.default


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="no setting"):
        combine(chain(4, 10.0, 1.0), [], max_slowdown=0.1)
    with pytest.raises(UsageError, match="cannot be allowed"):
        combine(chain(4, 10.0, 1.0), [DEFAULT], max_slowdown=float("nan"))
    with pytest.raises(PlanError):
        combine(chain(4, 10.0, 0.2), [DEFAULT], max_slowdown=0.1)
    with pytest.raises(UsageError, match="no point"):
        Point(setting=Setting(), stretch=0.0, busy_w=1.0, stalled_w=1.0)
    with pytest.raises(UsageError, match="no point"):
        Point(setting=Setting(), stretch=1.0, busy_w=1.0, stalled_w=2.0)
