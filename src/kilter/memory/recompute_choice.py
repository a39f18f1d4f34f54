"""`--recompute auto`: single operations or whole calls of modules, whichever is faster in this job.

A plan counts the device's time. What the host needs to issue each recomputed tensor is in no plan,
and depends on the program. So both ways are carried out for a few iterations, and measured. What
iterations took beyond the plan with single operations is, when calls are chosen for the second way,
counted for each tensor that they spare from being recomputed alone.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from kilter.core.units import show_time
from kilter.memory.iteration_times import IterationTimes, median_s

if TYPE_CHECKING:
    from kilter.memory.engine.engine import Swapper

MEASURED = 12
"""Iterations of each way whose median counts."""
PATIENCE = 64
"""Iterations in which calls of modules have to be tried, planned and measured."""
HOST_EACH_S = 1e-4
"""Of a GPU's host for a tensor that is recomputed alone, where this job has not measured it
(docs/measurements/memory.md: 0.17 to 0.19 ms on slow hosts)."""
FASTER = 0.98
"""Whole calls of modules are kept where an iteration takes at most this share of the time."""


class ChoicePhase(Enum):
    """How far the comparison has come."""

    OPERATIONS = "single operations are measured"
    CALLS = "whole calls of modules are tried, then measured"
    DECIDED = "decided"


class RecomputeChoice:
    """Compares the two on the running job. Called in the thread whose tensors are governed."""

    def __init__(self, swapper: Swapper, times: IterationTimes) -> None:
        self._swapper = swapper
        self._times = times
        self._phase = ChoicePhase.OPERATIONS
        self._operations_s = 0.0
        self._left = PATIENCE
        self.words = ""
        """What came of it, in a sentence; empty: not decided."""

    @property
    def decided(self) -> bool:
        """The job stays as it is from here on."""
        return self._phase is ChoicePhase.DECIDED

    def iteration_ended(self, *, settled: bool) -> None:
        """`settled` says that the job's budget and plans stand, but for this choice."""
        if self._phase is ChoicePhase.OPERATIONS and settled:
            measured_s = self._measured_s()
            if measured_s is not None and self._swapper.report().recomputed:
                self._operations_s = measured_s
                self._phase = ChoicePhase.CALLS
                self._recompute(calls=True, each_s=self._host_each_s())
        elif self._phase is ChoicePhase.CALLS:
            self._left -= 1
            if self._swapper.planned and not self._swapper.recomputes_calls:
                self._decide("no whole call of a module is worth recomputing", calls=False)
                return
            measured_s = self._measured_s()
            if measured_s is not None:
                self._compare(measured_s)
            elif self._left <= 0:
                self._decide("whole calls of modules got no plan in time", calls=False)

    def _measured_s(self) -> float | None:
        durations_s = self._times.planned_s
        return median_s(durations_s) if len(durations_s) >= MEASURED else None

    def _compare(self, calls_s: float) -> None:
        each = f"{show_time(calls_s)} an iteration with whole calls of modules, "
        each += f"{show_time(self._operations_s)} with single operations [measured]"
        self._decide(each, calls=calls_s <= FASTER * self._operations_s)

    def _decide(self, why: str, *, calls: bool) -> None:
        self._phase = ChoicePhase.DECIDED
        what = "whole calls of modules where they pay" if calls else "single operations"
        self.words = f"{what} are recomputed: {why}"
        if not calls:
            self._recompute(calls=False)

    def _host_each_s(self) -> float:
        """What a recomputed tensor took of the host's time, by the largest pass with a plan."""
        plain_s = median_s(self._times.plain_s)
        if plain_s is None:
            return HOST_EACH_S
        plan = max(self._swapper.report().plans, key=lambda plan: plan.peak_before_bytes)
        beyond_s = self._operations_s - plain_s - (plan.iteration_s - plan.compute_s)
        return max(0.0, beyond_s) / max(1, plan.recomputed)

    def _recompute(self, *, calls: bool, each_s: float = 0.0) -> None:
        self._times.begin_plan()
        self._swapper.recompute(calls=calls, each_s=each_s)
