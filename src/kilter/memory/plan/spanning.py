"""The default heuristic for offloading: one load may span several preceding operations.

All intervals are offloaded that may be, except that those with the shortest gaps stay while they
fit (Belady's rule; in a short gap there is no time for a transfer out and back). `place` decides
when they are moved. How much memory to leave free for transfers in flight is tried, and the
simulator decides.

Compared with the patent's heuristic (`literal`): loads span operations, residency is checked
against the completion of transfers, and waiting is part of the predicted time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import inf

import numpy as np

from kilter.core.errors import PlanError
from kilter.memory.plan.place import judged
from kilter.memory.plan.problem import Problem
from kilter.memory.plan.simulate import Schedule, SimulatedPass

TOO_FEW = "the budget is not reached with as much as may be offloaded"
"""With everything evicted the budget is met, so some choice meets it, unless not everything may be
offloaded."""
SMALL, SMALL_ROUGHLY = 256, 64
"""Up to this many intervals, a second order and memory left free for transfers are tried; the other
limit is for rough plans, of which many are made to compare problems (at most 0.4 % of an iteration
longer in eight problems of 132 to 189 intervals, in a third of the time)."""


def spanning(problem: Problem) -> Schedule:
    """Offload only. `PlanError` if the budget is not met even with everything evicted."""
    if problem.peak_bytes <= problem.budget_bytes:
        return Schedule()
    problem.check_floor()
    best = swap_rest(problem, frozenset())
    if best is None:
        raise PlanError(TOO_FEW)
    return best[0]


def swap_rest(
    problem: Problem, recomputed: frozenset[int], left_s: float = inf, rounds: int = 2
) -> tuple[Schedule, SimulatedPass] | None:
    """The best schedule that recomputes `recomputed` and offloads what it must of the rest. None
    where that is impossible, or what counts for offloading (`Problem.moved_s`) is `left_s` or more.
    """
    if not problem.intervals:
        return None
    largest = max(interval.size_bytes for interval in problem.intervals)
    # A large problem consists of many like intervals: Belady's order is enough, and one transfer
    # more or less in flight is nothing beside the budget.
    small = len(problem.intervals) <= (SMALL_ROUGHLY if rounds == 1 else SMALL)
    choices = (
        list(product((0, largest), (short_gaps, large_transfers))) if small else [(0, short_gaps)]
    )
    best: tuple[Schedule, SimulatedPass] | None = None
    tried = set()
    for headroom, order in choices:
        chosen = leaving(problem, recomputed, headroom_bytes=headroom, order=order)
        if chosen is None or chosen in tried:
            continue
        tried.add(chosen)
        found = judged(problem, chosen, recomputed, left_s, rounds)
        if found and (best is None or found[1].iteration_s < best[1].iteration_s):
            best = found
        if best and best[1].stall_s <= 1e-3 * best[1].iteration_s:
            break
    return best


SwapOrder = Callable[[Problem, list[int], int], tuple[float, ...]]
"""It gives a sort key: intervals with the least keys stay. Its arguments are the problem,
deadlines, and an interval."""


def short_gaps(problem: Problem, due: list[int], index: int) -> tuple[float, ...]:
    return (due[index] - problem.intervals[index].after, -index)


def large_transfers(problem: Problem, due: list[int], index: int) -> tuple[float, ...]:
    interval = problem.intervals[index]
    return (-interval.size_bytes, due[index] - interval.after)


def leaving(
    problem: Problem,
    recomputed: frozenset[int],
    *,
    headroom_bytes: int = 0,
    order: SwapOrder = short_gaps,
) -> tuple[int, ...] | None:
    """The intervals to offload besides `recomputed`: those that must leave to bring the peak down
    to the budget less the headroom (where that is out of reach, as low as it gets)."""
    intervals = problem.intervals
    due = problem.deadlines(recomputed)
    rest = [
        index
        for index, interval in enumerate(intervals)
        if interval.to_host and index not in recomputed and due[index] > interval.after + 1
    ]
    out = (*rest, *recomputed, *problem.streaming)
    evicted = {i: (intervals[i].after + 1, due[i]) for i in out}
    level = problem.profile(evicted)
    if int(level.max()) > problem.budget_bytes:
        return None
    room = np.maximum(problem.budget_bytes - headroom_bytes, level) - level
    kept = set()
    for index in sorted(rest, key=lambda i: order(problem, due, i)):
        window = room[intervals[index].after + 1 : due[index]]
        if np.minimum.reduce(window) >= intervals[index].size_bytes:
            window -= intervals[index].size_bytes
            kept.add(index)
    return tuple(i for i in rest if i not in kept)
