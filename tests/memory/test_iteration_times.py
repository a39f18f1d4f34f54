"""Iterations are timed by what they were: plain, under a plan, or with a pass that has none."""

from __future__ import annotations

from kilter.memory.iteration_times import FEW, MEASURED, MIXED, IterationTimes
from kilter.observe.end_times import Iteration


def run(times: IterationTimes, plans: list[bool], duration_s: float) -> None:
    """Iterations end, one after the other, with or without a plan in force."""
    for now in plans:
        times.index += 1
        times.planned(now=now)
        iteration = Iteration(index=times.index, end_s=0.0, duration_s=duration_s)
        times.add([iteration], lambda _: False)


def test_an_iteration_with_a_pass_that_has_no_plan_is_not_taken_for_one_under_a_plan() -> None:
    times = IterationTimes()
    run(times, [False, False, True], 9.0)  # they are watched, and the plan comes
    run(times, [True, True], 1.0)
    run(times, [False], 4.0)
    run(times, [True], 2.0)  # whether it began under the plan is not known
    run(times, [True], 1.0)
    assert list(times.planned_s) == [1.0, 1.0, 1.0]
    assert list(times.others_s) == [4.0]
    assert times.counts == {"planned": 3, "others": 1}
    times.begin_plan()
    assert not times.others_s
    assert times.counts == {"planned": 0, "others": 0}


def test_few_iterations_are_enough_where_they_are_alike() -> None:
    times = IterationTimes()
    times.planned_s.extend([0.200] * (FEW - 1))
    assert times.measured_s() is None
    times.planned_s.append(0.201)
    assert times.measured_s() == 0.200
    times.begin_plan()
    times.planned_s.extend([0.240, *[0.200] * (MEASURED - 2)])
    assert times.measured_s() is None
    times.planned_s.append(0.200)
    assert times.measured_s() == 0.200


def test_where_shapes_change_all_iterations_count_but_plain_and_watched_ones() -> None:
    times = IterationTimes()
    times.was_plain()
    times.planned(now=False)
    times.add([Iteration(index=-1, end_s=0.0, duration_s=9.0)], lambda _: False)
    run(times, [True, True, False], 1.0)
    times.index += 1
    times.planned(now=False, watched=True)
    times.add([Iteration(index=times.index, end_s=0.0, duration_s=9.0)], lambda _: False)
    assert list(times.plain_s) == [9.0]
    assert list(times.mixed_s) == [1.0, 1.0, 1.0]
    assert times.mixed_measured_s() is None
    run(times, [False] * MIXED, 2.0)
    assert times.mixed_measured_s() == 2.0
    unknown = IterationTimes()  # under a size as the budget none is plain
    run(unknown, [True, True, True], 1.0)
    assert list(unknown.mixed_s) == [1.0, 1.0, 1.0]
