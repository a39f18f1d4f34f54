"""Loads no earlier than they have to be: for a link that others use, and a host that is busy.

The planners load as early as memory allows. That is mostly one moment, where backward begins:
optimizer state that streams would then wait behind tensors that are not needed for long, and the
host would issue all loads in a row. Moved later, in the order of the deadlines, they are issued one
by one and leave gaps for others. Where nothing else uses the link it costs nothing.
"""

from __future__ import annotations

from dataclasses import replace

from kilter.memory.plan.problem import Problem
from kilter.memory.plan.simulate import Schedule, simulate

LOSS = 1e-3
"""A schedule that would lose more of the iteration than this stays as it is."""


def delay_loads(problem: Problem, schedule: Schedule, *, ahead: float = 0.0) -> Schedule:
    """The same moves with later loads: each as late as its deadline and the loads behind it allow,
    less the time of one more transfer of its size, or less this share of the iteration where that
    is more. Memory is never above what it was."""
    if not schedule.moves:
        return schedule
    outcome = simulate(problem, schedule)
    ends = [span.end_s for span in outcome.spans if span.lane == "compute"]
    begins = [0.0, *ends[:-1]]
    due = problem.deadlines(frozenset(schedule.recomputed))
    moves = []
    ahead_s = ahead * outcome.iteration_s
    start_s = outcome.iteration_s
    operation = len(begins) - 1
    for move in sorted(schedule.moves, key=lambda m: (due[m.interval], m.interval), reverse=True):
        transfer_s = problem.link.in_s(problem.intervals[move.interval].size_bytes)
        start_s = min(start_s, begins[due[move.interval]]) - transfer_s
        operation = min(operation, due[move.interval])
        while operation > move.load and begins[operation] > start_s - max(transfer_s, ahead_s):
            operation -= 1
        moves.append(replace(move, load=max(move.load, operation)))
    later = Schedule(moves=tuple(sorted(moves)), recomputed=schedule.recomputed)
    found = simulate(problem, later)
    kept = found.iteration_s <= (1 + LOSS) * outcome.iteration_s and not found.faults
    return later if kept else schedule
