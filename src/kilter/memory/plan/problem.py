"""What has to fit: operations with their times, evictable intervals, the link and the budget.

Memory is counted in program order, as an eager framework's allocator counts it: operation `k`
needs `resident_bytes[k]` when nothing is evicted, less the size of every interval that is evicted
during `k`. Times are the matter of `simulate`. The iteration repeats: optimizer state is used once,
and may be evicted from there around the end of the iteration to its next use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kilter.core.errors import BudgetTooSmall, PlanError, UsageError
from kilter.core.trace import IterationTrace

Bytes = npt.NDArray[np.int64]

ALIGN_BYTES = 512
"""Tensors that share host memory begin at multiples of this, as in the framework's allocator."""


def aligned(size_bytes: int) -> int:
    """The size rounded up, so that another tensor may begin behind it."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Measured rates between device and host: each direction alone, and both at once in total."""

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float
    both_bytes_per_s: float
    """Both directions together have this rate while both run. The larger single rate means half
    duplex."""
    latency_s: float = 0.0
    """One transfer has this fixed cost."""

    def __post_init__(self) -> None:
        rates = (self.to_host_bytes_per_s, self.to_device_bytes_per_s, self.both_bytes_per_s)
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise UsageError(f"link rates must be positive and finite, not {rates}")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise UsageError(f"link latency must be zero or more, not {self.latency_s}")

    @property
    def shared(self) -> float:
        """The factor on each direction's own rate while both directions are busy, at most 1."""
        alone = self.to_host_bytes_per_s + self.to_device_bytes_per_s
        return min(1.0, self.both_bytes_per_s / alone)

    def out_s(self, size_bytes: float) -> float:
        """Time of one transfer to the host with the other direction idle."""
        return self.latency_s + size_bytes / self.to_host_bytes_per_s

    def in_s(self, size_bytes: float) -> float:
        """Time of one transfer to the device with the other direction idle."""
        return self.latency_s + size_bytes / self.to_device_bytes_per_s


