"""Dividing the batch before planning ([0068] of the patent: 256 into 4 times 64).

Each piece runs forward and backward with its share of the activations; gradients add up. This is
never bitwise the undivided run: sums are taken in another order and dropout draws other masks, both
within the noise of training. Batch norm is another matter: its statistics become those of a piece,
a change in kind, refused unless the caller allows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kilter.core.errors import PlanError, UsageError
from kilter.memory.plan.choose import MemoryPlan, plan
from kilter.memory.plan.problem import IdleInterval, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The best number of pieces, and the plan for an iteration made of them."""

    pieces: int
    plan: MemoryPlan
    effects: tuple[str, ...]
    """How results differ from the undivided run; empty for one piece."""


def divide(
    batch: int,
    problem: Problem,
    *,
    fixed_bytes: int,
    fixed_s: float,
    batch_norm: bool,
    allow_batch_norm: bool = False,
    pieces: tuple[int, ...] = (1, 2, 4, 8, 16),
    planner: str = "mix",
) -> Division:
    """The number of equal pieces whose plan is fastest.

    `fixed_bytes` do not depend on the batch (weights, gradients, optimizer state); `fixed_s` is the
    time an operation takes however small its batch. `PlanError` if no allowed number of pieces
    fits the budget.
    """
    if batch < 1 or fixed_bytes < 0 or fixed_s < 0:
        raise UsageError("batch must be positive, fixed bytes and time not negative")
    refused = batch_norm and not allow_batch_norm
    best: Division | None = None
    reason = "no number of pieces fits the budget"
    for count in pieces:
        if batch % count or (count > 1 and refused):
            continue
        try:
            found = plan(divided(problem, count, fixed_bytes=fixed_bytes, fixed_s=fixed_s), planner)
        except PlanError as error:
            reason = str(error)
            continue
        if best is None or found.iteration_s < best.plan.iteration_s:
            effects: tuple[str, ...] = ("order of summation", "dropout masks", "mean over pieces")
            if batch_norm:
                effects += ("batch norm statistics of a piece",)
            best = Division(pieces=count, plan=found, effects=effects if count > 1 else ())
    if best is None:
        if refused:
            reason += "; pieces would change batch norm's statistics and were not allowed"
        raise PlanError(reason)
    return best


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
