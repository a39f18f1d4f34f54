"""Late loads start earlier, and never at the price of a fault or of the budget."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kilter.app.bench.memory import chain
from kilter.core.errors import PlanError
from kilter.memory.plan.choose import plan
from kilter.memory.plan.feedback import Waiting, earlier, expected, slower, slowness
from kilter.memory.plan.problem import IdleInterval, Link, Problem
from kilter.memory.plan.simulate import Move, Schedule, simulate

EVEN = Link(to_host_bytes_per_s=10.0, to_device_bytes_per_s=10.0, both_bytes_per_s=20.0)


def stack(count: int, budget: int) -> Problem:
    """Data of 10 bytes, a second each way, saved one after the other and used in reverse."""
    operations = 2 * count + 20
    level = [10 * min(k + 1, count, operations - k) for k in range(operations)]
    intervals = tuple(
        IdleInterval(name=f"{i}", size_bytes=10, after=i, before=operations - 1 - i)
        for i in range(count)
    )
    return Problem((1.0,) * operations, tuple(level), intervals, EVEN, budget)


def test_a_late_load_starts_earlier_by_what_it_was_late() -> None:
    problem = stack(4, budget=1000)
    schedule = Schedule((Move(0, 6, 20),))
    assert earlier(problem, schedule, {0: 3.5}).moves == (Move(0, 6, 16),)
    assert earlier(problem, schedule, {}).moves == schedule.moves


def test_what_the_link_serves_before_it_makes_room() -> None:
    """Number 1 is due before number 0, and its load ends as the other's begins."""
    problem = stack(4, budget=1000)
    schedule = Schedule((Move(0, 6, 21), Move(1, 6, 20)))
    assert earlier(problem, schedule, {0: 2.0}).moves == (Move(0, 6, 19), Move(1, 6, 18))
    apart = Schedule((Move(0, 6, 21), Move(1, 6, 10)))
    assert earlier(problem, apart, {0: 2.0}).moves == (Move(0, 6, 19), Move(1, 6, 10))


def test_the_budget_is_the_limit() -> None:
    problem = stack(4, budget=1000)
    full = replace(
        problem, resident_bytes=(40,) * 18 + problem.resident_bytes[18:], budget_bytes=30
    )
    schedule = Schedule((Move(0, 4, 20),))
    assert earlier(full, schedule, {0: 10.0}).moves == (Move(0, 4, 20),)
    roomy = replace(full, budget_bytes=40)
    assert earlier(roomy, schedule, {0: 10.0}).moves == (Move(0, 4, 10),)


def test_not_before_it_has_left() -> None:
    problem = stack(4, budget=1000)
    assert earlier(problem, Schedule((Move(0, 6, 8),)), {0: 9.0}).moves == (Move(0, 6, 7),)


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    operations=st.integers(16, 80),
    ratio=st.floats(0.5, 8.0),
    budget=st.floats(0.2, 0.9),
    seed=st.integers(0, 50),
    late=st.lists(st.floats(0.0, 0.1), min_size=40, max_size=40),
)
def test_no_fault_and_no_byte_above_the_budget(
    operations: int, ratio: float, budget: float, seed: int, late: list[float]
) -> None:
    problem = chain(operations, ratio, budget, seed=seed)
    try:
        schedule = plan(problem, "mix").schedule
    except PlanError:
        assume(False)
    late_s = {move.interval: late[i % 40] for i, move in enumerate(schedule.moves)}
    found = earlier(problem, schedule, late_s)
    assert simulate(problem, found).faults == ()
    before = {move.interval: move for move in schedule.moves}
    assert {move.interval for move in found.moves} == {*before}
    assert all(move.load <= before[move.interval].load for move in found.moves)
    assert all(move.release == before[move.interval].release for move in found.moves)


@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    ratio=st.floats(1.0, 8.0),
    budget=st.floats(0.3, 0.8),
    out=st.floats(1.0, 4.0),
    back=st.floats(1.0, 4.0),
)
def test_a_link_is_never_taken_for_slower_than_it_is(
    ratio: float, budget: float, out: float, back: float
) -> None:
    """From what a plan for another link waits for on the real one."""
    problem = chain(64, ratio, budget, seed=1)
    schedule = plan(problem, "mix").schedule
    real = replace(problem, link=slower(problem.link, out=out, back=back))
    late = expected(real, schedule).beyond(expected(problem, schedule))
    # Both at once are slower than each alone, which no table of two rates tells apart.
    least = 1 / problem.link.shared + 0.01
    found = slowness(problem, schedule, late)
    assert found[0] <= out * least
    assert found[1] <= back * least


def test_what_was_expected_is_not_late() -> None:
    expect = Waiting(out_s=1.0, in_s={0: 2.0, 1: 0.5})
    found = Waiting(out_s=1.5, in_s={0: 1.0, 1: 0.75, 2: 0.25})
    assert found.beyond(expect) == Waiting(out_s=0.5, in_s={1: 0.25, 2: 0.25})
    assert found.total_s == 3.5
