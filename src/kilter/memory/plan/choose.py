"""Run a planner by name and say what its schedule will do: the `MemoryPlan`."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from kilter.core.errors import PlanError, UsageError
from kilter.core.label import Label
from kilter.core.memory_record import PlanFigures
from kilter.memory.plan.delay_loads import delay_loads
from kilter.memory.plan.exact import exact, relax
from kilter.memory.plan.literal import literal
from kilter.memory.plan.mix import mix
from kilter.memory.plan.problem import Problem, aligned
from kilter.memory.plan.simulate import Schedule, SimulatedPass, simulate
from kilter.memory.plan.spanning import spanning

PLANNERS: dict[str, Callable[[Problem], Schedule]] = {
    "mix": mix,
    "spanning": spanning,
    "literal": literal,
    "exact": exact,
}
AHEAD_S = 0.1
"""Loads are issued by this share of the iteration before they would have to be: times vary."""
AHEAD_OF_OTHERS = 0.04
"""Where others use the link, it is this share: so much that a load may find one of their transfers
(a bucket of optimizer state) under way, and so little that those transfers need not wait behind a
queue of loads."""
SWAP_ONLY = frozenset({"spanning", "literal"})


class MemoryPlan(PlanFigures, frozen=True, kw_only=True):
    """A schedule, with what the simulator says about it. Predicted numbers, SI units."""

    schedule: Schedule
    recomputed: int
    """So many tensors are recomputed, those of a call of a module among them one by one."""
    transfer_s: float
    """All transfers take this, each direction on its own."""
    bound_s: float | None = None
    """No schedule of this kind is faster; None if it was not asked for or HiGHS is missing."""
    solve_s: float | None = None
    label: Label = Label.SIMULATED

    @property
    def swapped(self) -> int:
        return len(self.schedule.moves)

    @property
    def hidden(self) -> float:
        """Share of the transfers' time that compute hides, 1 when nothing moves."""
        moved = self.out_bytes + self.in_bytes
        return 1.0 if not moved else max(0.0, 1.0 - self.stall_s / self.transfer_s)


def plan(
    problem: Problem,
    planner: str = "mix",
    *,
    bound: bool = False,
    clock: Callable[[], float] | None = None,
) -> MemoryPlan:
    """The plan of one planner; beside state that streams, with loads that leave gaps for it on the
    link. (What the patent says, `literal`, is left as it says it.)
    `clock` times the planner (`solve_s`); planning itself reads none.

    `UsageError` for an unknown planner or a bound without HiGHS; `PlanError` if nothing fits.
    """
    if planner not in PLANNERS:
        raise UsageError(f"planner {planner!r} is not one of {', '.join(PLANNERS)}")
    begin = clock() if clock else 0.0
    alone = not any(interval.wraps for interval in problem.intervals)
    sees_streams = alone or planner in ("mix", "spanning")
    schedule = PLANNERS[planner](problem if sees_streams else problem.at_rest)
    if planner != "literal":
        schedule = delay_loads(problem, schedule, ahead=AHEAD_S if alone else AHEAD_OF_OTHERS)
    solve_s = clock() - begin if clock else None
    found = described(problem, schedule, simulate(problem, schedule), planner=planner)
    bound_s = relax(problem, recompute=planner not in SWAP_ONLY).bound_s if bound else None
    return replace(found, solve_s=solve_s, bound_s=bound_s)


def described(
    problem: Problem, schedule: Schedule, outcome: SimulatedPass, *, planner: str
) -> MemoryPlan:
    """The plan value of a schedule and its simulated outcome."""
    if outcome.faults and outcome.peak_bytes <= problem.budget_bytes:
        raise PlanError(f"planner {planner} made a wrong schedule: {outcome.faults[0]}")
    moved = [problem.intervals[move.interval] for move in schedule.moves]
    return MemoryPlan(
        planner=planner,
        schedule=schedule,
        recomputed=problem.tensors(schedule.recomputed),
        feasible=not outcome.faults,
        budget_bytes=problem.budget_bytes,
        peak_bytes=outcome.peak_bytes,
        peak_before_bytes=problem.peak_bytes,
        iteration_s=outcome.iteration_s,
        compute_s=problem.compute_s,
        stall_s=outcome.stall_s,
        recompute_s=outcome.recompute_s,
        out_bytes=sum(interval.size_bytes for interval in moved),
        in_bytes=sum(interval.size_bytes for interval in moved),
        host_bytes=arena(problem, schedule)[1],
        transfer_s=sum(
            problem.link.in_s(j.size_bytes) + problem.link.out_s(j.size_bytes) for j in moved
        ),
    )


def arena(problem: Problem, schedule: Schedule) -> tuple[dict[int, int], int]:
    """Where each offloaded interval lies in one host arena, and how large that must be.

    First fit by decreasing size over the time that an interval has bytes on the host: from the end
    of the operation that it follows to its next use.
    """
    spans = sorted(
        (-problem.intervals[move.interval].size_bytes, move.interval) for move in schedule.moves
    )
    placed: list[tuple[int, int, int, int]] = []  # start, stop (operations); low, high (bytes)
    offsets: dict[int, int] = {}
    total = 0
    for negative, index in spans:
        interval = problem.intervals[index]
        size = aligned(-negative)
        low = 0
        beside = sorted(
            (used_low, used_high)
            for start, stop, used_low, used_high in placed
            if start <= interval.before and interval.after <= stop
        )
        for used_low, used_high in beside:
            if used_low - low >= size:
                break
            low = max(low, used_high)
        offsets[index] = low
        placed.append((interval.after, interval.before, low, low + size))
        total = max(total, low + size)
    return offsets, total
