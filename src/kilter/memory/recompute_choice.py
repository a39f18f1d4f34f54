"""`--recompute auto`: single operations, whole calls of modules, or the model's own checkpointing,
whichever is the fastest in this job.

A plan counts the device's time. What the host needs to issue each recomputed tensor is in no plan,
and depends on the program. So each way is carried out for a few iterations, and measured. What
iterations took beyond the plan with single operations is, when calls are chosen, counted for each
tensor that they spare from being recomputed alone.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from kilter.core.units import show_time
from kilter.memory.iteration_times import IterationTimes, median_s
from kilter.memory.own_checkpointing import OwnCheckpointing

if TYPE_CHECKING:
    from kilter.memory.engine.engine import Swapper

MEASURED = 12
"""Iterations of each way whose median counts."""
PATIENCE = 64
"""Iterations in which a way has to be tried, planned and measured."""
HOST_EACH_S = 1e-4
"""Of a GPU's host for a tensor that is recomputed alone, where this job has not measured it
(docs/measurements/memory.md: 0.17 to 0.19 ms on slow hosts)."""
MOST_TENSORS = 4000
"""In a pass of more saved tensors calls are not tried: their plans would take minutes, in which the
program waits (2,000 layers on a busy CPU: about two)."""
COVERED = 1.2
"""The model's own checkpointing covers this many times the bytes that have to go, where blocks can
be left out: a block keeps its input, and blocks differ. What the budget then still lacks is planned
around it."""
FASTER = 0.98
"""Another way than single operations stays where an iteration takes at most this share of the time.
"""


class RecomputeWay(Enum):
    """How tensors are recomputed."""

    CALLS = "whole calls of modules"
    OWN = "the model's own checkpointing"
    OPERATIONS = "single operations"


class RecomputeChoice:
    """Compares the ways on the running job, each after the one before. Called in the thread whose
    tensors are governed."""

    def __init__(
        self,
        swapper: Swapper,
        times: IterationTimes,
        own: OwnCheckpointing | None,
        can_record: Callable[[], bool],
    ) -> None:
        """`own` is None where checkpointing of the model's own is not to be tried. `can_record`
        says whether calls can be recorded by now, and has what that takes built."""
        self._swapper = swapper
        self._times = times
        self._own = own
        self._can_record = can_record
        self.way = RecomputeWay.OPERATIONS
        self._untried: list[RecomputeWay] = []
        """In this order from the end, once the job was `_looked` at."""
        self._was_looked_at = False
        self._models = ""
        """The models that have checkpointing of their own."""
        self._measured: dict[RecomputeWay, float] = {}
        """Seconds of an iteration."""
        self._each_s = HOST_EACH_S
        self._share = 1.0
        """Of its blocks, how many the model's own checkpointing is to cover."""
        self._left = PATIENCE
        self._why_not: dict[RecomputeWay, str] = {}
        """Why a way was not measured."""
        self.plain_peak_bytes = 0
        """With everything kept, and the model's own checkpointing off."""
        self.words = ""
        """What came of it, in a sentence; empty: not decided."""

    @property
    def decided(self) -> bool:
        """The job stays as it is from here on."""
        return bool(self.words)

    def iteration_ended(self, *, settled: bool) -> None:
        """`settled` says that the job's budget and plans stand, but for this choice."""
        if self.way is RecomputeWay.OPERATIONS and not (settled and self._looked()):
            return
        if not self._is_over():
            return
        if self.way is RecomputeWay.OPERATIONS:
            self._each_s = self._host_each_s(self._measured[self.way])
            self._note_pass()
        # (What calls are recorded with is built while another way is measured.)
        can_record = RecomputeWay.CALLS in self._untried and self._can_record()
        if not self._untried:
            self._decide()
        elif can_record or self._untried[-1] is not RecomputeWay.CALLS:
            self._take(self._untried.pop())

    def close(self) -> None:
        """The script is over: the model is as it was found."""
        if self._own is not None:
            self._own.switch_off()

    def _looked(self) -> bool:
        """What can be tried is known. One iteration is looked at for that."""
        if self._was_looked_at:
            return True
        if self._own is not None and self._own.look():
            return False
        self._was_looked_at = True
        self._models = "" if self._own is None else self._own.found()
        self._untried = [RecomputeWay.CALLS, *[RecomputeWay.OWN] * bool(self._models)]
        return True

    def _is_over(self) -> bool:
        """The present way was measured, or will not be."""
        way, swapper = self.way, self._swapper
        if way is RecomputeWay.CALLS and swapper.planned and not swapper.recomputes_calls:
            self._why_not[way] = "no whole call of a module is worth recomputing"
            return True
        durations_s = self._times.planned_s
        measured_s = median_s(durations_s) if len(durations_s) >= MEASURED else None
        operations = way is RecomputeWay.OPERATIONS
        if measured_s is not None and (not operations or swapper.report().recomputed):
            self._measured[way] = measured_s
            return True
        if operations:
            return False
        self._left -= 1
        if self._left <= 0:
            self._why_not[way] = f"{way.value} got no plan in time"
        return self._left <= 0

    def _take(self, way: RecomputeWay) -> None:
        """Go on in this way."""
        if self.way is RecomputeWay.CALLS:
            self._swapper.recompute(calls=False)
        elif self.way is RecomputeWay.OWN and self._own is not None:
            self._own.switch_off()
            self._swapper.forget()
        if way is RecomputeWay.CALLS:
            self._swapper.recompute(calls=True, each_s=self._each_s)
        elif way is RecomputeWay.OWN and self._own is not None:
            self._own.switch_on(self._share)
            self._swapper.forget()
        self.way, self._left = way, PATIENCE
        self._times.begin_plan()

    def _decide(self) -> None:
        found = self._measured
        best = min(found, key=lambda way: found[way])
        if found[best] > FASTER * found[RecomputeWay.OPERATIONS]:
            best = RecomputeWay.OPERATIONS
        if best is not self.way:
            self._take(best)
        what = {
            RecomputeWay.CALLS: "whole calls of modules where they pay are recomputed",
            RecomputeWay.OWN: f"the model's own checkpointing is on ({self._models})",
            RecomputeWay.OPERATIONS: "single operations are recomputed",
        }[best]
        each = [f"{show_time(found[way])} with {way.value}" for way in RecomputeWay if way in found]
        measured = ", ".join(each).replace(" with", " an iteration with", 1) + " [measured]"
        why = [measured] * (len(found) > 1) + list(self._why_not.values())
        self.words = f"{what}: {'; '.join(why)}"

    def _note_pass(self) -> None:
        """The largest pass with everything kept, before checkpointing makes it another one."""
        largest = self._swapper.largest_pass()
        if largest is None:
            return
        if len(largest.data) > MOST_TENSORS and RecomputeWay.CALLS in self._untried:
            self._untried.remove(RecomputeWay.CALLS)
            why = "whole calls of modules are not tried with so many tensors"
            self._why_not[RecomputeWay.CALLS] = why
        self.plain_peak_bytes = largest.peak_bytes
        saved_bytes = sum(datum.size_bytes for datum in largest.data)
        over_bytes = max(0, largest.peak_bytes - self._swapper.budget_bytes)
        self._share = min(1.0, COVERED * over_bytes / max(1, saved_bytes))

    def _host_each_s(self, operations_s: float) -> float:
        """What a recomputed tensor took of the host's time, by the largest pass with a plan."""
        plain_s = median_s(self._times.plain_s)
        if plain_s is None:
            return HOST_EACH_S
        plan = max(self._swapper.report().plans, key=lambda plan: plan.peak_before_bytes)
        beyond_s = operations_s - plain_s - (plan.iteration_s - plan.compute_s)
        return max(0.0, beyond_s) / max(1, plan.recomputed)
