"""Dividing the batch: when it wins, what it changes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kilter.core.errors import PlanError, UsageError
from kilter.memory.plan.microbatch import divide, divided
from kilter.memory.plan.problem import IdleInterval, Link, Problem

SLOW = Link(to_host_bytes_per_s=1.0, to_device_bytes_per_s=1.0, both_bytes_per_s=2.0)

FAST = Link(to_host_bytes_per_s=20.0, to_device_bytes_per_s=20.0, both_bytes_per_s=40.0)


def chain(*, budget: int, fixed: int = 100) -> Problem:
    """Ten layers of 40 bytes over 100 fixed bytes; nothing can be recomputed, the link is slow."""
    count = 20
    resident = [fixed + 40 * (min(k, count - 1 - k) + 1) for k in range(count)]
    intervals = tuple(
        IdleInterval(name=f"layer{i}", size_bytes=40, after=i, before=count - 1 - i)
        for i in range(9)
    )
    return Problem((1.0,) * count, tuple(resident), intervals, SLOW, budget)


def best(problem: Problem, **options: object) -> int:
    settings = {"fixed_bytes": 100, "fixed_s": 0.01, "batch_norm": False} | options
    return divide(256, problem, **settings).pieces  # type: ignore[arg-type]


def test_a_batch_that_fits_stays_whole() -> None:
    found = divide(256, chain(budget=500), fixed_bytes=100, fixed_s=0.01, batch_norm=False)
    assert (found.pieces, found.effects) == (1, ())


def test_pieces_win_over_a_slow_link_and_say_what_they_change() -> None:
    found = divide(256, chain(budget=300), fixed_bytes=100, fixed_s=0.01, batch_norm=False)
    assert found.pieces == 2
    assert found.plan.peak_bytes <= 300
    assert "order of summation" in found.effects


def test_more_pieces_as_the_budget_shrinks_and_never_more_than_needed() -> None:
    assert [best(chain(budget=b)) for b in (500, 300, 200, 150)] == [1, 2, 4, 8]


def test_a_large_fixed_time_speaks_for_swapping() -> None:
    assert best(chain(budget=490), fixed_s=0.0) == 2
    problem = replace(chain(budget=490), link=FAST)
    assert best(problem, fixed_s=1.0) == 1


def test_batch_norm_is_refused_unless_allowed() -> None:
    assert best(chain(budget=300), batch_norm=True) == 1
    assert best(chain(budget=300), batch_norm=True, allow_batch_norm=True) == 2
    with pytest.raises(PlanError, match="batch norm"):
        best(chain(budget=120), batch_norm=True)


def test_an_indivisible_batch_is_left_whole_or_refused() -> None:
    problem = chain(budget=300)
    found = divide(7, problem, fixed_bytes=100, fixed_s=0.01, batch_norm=False)
    assert found.pieces == 1
    with pytest.raises(UsageError):
        divide(0, problem, fixed_bytes=100, fixed_s=0.01, batch_norm=False)


def test_pieces_keep_time_and_share_memory() -> None:
    problem = chain(budget=500)
    four = divided(problem, 4, fixed_bytes=100, fixed_s=0.0)
    assert four.compute_s == pytest.approx(problem.compute_s)
    assert four.peak_bytes == 100 + 400 // 4
    assert len(four.intervals) == 4 * len(problem.intervals)
