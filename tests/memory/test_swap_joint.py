"""State beside activations: the joint plan is about as good as the best room, and fits budgets.

All rooms of a training are planned for that, which takes long: 20 trainings, or as many as
`KILTER_TEST_PROGRAMS` says.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kilter.core.errors import PlanError
from kilter.memory.plan.choose import plan
from kilter.memory.plan.delay_loads import LOSS, delay_loads
from kilter.memory.plan.joint import JOINT_WORTH, beside, joint, offloaded_bytes
from kilter.memory.plan.problem import IdleInterval, Link, Problem
from kilter.memory.plan.simulate import simulate
from kilter.memory.plan.state import Bucket, plan_state

LINK = Link(to_host_bytes_per_s=55.0, to_device_bytes_per_s=55.0, both_bytes_per_s=100.0)
quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,  # heuristics promise nothing on every problem: a failure must be repeatable
    suppress_health_check=[HealthCheck.too_slow],
)


def training(
    layers: int, share: float, op_s: float = 0.1, recompute_s: float = 0.06, state: int = 8
) -> tuple[Problem, list[Bucket], list[int]]:
    """A stack of layers with their state, all of it on the device, and a budget between the least
    with all state away and the peak: layer `i` is updated at the end of its backward."""
    count = 2 * layers
    resident = [state * layers] * count
    intervals = []
    for i in range(layers):
        last = count - 1 - i
        for k in range(i, last + 1):
            resident[k] += 4
        if last - i >= 2:
            intervals.append(
                IdleInterval(
                    name=f"{i}", size_bytes=4, after=i, before=last, recompute_s=recompute_s
                )
            )
    at = list(range(layers, count))
    buckets = [
        Bucket(first=i, count=1, gradient_bytes=1, state_bytes=state, due_s=0.0)
        for i in range(layers)
    ]
    problem = Problem((op_s,) * count, tuple(resident), tuple(intervals), LINK, max(resident))
    least_bytes = problem.floor_bytes - state * layers + 2 * state
    budget = least_bytes + int(share * (problem.peak_bytes - least_bytes))
    return replace(problem, budget_bytes=budget), buckets, at


trainings = st.builds(
    training,
    layers=st.integers(8, 16),
    share=st.floats(0.0, 1.0),
    op_s=st.floats(0.02, 0.5),
    recompute_s=st.floats(0.0, 0.3),
    state=st.integers(2, 12),
)


@settings(quick, max_examples=int(os.environ.get("KILTER_TEST_PROGRAMS", "10")))
@given(trainings)
def test_about_as_good_as_the_best_of_all_rooms(
    case: tuple[Problem, list[Bucket], list[int]],
) -> None:
    problem, buckets, at = case
    total_bytes = sum(b.state_bytes for b in buckets)
    every = [beside(problem, buckets, at, room) for room in range(1, total_bytes + 1)]
    possible = [found.iteration_s for found in every if found is not None]
    if not possible:
        with pytest.raises(PlanError):
            joint(problem, buckets, at)
        return
    try:
        found = joint(problem, buckets, at)
    except PlanError:  # what fits is between two of the rooms tried
        assert len(possible) <= total_bytes / 8
        return
    assert found.iteration_s <= 1.1 * min(possible)
    whole = every[-1]
    if whole is not None:
        assert found.iteration_s <= (1 + JOINT_WORTH) * whole.iteration_s
        if found.state.streamed:
            assert found.iteration_s < whole.iteration_s


@quick
@given(trainings)
def test_feature_maps_and_state_fit_together(case: tuple[Problem, list[Bucket], list[int]]) -> None:
    problem, buckets, at = case
    try:
        found = joint(problem, buckets, at)
    except PlanError:
        return
    assert found.state.peak_bytes <= max(found.room_bytes, max(b.state_bytes for b in buckets))
    assert 0 <= found.taken <= 1
    assert list(found.due_s) == sorted(found.due_s)
    # What is done with it: the swapper plans with what it sees then, and what is left of the link.
    away = offloaded_bytes(found.state, buckets, at, len(problem.operation_s))
    levels = tuple(a - b for a, b in zip(problem.resident_bytes, away, strict=True))
    assert min(levels) >= 0
    rest = replace(problem, resident_bytes=levels, link=LINK.less(found.taken))
    if rest.floor_bytes <= rest.budget_bytes:
        assert plan(rest, alone=False).feasible


def test_a_budget_that_holds_everything_is_planned_with_nothing_to_move() -> None:
    problem, buckets, at = training(8, 1.0)
    bare = replace(problem, intervals=(), budget_bytes=problem.peak_bytes)
    found = beside(bare, buckets, at, sum(b.state_bytes for b in buckets))
    assert found is not None
    assert found.iteration_s == pytest.approx(problem.compute_s)


def test_state_streams_rather_than_feature_maps_being_made_again() -> None:
    """Making a layer again costs as much as its forward; the link is idle in backward."""
    problem, buckets, at = training(16, 0.3, op_s=0.5, recompute_s=0.5)
    problem = replace(problem, link=replace(LINK, to_host_bytes_per_s=1.0))
    whole = beside(problem, buckets, at, sum(b.state_bytes for b in buckets))
    found = joint(replace(problem, link=LINK), buckets, at)
    assert whole is None or found.iteration_s < whole.iteration_s


def test_nothing_streams_where_everything_fits() -> None:
    problem, buckets, at = training(12, 1.0)
    found = joint(problem, buckets, at)
    assert not found.state.streamed
    assert found.taken == 0
    assert found.iteration_s == pytest.approx(problem.compute_s)


@quick
@given(st.integers(1, 16), st.integers(1, 9), st.floats(0.1, 1.0))
def test_away_is_what_the_round_of_visits_leaves(count: int, size: int, share: float) -> None:
    buckets = [
        Bucket(first=i, count=1, gradient_bytes=1, state_bytes=size, due_s=0.1 * i)
        for i in range(count)
    ]
    try:
        found = plan_state(buckets, room_bytes=max(size, int(share * size * count)), link=LINK)
    except PlanError:
        return
    at = [3 + 2 * i for i in range(count)]
    away = offloaded_bytes(found, buckets, at, 2 * count + 4)
    assert away[0] == away[-1] == found.moved_bytes
    assert size * count - min(away) <= found.peak_bytes or not found.streamed


@quick
@given(trainings, st.floats(0.0, 0.9))
def test_unhurried_loads_are_later_and_as_fast(
    case: tuple[Problem, list[Bucket], list[int]], taken: float
) -> None:
    problem = replace(case[0], link=LINK.less(taken))
    if problem.floor_bytes > problem.budget_bytes:
        return
    schedule = plan(problem, "spanning").schedule
    before, later = simulate(problem, schedule), delay_loads(problem, schedule)
    after = simulate(problem, later)
    assert after.faults == ()
    assert after.peak_bytes <= problem.budget_bytes
    assert after.iteration_s <= (1 + LOSS) * before.iteration_s
    for mine, theirs in zip(later.moves, schedule.moves, strict=True):
        assert mine.interval == theirs.interval
        assert mine.release == theirs.release
        assert mine.load >= theirs.load