H200_PCIE5 = Link(
    to_host_bytes_per_s=55.4e9,
    to_device_bytes_per_s=55.6e9,
    both_bytes_per_s=101.7e9,
    latency_s=3e-6,
)
"""It was measured on one H200, PCIe 5 x16, large copies between device and pinned host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleInterval:
    """A tensor that no operation touches between two uses, so that it may be evicted in between."""

    name: str
    size_bytes: int
    after: int
    """The operation with this index uses it last before the gap."""
    before: int
    """The operation with this index needs it again; it is at least `after` + 2. Where the gap wraps
    around the iteration, it is at most `after`, which needs it again: from this operation on there
    has to be memory for it."""
    recompute_s: float | None = None
    """Recomputing it from what `needs` names takes this; `None` if it cannot be recomputed."""
    needs: tuple[int, ...] = ()
    """Earlier intervals with these indices must be on the device when this one is recomputed."""
    to_host: bool = True
    """May be offloaded; otherwise it is recomputed or stays."""
    together: int = 0
    """Stands for so many tensors, which the call of a module makes together; 0: for one."""
    moved: tuple[int, int] | None = None
    """What wraps is moved already: it is evicted from the first operation around to the second."""

    @property
    def tensors(self) -> int:
        """Stands for so many."""
        return self.together or 1

    @property
    def wraps(self) -> bool:
        """The gap goes around the end of the iteration."""
        return self.before <= self.after

    @property
    def gap(self) -> int:
        """Number of operations during which it may be evicted."""
        return self.before - self.after - 1


@dataclass(frozen=True)
class Problem:
    """One iteration to plan. Intervals stand after the intervals that they need."""

    operation_s: tuple[float, ...]
    resident_bytes: tuple[int, ...]
    """So much is on the device during each operation with nothing evicted."""
    intervals: tuple[IdleInterval, ...]
    link: Link
    budget_bytes: int
    alone_s: float = 0.0
    """What counts of the host's time for each interval of one tensor that is recomputed."""
    moved_s: float = 0.0
    """So much counts for each that is offloaded."""
    visits: tuple[int, ...] = ()
    """Before these operations, in order, and at the end what wraps may be loaded and released."""

    def __post_init__(self) -> None:
        count = len(self.operation_s)
        if count == 0 or len(self.resident_bytes) != count:
            raise PlanError(
                f"{count} operation times and {len(self.resident_bytes)} memory levels: "
                "both are needed for each operation"
            )
        if not all(math.isfinite(t) and t >= 0 for t in self.operation_s):
            raise PlanError("operation times must be finite and not negative")
        for index, interval in enumerate(self.intervals):
            if interval.wraps:
                if not {interval.before, interval.after + 1} <= {*self.visits, count}:
                    raise PlanError(f"{interval.name}: cannot be moved right before and after use")
            elif not 0 <= interval.after < interval.before - 1 < count - 1:
                raise PlanError(f"{interval.name}: no operation between its two uses")
            if interval.size_bytes <= 0:
                raise PlanError(f"{interval.name}: size must be positive")
            if any(not 0 <= other < index for other in interval.needs):
                raise PlanError(f"{interval.name}: needs an interval that does not precede it")

    @cached_property
    def resident(self) -> Bytes:
        """The levels with nothing evicted but what is moved already."""
        moved = {i: j.moved for i, j in enumerate(self.intervals) if j.moved is not None}
        return np.asarray(self.resident_bytes, dtype=np.int64) + self._change(moved)

    @cached_property
    def around(self) -> frozenset[int]:
        """These intervals wrap."""
        return frozenset(i for i, j in enumerate(self.intervals) if j.wraps)

    @cached_property
    def streaming(self) -> tuple[int, ...]:
        """These intervals wrap, and it is to be planned when they move."""
        return tuple(i for i in sorted(self.around) if self.intervals[i].moved is None)

    @property
    def at_rest(self) -> Problem:
        """The same without the traffic of what wraps, which is moved already."""
        kept = tuple(interval for interval in self.intervals if not interval.wraps)
        return replace(self, intervals=kept, resident_bytes=tuple(self.resident.tolist()))

    @property
    def compute_s(self) -> float:
        """Iteration time with nothing evicted."""
        return float(sum(self.operation_s))

    @property
    def peak_bytes(self) -> int:
        """Peak with nothing evicted."""
        return int(self.resident.max())

    def profile(self, evicted: dict[int, tuple[int, int]]) -> Bytes:
        """Bytes during each operation when interval `i` is evicted in operations `[start,
        stop)`; if it wraps, from `start` on and before `stop`."""
        return self.resident + self._change(evicted)

    def _change(self, evicted: dict[int, tuple[int, int]]) -> Bytes:
        change = [0] * (len(self.operation_s) + 1)  # faster than an array, number by number
        for index, (start, stop) in evicted.items():
            size = self.intervals[index].size_bytes
            change[start] -= size
            change[stop] += size
            if index in self.around:
                change[0] -= size
        found: Bytes = np.cumsum(np.array(change[:-1], dtype=np.int64))
        return found

    def tensors(self, indices: Iterable[int]) -> int:
        """These intervals stand for so many tensors."""
        return sum(self.intervals[index].tensors for index in indices)

    @cached_property
    def floor(self) -> Bytes:
        """The levels with everything evicted in all of its gap: no schedule is below them."""
        gaps = {i: (j.after + 1, j.before) for i, j in enumerate(self.intervals) if not j.moved}
        return self.profile(gaps)

    @property
    def floor_bytes(self) -> int:
        """No schedule reaches a smaller peak."""
        return int(self.floor.max())

    def check_floor(self) -> None:
        """`BudgetTooSmall` if no schedule fits the budget."""
        if self.floor_bytes > self.budget_bytes:
            raise BudgetTooSmall(
                f"the budget of {self.budget_bytes} bytes is below {self.floor_bytes}, which "
                "operations need even when everything else is evicted"
            )

    def deadlines(self, recomputed: frozenset[int]) -> list[int]:
        """For each interval the operation at which it must be resident again: its next use, or
        earlier when an interval in `recomputed` is recomputed from it."""
        due = [interval.before for interval in self.intervals]
        for index in sorted(recomputed, reverse=True):
            for other in self.intervals[index].needs:
                if self.intervals[other].after < due[index] < due[other]:
                    due[other] = due[index]
        return due


