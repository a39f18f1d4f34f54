"""Memory and clocks planned together: copies make stalls, and in a stall the clock costs nothing.

At a lower SM clock the work of an iteration takes longer and the copies do not. So copies hide
behind the work that waited for them before, and what had to be made again can be swapped instead:
the iteration is stretched by less than its work. The memory schedule is therefore planned anew for
each clock, and a clock is judged by the iteration that it then makes.

What a clock does to work and power is given, and the same for each operation: clocks hold for the
whole iteration, since switching takes longer than most stalls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kilter.core.errors import PlanError, UsageError
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.plan.swap.choose import MemoryPlan, described, plan
from kilter.plan.swap.problem import Problem
from kilter.plan.swap.simulate import Schedule, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A setting, and what the device is like there."""

    setting: Setting
    stretch: float
    """Time of the work over its time in the problem, which is that of the default."""
    busy_w: float
    """Power while it computes."""
    stalled_w: float
    """Power while it waits for a copy."""

    def __post_init__(self) -> None:
        if not (self.stretch > 0 and self.busy_w >= self.stalled_w >= 0):
            raise UsageError(f"{self} is no point: work takes time, and takes more than waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One setting with a memory schedule. Simulated, SI units."""

    point: Point
    plan: MemoryPlan

    @property
    def iteration_s(self) -> float:
        return self.plan.iteration_s

    @property
    def energy_j(self) -> float:
        stall_s = self.plan.stall_s
        return self.point.busy_w * (self.iteration_s - stall_s) + self.point.stalled_w * stall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """What is planned together, and what it is held against."""

    default: Choice
    """The first point, which is the card's own."""
    apart: Choice
    """Best clock for the default's schedule, as it is."""
    together: Choice
    """Best clock with a schedule of its own."""
    label: Label = Label.SIMULATED


def combine(
    problem: Problem, points: Sequence[Point], *, max_slowdown: float, planner: str = "mix"
) -> Combined:
    """The setting and the schedule that take the least energy, in an iteration that takes at most
    `1 + max_slowdown` times as long as the default's with a schedule for the same budget.

    The first point is the default. `PlanError` if nothing fits the budget.
    """
    if not points:
        raise UsageError("there is no setting to choose from")
    if not max_slowdown >= 0:
        raise UsageError(f"a slowdown of {max_slowdown} cannot be allowed")
    default = Choice(point=points[0], plan=plan(stretched(problem, points[0].stretch), planner))
    if not default.plan.feasible:
        raise PlanError(f"planner {planner} finds no schedule for this budget")
    limit_s = (1 + max_slowdown) * default.iteration_s
    # No schedule is faster than the work alone: the rest need not be planned.
    possible = [p for p in points[1:] if p.stretch * problem.compute_s <= limit_s]
    kept = [_with(problem, p, default.plan.schedule, planner) for p in possible]
    anew = [Choice(point=p, plan=plan(stretched(problem, p.stretch), planner)) for p in possible]
    apart = _best(limit_s, default, kept)
    return Combined(default=default, apart=apart, together=_best(limit_s, apart, [*kept, *anew]))


def stretched(problem: Problem, factor: float) -> Problem:
    """The same iteration where all work takes `factor` times as long. The link is what it is."""
    return replace(
        problem,
        operation_s=tuple(factor * time_s for time_s in problem.operation_s),
        intervals=tuple(
            j if j.recompute_s is None else replace(j, recompute_s=factor * j.recompute_s)
            for j in problem.intervals
        ),
    )


def _with(problem: Problem, point: Point, schedule: Schedule, planner: str) -> Choice:
    there = stretched(problem, point.stretch)
    outcome = simulate(there, schedule)
    return Choice(point=point, plan=described(there, schedule, outcome, planner=planner))


def _best(limit_s: float, otherwise: Choice, choices: Iterable[Choice]) -> Choice:
    fit = [c for c in choices if c.plan.feasible and c.iteration_s <= limit_s]
    return min([otherwise, *fit], key=lambda c: c.energy_j)
