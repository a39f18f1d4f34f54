"""When intervals are offloaded and prefetched: turns a choice of intervals into a schedule.

Memory is decided in program order and never exceeds the budget. An interval's memory is freed as
late as the budget allows, so that its transfer has time to finish; it is loaded as early as the
budget allows, in the order of the deadlines, so that the load is done in time. An interval that the
budget never forces out before its next use stays: both of its transfers are cancelled. What wraps
around the iteration is always moved, at visits only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from math import inf

import numpy as np

from kilter.memory.plan.problem import Problem
from kilter.memory.plan.simulate import Move, Schedule, SimulatedPass, simulate


def judged(
    problem: Problem,
    offloaded: Iterable[int],
    recomputed: frozenset[int] = frozenset(),
    left_s: float = inf,
    rounds: int = 2,
) -> tuple[Schedule, SimulatedPass] | None:
    """A schedule that offloads (a part of) `offloaded` and recomputes `recomputed`, and what the
    simulator says of it; None if they free too little for the budget, or what counts for offloading
    (`Problem.moved_s`) is `left_s` or more.

    Each round but the first knows from the simulator when transfers are complete: their memory is
    free at once then, so that loads may start earlier. The best schedule is returned.
    """
    chosen = sorted((*offloaded, *problem.streaming))
    arrival = _undelayed(problem)
    best: tuple[Schedule, SimulatedPass] | None = None
    for _ in range(rounds):
        moves = _moves(problem, chosen, recomputed, arrival)
        if moves is None or problem.moved_s * len(moves) >= left_s:
            return best
        schedule = Schedule(moves=moves, recomputed=tuple(sorted(recomputed)))
        outcome = simulate(problem, schedule)
        if best is None or outcome.iteration_s < best[1].iteration_s:
            best = schedule, outcome
        if outcome.stall_s <= 1e-9 * outcome.iteration_s:
            break
        starts = [span.start_s for span in outcome.spans if span.lane == "compute"]
        found = {
            span.index: bisect_left(starts, span.end_s)
            for span in outcome.spans
            if span.lane == "out"
        }
        if found == arrival:
            break
        arrival = found
    return best


def _undelayed(problem: Problem) -> dict[int, int]:
    """The operations by which copies of what wraps are complete if nothing delays them."""
    link, found = problem.link, {}
    ends = np.cumsum(problem.operation_s if problem.streaming else ())
    for index in problem.streaming:
        interval = problem.intervals[index]
        end_s = ends[interval.after] + link.out_s(interval.size_bytes) / link.shared
        found[index] = int(np.searchsorted(ends, end_s)) + 1
    return found


def _moves(
    problem: Problem, offloaded: list[int], recomputed: frozenset[int], arrival: dict[int, int]
) -> tuple[Move, ...] | None:
    intervals = problem.intervals
    due = problem.deadlines(recomputed)
    evicted = {i: (intervals[i].after + 1, due[i]) for i in offloaded}
    evicted |= {i: (intervals[i].after + 1, due[i]) for i in recomputed}
    least = problem.profile(evicted)
    if int(least.max()) > problem.budget_bytes:
        return None
    release = releases(problem, offloaded, due, least.tolist(), arrival)
    for index in offloaded:
        evicted[index] = (release.get(index, due[index]), due[index])
    slack = problem.budget_bytes - problem.profile(evicted)
    moves = []
    for index in sorted(release, key=lambda i: (due[i], -intervals[i].after)):
        size = intervals[index].size_bytes
        wraps = index in problem.around
        first = 0 if wraps else release[index]
        (short,) = (slack[first : due[index]] < size).nonzero()
        load = first + (int(short[-1]) + 1 if short.size else 0)
        if wraps:
            load = problem.visits[bisect_left(problem.visits, load)]
        slack[load : due[index]] -= size
        if wraps or load > release[index]:
            moves.append(Move(index, release[index], load))
    return tuple(sorted(moves))


def releases(
    problem: Problem,
    offloaded: list[int],
    due: list[int],
    least: list[int],
    arrival: dict[int, int] | None = None,
) -> dict[int, int]:
    """The operation before which each interval's memory is freed, first out first freed, none
    before the budget needs it. `least` is the level with all of them evicted; `arrival` names the
    operation by which a transfer is known to be complete."""
    leaving: dict[int, list[int]] = {}
    for index in offloaded:
        leaving.setdefault(problem.intervals[index].after + 1, []).append(index)
    arrival, visits = arrival or {}, problem.visits
    pending: deque[int] = deque()
    held_bytes = 0
    release: dict[int, int] = {}
    for operation, level in enumerate(least):
        for index in leaving.get(operation, ()):
            pending.append(index)
            held_bytes += problem.intervals[index].size_bytes
        while pending:
            index = pending[0]
            wraps = index in problem.around
            used_again = due[index] <= operation and not wraps
            complete = arrival.get(index, operation + 1) <= operation
            complete &= not wraps or operation in visits
            if not (used_again or complete or level + held_bytes > problem.budget_bytes):
                break
            pending.popleft()
            held_bytes -= problem.intervals[index].size_bytes
            if wraps:
                release[index] = visits[bisect_right(visits, operation) - 1]
            elif not used_again:
                release[index] = operation
    for index in (*pending, *leaving.get(len(least), ())):
        if index in problem.around:
            release[index] = len(least)
    return release
