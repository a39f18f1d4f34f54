"""The heuristic of US 2025/0259058 A1 as written ([0061]-[0066], claim 1), kept as a baseline.

Every datum is first swapped in at the operation that needs it and swapped out after the one that
used it. An *excess unit operation* is one whose transfers take longer than itself (their sum: the
text counts both directions together). Its swap-in is moved to the *excess preceding operation*:
the one earlier operation that can overlap the most of it. If the search meets the swap-out of the
same datum, both commands are deleted. Repeated until the schedule no longer changes.

Two additions, since the text has no capacity test: a search stops, and a pair is not deleted,
where memory would exceed the budget; and passes are limited. The rest is not improved on purpose.
"""

from __future__ import annotations

from kilter.core.errors import BudgetTooSmall
from kilter.memory.plan.place import releases
from kilter.memory.plan.problem import Problem
from kilter.memory.plan.simulate import Move, Schedule


def literal(problem: Problem, *, max_passes: int = 50) -> Schedule:
    """Swap only. `PlanError` if not even everything away fits the budget."""
    intervals = problem.intervals
    if problem.floor_bytes > problem.budget_bytes:
        raise BudgetTooSmall(
            f"the budget of {problem.budget_bytes} bytes is below {problem.floor_bytes}, which "
            "operations need even when everything else is away"
        )
    in_s = [problem.link.in_s(interval.size_bytes) for interval in intervals]
    out_s = [0.0 if j.clean else problem.link.out_s(j.size_bytes) for j in intervals]
    at = {i: interval.before for i, interval in enumerate(intervals)}
    busy_in = [0.0] * len(problem.operation_s)
    busy_out = [0.0] * len(problem.operation_s)
    arriving: list[list[int]] = [[] for _ in problem.operation_s]
    for index, interval in enumerate(intervals):
        busy_in[interval.before] += in_s[index]
        busy_out[interval.after] += out_s[index]
        arriving[interval.before].append(index)
    level = problem.profile({i: (j.after + 1, j.before) for i, j in enumerate(intervals)})

    def better_place(index: int, operation: int) -> int | None:
        """The preceding operation with the largest overlap; the swap-out's own operation means
        that the pair is to be deleted; None if there is no operation with any overlap."""
        size = intervals[index].size_bytes
        best, best_overlap = None, 0.0
        for preceding in range(operation - 1, intervals[index].after - 1, -1):
            if preceding == intervals[index].after:
                return preceding
            if int(level[preceding]) + size > problem.budget_bytes:
                break
            free_s = problem.operation_s[preceding] - busy_in[preceding] - busy_out[preceding]
            overlap = min(in_s[index], free_s)
            if overlap > best_overlap:
                best, best_overlap = preceding, overlap
        return best

    for _ in range(max_passes):
        changed = False
        for operation in range(len(problem.operation_s) - 1, -1, -1):
            for index in list(arriving[operation]):
                if busy_in[operation] + busy_out[operation] <= problem.operation_s[operation]:
                    break  # no longer an excess unit operation
                target = better_place(index, operation)
                if target is None:
                    continue
                changed = True
                arriving[operation].remove(index)
                busy_in[operation] -= in_s[index]
                after = intervals[index].after
                if target == after:
                    busy_out[after] -= out_s[index]
                    level[after + 1 : operation] += intervals[index].size_bytes
                    del at[index]
                else:
                    level[target:operation] += intervals[index].size_bytes
                    busy_in[target] += in_s[index]
                    arriving[target].append(index)
                    at[index] = target
        if not changed:
            break
    # The text swaps out "when the operation is completed", beside what follows: the memory is freed
    # as late as the budget allows, which favours it.
    back = [at.get(i, interval.before) for i, interval in enumerate(intervals)]
    leaving = sorted(i for i in at if back[i] > intervals[i].after + 1)
    away = {i: (intervals[i].after + 1, back[i]) for i in leaving}
    forced = releases(problem, leaving, back, problem.profile(away).tolist())
    return Schedule(
        moves=tuple(
            Move(index, forced.get(index, back[index] - 1), back[index]) for index in leaving
        )
    )
