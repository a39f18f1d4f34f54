"""Dividing the batch before planning ([0068] of the patent: 256 into 4 times 64).

Each piece runs forward and backward with its share of the activations; gradients add up. This is
never bitwise the undivided run: sums are taken in another order and dropout draws other masks, both
within the noise of training. (`kilter.divided` carries it out.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kilter.memory.plan.choose import MemoryPlan
from kilter.memory.plan.problem import IdleInterval, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A number of equal pieces, and the plan for an iteration made of them."""

    pieces: int
    plan: MemoryPlan


def divided(problem: Problem, pieces: int, *, fixed_bytes: int, fixed_s: float) -> Problem:
    """One iteration of `pieces` passes, each with its share of the time and of the activations."""
    if pieces == 1:
        return problem
    count = len(problem.operation_s)
    times = tuple(max(0.0, t - fixed_s) / pieces + min(t, fixed_s) for t in problem.operation_s)
    levels = tuple(
        fixed_bytes + -(-max(0, level - fixed_bytes) // pieces) if level > fixed_bytes else level
        for level in problem.resident_bytes
    )

    def share(interval: IdleInterval, number: int) -> IdleInterval:
        cost = interval.recompute_s
        return replace(
            interval,
            name=f"{interval.name} of piece {number}",
            size_bytes=max(1, interval.size_bytes // pieces),
            after=interval.after + number * count,
            before=interval.before + number * count,
            recompute_s=(
                None if cost is None else max(0.0, cost - fixed_s) / pieces + min(cost, fixed_s)
            ),
            needs=tuple(other + number * len(problem.intervals) for other in interval.needs),
        )

    return Problem(
        operation_s=times * pieces,
        resident_bytes=levels * pieces,
        intervals=tuple(share(j, number) for number in range(pieces) for j in problem.intervals),
        link=problem.link,
        budget_bytes=problem.budget_bytes,
    )