def problem_of(
    trace: IterationTrace, *, link: Link, budget_bytes: int, min_bytes: int = 2**20
) -> Problem:
    """The planning problem of a trace: every activation of at least `min_bytes` between two uses.

    An activation can be recomputed when all that its producer reads is still alive at its next use;
    the cost is the producer's own time. Weights, optimizer state and gradients stay.
    A trace of a run under a memory budget has measured levels and costs, which are used instead.
    `PlanError` if the trace carries no required data (`IterationTrace.data`).
    """
    trace = trace.memory or trace
    if not trace.data:
        raise PlanError("the trace lists no required data; record it: kilter run --memory-budget")
    levels = [operation.level_bytes for operation in trace.operations]
    if None not in levels:
        return Problem(
            operation_s=tuple(operation.duration_s for operation in trace.operations),
            resident_bytes=tuple(level for level in levels if level is not None),
            intervals=_observed(trace, min_bytes),
            link=link,
            budget_bytes=budget_bytes,
        )
    count = len(trace.operations)
    change = np.zeros(count + 1, dtype=np.int64)
    for datum in trace.data:
        persistent = datum.kind in ("weight", "optimizer_state")
        change[0 if persistent else max(datum.first_use, 0)] += datum.size_bytes
        change[count if persistent else min(datum.last_use, count - 1) + 1] -= datum.size_bytes
    gaps = sorted(
        (after, before, index)
        for index, positions in _uses(trace).items()
        if trace.data[index].kind == "feature_map" and trace.data[index].size_bytes >= min_bytes
        for after, before in pairwise(positions)
        if before - after >= 2
    )
    # What a producer reads exists before what it writes, so order by producer, then by gap.
    gaps.sort(key=lambda gap: (_producer(trace, gap[2]), gap))
    numbers = {gap: number for number, gap in enumerate(gaps)}
    of_datum: dict[int, list[tuple[int, int, int]]] = {}
    for gap in gaps:
        of_datum.setdefault(gap[2], []).append(gap)
    intervals = []
    for number, (after, before, index) in enumerate(gaps):
        needs = _needs(trace, index, before, of_datum, numbers)
        possible = needs is not None and all(other < number for other in needs)
        producer = trace.data[index].producer
        intervals.append(
            IdleInterval(
                name=trace.data[index].name,
                size_bytes=trace.data[index].size_bytes,
                after=after,
                before=before,
                recompute_s=(
                    trace.operations[producer].duration_s
                    if possible and producer is not None
                    else None
                ),
                needs=needs if possible and needs is not None else (),
            )
        )
    return Problem(
        operation_s=tuple(operation.duration_s for operation in trace.operations),
        resident_bytes=tuple(int(level) for level in np.cumsum(change[:-1])),
        intervals=tuple(intervals),
        link=link,
        budget_bytes=budget_bytes,
    )


def _observed(trace: IterationTrace, min_bytes: int) -> tuple[IdleInterval, ...]:
    """One interval for each tensor that is left alone before its last use, with the measured time
    to recompute it."""
    touched = _uses(trace)
    numbers: dict[int, int] = {}
    intervals: list[IdleInterval] = []
    for index, datum in enumerate(trace.data):
        uses = touched.get(index, [])
        if len(uses) < 2 or uses[-1] - uses[-2] < 2 or datum.size_bytes < min_bytes:
            continue
        numbers[index] = len(intervals)
        intervals.append(
            IdleInterval(
                name=datum.name,
                size_bytes=datum.size_bytes,
                after=uses[-2],
                before=uses[-1],
                recompute_s=datum.recompute_s,
                needs=tuple(numbers[source] for source in datum.sources if source in numbers),
                together=datum.together,
            )
        )
    return tuple(intervals)


def _uses(trace: IterationTrace) -> dict[int, list[int]]:
    """By tensor, the operations that read it or write to it."""
    uses: dict[int, list[int]] = {}
    for position, operation in enumerate(trace.operations):
        for index in {*operation.reads, *operation.writes}:
            uses.setdefault(index, []).append(position)
    return uses


def _producer(trace: IterationTrace, index: int) -> int:
    producer = trace.data[index].producer
    return -1 if producer is None else producer


def _needs(
    trace: IterationTrace,
    index: int,
    at: int,
    of_datum: dict[int, list[tuple[int, int, int]]],
    numbers: dict[tuple[int, int, int], int],
) -> tuple[int, ...] | None:
    """The intervals to have back at operation `at` to recompute the tensor; None if impossible."""
    producer = trace.data[index].producer
    if producer is None:
        return None
    found = []
    for source in trace.operations[producer].reads:
        datum = trace.data[source]
        if source == index:
            return None  # written in place: its old value is gone
        persistent = datum.kind in ("weight", "optimizer_state")
        if not persistent and datum.last_use < at:
            return None
        if any(source in trace.operations[k].writes for k in range(producer + 1, at)):
            return None  # overwritten in between
        found += [numbers[gap] for gap in of_datum.get(source, ()) if gap[0] < at <= gap[1]]
    return tuple(sorted(found))
