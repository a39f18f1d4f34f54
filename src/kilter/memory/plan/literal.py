"""The heuristic of US 2025/0259058 A1 as written ([0061]-[0066], claim 1), kept as a baseline.

Every tensor is first swapped in at the operation that needs it and swapped out after the one that
used it. An *excess unit operation* is one whose transfers take longer than itself (their sum: the
text counts both directions together). Its swap-in is moved to the *excess preceding operation*:
the one earlier operation that can overlap the most of it. If the search meets the swap-out of the
same tensor, both commands are deleted. Repeated until the schedule no longer changes.

Two additions, since the text has no capacity test: a search stops, and a pair is not deleted,
where memory would exceed the budget; and passes are limited. The rest is not improved on purpose.
"""

from __future__ import annotations

from kilter.memory.plan.place import releases
from kilter.memory.plan.problem import Problem
from kilter.memory.plan.simulate import Move, Schedule


class _Search:
    """Where each tensor is prefetched, and how busy the operations are."""

    def __init__(self, problem: Problem) -> None:
        intervals = problem.intervals
        self._problem = problem
        self._in_s = [problem.link.in_s(interval.size_bytes) for interval in intervals]
        self._out_s = [problem.link.out_s(interval.size_bytes) for interval in intervals]
        self.at = {i: interval.before for i, interval in enumerate(intervals)}
        """Where tensors are prefetched; those whose commands were deleted are not in it."""
        self._busy_in_s = [0.0] * len(problem.operation_s)
        self._busy_out_s = [0.0] * len(problem.operation_s)
        self._arriving: list[list[int]] = [[] for _ in problem.operation_s]
        for index, interval in enumerate(intervals):
            self._busy_in_s[interval.before] += self._in_s[index]
            self._busy_out_s[interval.after] += self._out_s[index]
            self._arriving[interval.before].append(index)
        everything = {i: (j.after + 1, j.before) for i, j in enumerate(intervals)}
        self._level = problem.profile(everything)

    def improve(self) -> bool:
        """One pass over all operations, from the last; whether the schedule has changed."""
        changed = False
        for operation in range(len(self._problem.operation_s) - 1, -1, -1):
            for index in list(self._arriving[operation]):
                if not self._is_excess(operation):
                    break
                target = self._better_place(index, operation)
                if target is not None:
                    changed = True
                    self._move(index, operation, target)
        return changed

    def _is_excess(self, operation: int) -> bool:
        busy_s = self._busy_in_s[operation] + self._busy_out_s[operation]
        return busy_s > self._problem.operation_s[operation]

    def _better_place(self, index: int, operation: int) -> int | None:
        """The preceding operation with the largest overlap; the swap-out's own operation means
        that the pair is to be deleted; None if there is no operation with any overlap."""
        problem = self._problem
        interval = problem.intervals[index]
        best, best_overlap = None, 0.0
        for preceding in range(operation - 1, interval.after - 1, -1):
            if preceding == interval.after:
                return preceding
            if int(self._level[preceding]) + interval.size_bytes > problem.budget_bytes:
                break
            busy_s = self._busy_in_s[preceding], self._busy_out_s[preceding]
            free_s = problem.operation_s[preceding] - busy_s[0] - busy_s[1]
            overlap = min(self._in_s[index], free_s)
            if overlap > best_overlap:
                best, best_overlap = preceding, overlap
        return best

    def _move(self, index: int, operation: int, target: int) -> None:
        """Swap it in at `target` instead of `operation`, or not at all."""
        interval = self._problem.intervals[index]
        self._arriving[operation].remove(index)
        self._busy_in_s[operation] -= self._in_s[index]
        if target == interval.after:
            self._busy_out_s[target] -= self._out_s[index]
            self._level[target + 1 : operation] += interval.size_bytes
            del self.at[index]
        else:
            self._level[target:operation] += interval.size_bytes
            self._busy_in_s[target] += self._in_s[index]
            self._arriving[target].append(index)
            self.at[index] = target


def literal(problem: Problem, *, max_passes: int = 50) -> Schedule:
    """Offload only. `PlanError` if the budget is not met even with everything evicted."""
    problem.check_floor()
    intervals = problem.intervals
    search = _Search(problem)
    for _ in range(max_passes):
        if not search.improve():
            break
    # The text offloads "when the operation is completed", beside what follows: the memory is freed
    # as late as the budget allows, which favours it.
    back = [search.at.get(i, interval.before) for i, interval in enumerate(intervals)]
    leaving = sorted(i for i in search.at if back[i] > intervals[i].after + 1)
    evicted = {i: (intervals[i].after + 1, back[i]) for i in leaving}
    forced = releases(problem, leaving, back, problem.profile(evicted).tolist())
    return Schedule(
        moves=tuple(
            Move(index, forced.get(index, back[index] - 1), back[index]) for index in leaving
        )
    )
