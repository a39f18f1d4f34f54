"""Dividing the batch: when it wins, and what becomes of times and levels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kilter.memory.plan.choose import plan
from kilter.memory.plan.microbatch import divided
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


def test_pieces_fit_where_the_whole_batch_does_not() -> None:
    problem = chain(budget=300)
    assert plan(problem).stall_s > 0
    halves = plan(divided(problem, 2, fixed_bytes=100, fixed_s=0.01))
    assert halves.peak_bytes <= 300
    assert halves.iteration_s < plan(problem).iteration_s


def test_a_large_fixed_time_speaks_against_pieces() -> None:
    problem = replace(chain(budget=490), link=FAST)
    halves = plan(divided(problem, 2, fixed_bytes=100, fixed_s=1.0))
    assert halves.iteration_s > plan(problem).iteration_s


def test_pieces_keep_time_and_share_memory() -> None:
    problem = chain(budget=500)
    four = divided(problem, 4, fixed_bytes=100, fixed_s=0.0)
    assert four.compute_s == pytest.approx(problem.compute_s)
    assert four.peak_bytes == 100 + 400 // 4
    assert len(four.intervals) == 4 * len(problem.intervals)
