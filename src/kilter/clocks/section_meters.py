"""What a rank sees of the blocks of a search: on a real device, and on a simulated one."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

from kilter.clocks.plan.section_search import Seen
from kilter.clocks.section_rehearsal import SimulatedRank, block_of
from kilter.model.stats import stalled
from kilter.observe.end_times import Iteration

KEPT_ITERATIONS = 4096
"""So many iterations are kept; an order has fewer."""

Arms = Sequence[tuple[int, Sequence[int]]]


class IterationMeter:
    """Times by the iteration clock, energy by the device's sensors. `mean_power_w` is that of a
    stretch of the host's clock. Nobody sees the sections' own times between two windows of the
    profiler."""

    def __init__(self, mean_power_w: Callable[[float, float], float | None]) -> None:
        self._mean_power_w = mean_power_w
        self._seen: deque[Iteration] = deque(maxlen=KEPT_ITERATIONS)

    def iteration(self, iteration: Iteration) -> None:
        self._seen.append(iteration)

    def follow(self, now: Sequence[int], arms: Arms) -> None:
        """A real device needs no word of it."""

    def block(self, first: int, count: int) -> Seen | None:
        """See `BlockMeter`. An iteration that was not timed is missing from its block."""
        block = [i for i in self._seen if first < i.index <= first + count]
        times = [i.duration_s for i in block]
        if len(block) < max(2, count - 1) or stalled(times):
            return None
        power_w = self._mean_power_w(block[0].end_s - times[0], block[-1].end_s)
        return Seen(
            step_s=statistics.median(times),
            energy_j=None if power_w is None else power_w * statistics.fmean(times),
        )


class SimulatedMeter:
    """Every iteration of the program drives one of a simulated rank."""

    def __init__(self, rank: SimulatedRank, depths: Sequence[int]) -> None:
        self._rank = rank
        self._now = depths
        self._arms: list[tuple[int, Sequence[int]]] = []
        self._seen: deque[tuple[int, Seen]] = deque(maxlen=KEPT_ITERATIONS)
        """Each stands with the iteration end that it began with."""

    def follow(self, now: Sequence[int], arms: Arms) -> None:
        """The same as to a conductor."""
        self._now, self._arms = now, list(arms)

    def iteration(self, iteration: Iteration) -> None:
        """One more of the program."""
        began = iteration.index - 1
        while self._arms and self._arms[0][0] <= began:
            _, self._now = self._arms.pop(0)
        self._seen.append((began, self._rank.iterate(self._now)))

    def block(self, first: int, count: int) -> Seen | None:
        """See `BlockMeter`."""
        block = [seen for began, seen in self._seen if first <= began < first + count]
        return block_of(block) if len(block) >= max(2, count - 1) else None
