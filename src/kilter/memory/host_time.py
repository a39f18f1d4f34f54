"""What the host takes for each tensor that is recomputed alone, or offloaded, and whether plans
for single operations count it.

What iterations took beyond the plan with single operations is what the host needed. Shared out to
those tensors, it is counted for each of them in another plan, which stays if it is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilter.memory.iteration_times import IterationTimes, median_s
from kilter.memory.kept_recompute import RecomputeWay
from kilter.memory.way_comparison import FASTER

if TYPE_CHECKING:
    from kilter.memory.engine.engine import Swapper

HOST_EACH_S = 1e-4
"""A GPU's host takes so long for a tensor that is recomputed alone, or offloaded, where this job
has not measured it (docs/measurements/memory.md: 0.17 to 0.19 ms on slow hosts)."""


class HostTime:
    """Measured in the first turn of single operations."""

    def __init__(self, swapper: Swapper, times: IterationTimes) -> None:
        self._swapper = swapper
        self._times = times
        self.each_s = HOST_EACH_S
        """The host takes this for each of these tensors."""
        self.counted_s = 0.0
        """Plans for single operations count so much of that."""
        self.step_wait_s = 0.0
        """The optimizer's step waits so long for its state, which no plan of a pass counts."""
        self.keeps_up = False
        """Under the plan no pass waits for the host or for copies of what no operation makes."""
        self._uncounted_s: float | None = None
        """An iteration took this before they counted it; None: that is not compared now."""

    def of(self, way: RecomputeWay) -> float:
        """Plans for this way count this for each tensor."""
        return self.each_s if way is RecomputeWay.CALLS else self.counted_s

    def count(self, each_s: float) -> None:
        """Single operations are planned anew where they counted another time for each tensor."""
        if each_s != self.counted_s:
            self.counted_s = each_s
            self._swapper.recompute(calls=False, each_s=each_s)
            self._times.begin_plan()

    def shorter_s(self, measured_s: float | None) -> float | None:
        """What an iteration takes in the first turn of single operations, once it is known whether
        it is shorter where plans count the host's time for each tensor; None: not known yet."""
        before_s = self._uncounted_s
        if before_s is None:
            if measured_s is None or not self._measure(measured_s):
                return measured_s
            self._uncounted_s = measured_s
            self.count(self.each_s)
            return None
        if not self._times.in_vain() and measured_s is None:
            return None
        self._uncounted_s = None
        if measured_s is not None and measured_s <= FASTER * before_s:
            return measured_s
        self.count(0.0)
        return before_s

    def _measure(self, operations_s: float) -> bool:
        """What recomputing took beyond the plan, if all passes of an iteration are like the largest
        one with a plan: the host's time. Whether it is worth counting."""
        plain_s = median_s(self._times.plain_s)
        if plain_s is None:
            return False
        report = self._swapper.report()
        plan = max(report.plans, key=lambda plan: plan.peak_before_bytes)
        passes = self._times.passes_each(report.passes)
        planned_s = passes * (plan.iteration_s - plan.compute_s)
        beyond_s = max(0.0, operations_s - plain_s - planned_s - self.step_wait_s)
        self.each_s = beyond_s / max(1.0, passes * (plan.recomputed + plan.swapped))
        little_s = (1.0 - FASTER) * operations_s
        self.keeps_up = beyond_s + passes * plan.stall_s <= little_s
        return beyond_s > little_s
