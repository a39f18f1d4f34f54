"""`--recompute auto`: single operations, or, if it is faster in this job, the checkpointing that a
model brings with it; then calls of modules, or parts of them, if those are faster still.

A plan counts the device's time. What the host needs to issue each recomputed tensor is in no plan,
and depends on the program. So each way is carried out for a few iterations, and measured. A machine
that others use as well is slower for minutes now and then, so checkpointing has its turn between
two of single operations, and again until it differs from them by more than they do from each other.
What iterations took beyond the plan with single operations is what the host needed. Shared out to
the tensors that are recomputed or offloaded, it is counted for each of them in another plan for
single operations, which stays if it is faster; and when calls are chosen, for each tensor that they
spare.

A job that comes again begins with the way that its last run has measured to be the fastest
(`kept_recompute.py`), and compares them only where that way is not to be had any more.

Several ranks choose together: at the end of each turn they agree on what the slowest has measured
(`rank_agreement.py`), so that all go on alike from the same iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import TYPE_CHECKING, Any

from kilter.core.units import show_time
from kilter.memory.iteration_times import IterationTimes, median_s
from kilter.memory.kept_recompute import KeptRecompute, RecomputeHistory, RecomputeWay
from kilter.memory.own_checkpointing import OwnCheckpointing
from kilter.memory.rank_agreement import RankAgreement, TurnNote

if TYPE_CHECKING:
    from kilter.memory.engine.engine import Swapper

MEASURED = 10
"""A turn has so many iterations, whose median counts."""
TURNS = 3
"""The model's own checkpointing has at most so many turns."""
PATIENCE = 64
"""A way has to be tried, planned and measured within so many iterations."""
HOST_EACH_S = 1e-4
"""A GPU's host takes so long for a tensor that is recomputed alone, or offloaded, where this job
has not measured it (docs/measurements/memory.md: 0.17 to 0.19 ms on slow hosts)."""
MOST_TENSORS = 4000
"""In a pass of more saved tensors calls are not tried: their plans would take minutes, in which the
program waits (2,000 layers on a busy CPU: about two)."""
COVERED = 1.2
"""The model's own checkpointing covers this many times the bytes that have to go, where blocks can
be left out: a block keeps its input, and blocks differ. What the budget then still lacks is planned
around it."""
FASTER = 0.98
"""Another way stays where an iteration takes at most this share of the time."""


class RecomputeChoice:
    """Compares ways on the running job, two at a time. Called in the thread whose tensors are
    governed.

    It has more attributes than most classes: what each way has shown, and what was said to the
    other ranks, has to last from one iteration's end to the next."""

    def __init__(
        self,
        swapper: Swapper,
        times: IterationTimes,
        own: OwnCheckpointing | None,
        can_record: Callable[[], bool],
        ranks: RankAgreement,
        history: RecomputeHistory,
    ) -> None:
        """`own` is None where checkpointing of the model's own is not to be tried. `can_record`
        says whether calls can be recorded by now, and has what that takes built."""
        self._swapper = swapper
        self._times = times
        self._own = own
        self._can_record = can_record
        self._ranks = ranks
        self._history = history
        self._begins = True
        """It is not agreed on yet what an earlier run has chosen."""
        self.kept: KeptRecompute | None = None
        """What an earlier run has chosen, and this one begins with; once it is decided by
        measurement, what the next run is to begin with."""
        self._events = ""
        """The largest pass with everything kept has this fingerprint."""
        self.way = RecomputeWay.OPERATIONS
        self._base = RecomputeWay.OPERATIONS
        self._other: RecomputeWay | None = None
        """What is compared with it, once the job was looked at."""
        self._models = ""
        """These models have checkpointing of their own."""
        self._turns_s: list[float] = []
        """An iteration takes so many seconds in each turn of the two; the first is that of
        `_base`."""
        self._measured_s: dict[RecomputeWay, float] = {}
        """What came of that."""
        self._aside: dict[RecomputeWay, Any] = {}
        """What the engine knows of the passes of ways whose turn it is not."""
        self._each_s = HOST_EACH_S
        """The host takes this for each tensor that is recomputed alone, or offloaded."""
        self._counted_s = 0.0
        """Plans for single operations count so much of that."""
        self._uncounted_s: float | None = None
        """An iteration took this before they counted it; None: that is not compared now."""
        self._share = 1.0
        """The model's own checkpointing is to cover this share of its blocks."""
        self._left = PATIENCE
        self._why_not = ""
        """Why the other way was not measured."""
        self._note: TurnNote | None = None
        """This rank's turn is over, and that is what it has found."""
        self._said = False
        """The other ranks, which are not that far, were told."""
        self._tensors = 0
        """Saved in the largest pass, by all ranks once they were heard."""
        self.plain_peak_bytes = 0
        """It was seen with everything kept, and the model's own checkpointing off."""
        self.words = ""
        """What came of it, in a sentence; empty: not decided."""

    @property
    def decided(self) -> bool:
        """The job stays as it is from here on."""
        return bool(self.words)

    def iteration_ended(self, *, settled: bool) -> None:
        """`settled` says that the job's budget and plans stand, but for this choice."""
        operations = self.way is RecomputeWay.OPERATIONS
        if self._note is None and not (operations and not (settled and self._looked())):
            self._note = self._earlier() if self._begins else self._turn()
        if self._note is None:
            return
        if not self._said:
            kept = self._note.kept
            records = kept.way is RecomputeWay.CALLS if kept else operations and not self._begins
            if records and not self._note.why_not and not self._can_record():
                return
            self._ranks.say(self._note)
            self._said = True
        heard = self._ranks.heard()
        if heard is not None:
            self._note, self._said = None, False
            self._go_on(heard)
        elif self._ranks.lost:
            self._stay(self._ranks.lost)

    def _go_on(self, heard: TurnNote) -> None:
        """The turn is over on all ranks."""
        if self._begins:
            self._begins = False
            if heard.kept is not None and not heard.why_not:
                self._begin_with(heard.kept)
            return
        if self.kept is not None:
            self._stay_with(self.kept, heard.why_not)
            return
        self._why_not, self._share, self._tensors = heard.why_not, heard.share, heard.tensors
        if heard.seconds is not None:
            self._turns_s.append(heard.seconds)
        found = self._compared()
        self._measured_s |= found
        assert self._other is not None
        if not (found or self._why_not):
            self._take(self._other if self.way is self._base else self._base)
            return
        if found and found[self._other] <= FASTER * found[self._base]:
            self._base = self._other
        if self._other is RecomputeWay.CALLS or not self._calls_next(found):
            self._decide()
            return
        self._other, self._why_not = RecomputeWay.CALLS, ""
        self._turns_s = [self._measured_s.get(self._base, self._turns_s[0])]
        self._take(self._other)

    def close(self) -> None:
        """The script is over: the model is as it was found."""
        if self._said and not self.decided:
            self._stay("not all ranks came to the end of a turn")
        if self._own is not None:
            self._own.switch_off()

    def _looked(self) -> bool:
        """It is known what single operations are compared with. One iteration is looked at for
        that."""
        if self._other is None:
            if self._own is not None and self._own.look():
                return False
            self._models = "" if self._own is None else self._own.found()
            self._other = RecomputeWay.OWN if self._models else RecomputeWay.CALLS
            self._note_pass()
        return True

    def _earlier(self) -> TurnNote | None:
        """What an earlier run has chosen, where passes are as they were then; None: not known."""
        kept = self._history.last
        if not self._history.known:
            return None
        if kept is not None and (kept.models, kept.events) != (self._models, self._events):
            kept = None
        if kept is None and self._ranks.alone:
            self._begins = False
            return self._turn()
        return self._note_of(None, kept)

    def _begin_with(self, kept: KeptRecompute) -> None:
        self.kept, self._share = kept, kept.share
        if kept.way is RecomputeWay.CALLS:
            self._each_s = kept.each_s
        else:
            self._count(kept.each_s)
        if kept.way is RecomputeWay.OPERATIONS:
            self._stay_with(kept, "")
        else:
            self._take(kept.way)

    def _stay_with(self, kept: KeptRecompute, why_not: str) -> None:
        """It has a plan on all ranks, and stays; or it has none, and the ways are compared."""
        if not why_not:
            self._stay(f"an earlier run of this job chose that ({kept.day}) [measured]")
            return
        self.kept, self._why_not = None, ""
        self._take(RecomputeWay.OPERATIONS)
        self._count(0.0)
        self._note_pass()

    def _turn(self) -> TurnNote | None:
        """The present way was measured, or will not be. None: neither."""
        way, swapper = self.way, self._swapper
        durations_s = self._times.planned_s
        measured_s = median_s(durations_s) if len(durations_s) >= MEASURED else None
        if way is RecomputeWay.OPERATIONS:
            report = swapper.report()
            waits = any(plan.compute_s < FASTER * plan.iteration_s for plan in report.plans)
            own = waits and self._other is RecomputeWay.OWN
            if not (report.recomputed or own):
                return None
            if not self._turns_s:
                measured_s = self._with_host_counted(measured_s)
            if measured_s is None:
                return None
        elif way is RecomputeWay.CALLS and swapper.planned and not swapper.recomputes_calls:
            self._why_not = "no call of a module is worth recomputing"
        elif measured_s is None:
            self._left -= 1
            if self._left > 0:
                return None
            self._why_not = f"{way.value} got no plan in time"
        return self._note_of(measured_s)

    def _with_host_counted(self, measured_s: float | None) -> float | None:
        """What an iteration takes in the first turn of single operations, once it is known whether
        it is shorter where plans count the host's time for each tensor; None: not known yet."""
        before_s = self._uncounted_s
        if before_s is None:
            if measured_s is None or not self._note_host(measured_s):
                return measured_s
            self._uncounted_s, self._left = measured_s, PATIENCE
            self._count(self._each_s)
            return None
        self._left -= 1
        if measured_s is None and self._left > 0:
            return None
        self._uncounted_s = None
        if measured_s is not None and measured_s <= FASTER * before_s:
            return measured_s
        self._count(0.0)
        return before_s

    def _count(self, each_s: float) -> None:
        """Single operations are planned anew where they counted another time for each tensor."""
        if each_s != self._counted_s:
            self._counted_s = each_s
            self._swapper.recompute(calls=False, each_s=each_s)
            self._times.begin_plan()

    def _note_of(self, measured_s: float | None, kept: KeptRecompute | None = None) -> TurnNote:
        return TurnNote(
            models=self._models,
            share=self._share,
            tensors=self._tensors,
            seconds=measured_s,
            why_not=self._why_not,
            kept=kept,
        )

    def _compared(self) -> dict[RecomputeWay, float]:
        """What an iteration takes in either way; empty if that is not clear yet. Calls have one
        turn beside single operations, since their plans take long to make."""
        turns_s, other = self._turns_s, self._other
        if other is None or len(turns_s) < 2:
            return {}
        if {other, self._base} == {RecomputeWay.CALLS, RecomputeWay.OPERATIONS}:
            return {other: turns_s[1], self._base: turns_s[0]}
        between = [turns_s[i - 1 : i + 2] for i in range(1, len(turns_s) - 1, 2)]
        if self.way is other or not between:
            return {}
        before_s, other_s, after_s = min(between, key=lambda turns_s: _drift(*turns_s[::2]))
        base_s = (before_s + after_s) / 2
        clear = _drift(base_s, other_s) > _drift(before_s, after_s)
        if not clear and len(between) < TURNS:
            return {}
        return {other: other_s, self._base: base_s}

    def _take(self, way: RecomputeWay) -> None:
        """Go on in this way."""
        if self._own is not None and RecomputeWay.OWN in (way, self.way):
            if way is RecomputeWay.OWN:
                self._own.switch_on(self._share)
            else:
                self._own.switch_off()
            known = self._aside.pop(way, None)
            if known is None and way is RecomputeWay.CALLS:
                known = self._aside.pop(RecomputeWay.OPERATIONS, None)
            self._aside[self.way] = self._swapper.exchange(known)
        if RecomputeWay.CALLS in (way, self.way):
            self._swapper.recompute(
                calls=way is RecomputeWay.CALLS,
                each_s=self._each_s if way is RecomputeWay.CALLS else self._counted_s,
                kept=() if self.kept is None else self.kept.calls,
            )
        self.way, self._left = way, PATIENCE
        self._times.begin_plan()

    def _calls_next(self, found: dict[RecomputeWay, float]) -> bool:
        """Calls are compared with what stays of single operations and the model's checkpointing."""
        return bool(found) and self._tensors <= MOST_TENSORS

    def _decide(self) -> None:
        if self._base is not self.way:
            self._take(self._base)
        each = [f"{show_time(time_s)} with {way.value}" for way, time_s in self._measured_s.items()]
        measured = ", ".join(each).replace(" with", " an iteration with", 1)
        said = [f"{measured} [measured]"] * bool(each) + [self._why_not] * bool(self._why_not)
        self._stay("; ".join(said))
        if self._measured_s:
            self.kept = KeptRecompute(
                day=date.today().isoformat(),
                way=self.way,
                models=self._models,
                events=self._events,
                share=self._share,
                each_s=self._each_s if self.way is RecomputeWay.CALLS else self._counted_s,
            )

    def _stay(self, why: str) -> None:
        """Nothing changes any more."""
        self._aside.clear()
        what = {
            RecomputeWay.CALLS: "calls of modules are recomputed where they pay",
            RecomputeWay.OWN: f"the model's own checkpointing is on ({self._models})",
            RecomputeWay.OPERATIONS: "single operations are recomputed",
        }[self.way]
        if self._counted_s and self.way is RecomputeWay.OPERATIONS:
            what += f", each counted with {show_time(self._counted_s)} of the host's time"
        why_not = "" if self._own is None else self._own.why_not
        self.words = f"{what}: {why}" + (f"; {why_not}" if why_not else "")

    def _note_pass(self) -> None:
        """The largest pass with everything kept, before checkpointing makes it another one."""
        largest = self._swapper.largest_pass()
        if largest is None:
            return
        self._tensors, self._events = len(largest.data), largest.fingerprint
        if self._tensors > MOST_TENSORS and self._other is RecomputeWay.CALLS:
            self._why_not = "calls of modules are not tried with so many tensors"
        self.plain_peak_bytes = largest.peak_bytes
        saved_bytes = sum(datum.size_bytes for datum in largest.data)
        over_bytes = max(0, largest.peak_bytes - self._swapper.budget_bytes)
        self._share = min(1.0, COVERED * over_bytes / max(1, saved_bytes))

    def _note_host(self, operations_s: float) -> bool:
        """What recomputing took beyond the plan, by the largest pass with one: the host's time.
        Whether it is worth counting. If there is hardly any, and the plan hardly waits for copies
        of what no operation makes, calls are not tried: they spare nothing else."""
        plain_s = median_s(self._times.plain_s)
        if plain_s is None:
            return False
        plan = max(self._swapper.report().plans, key=lambda plan: plan.peak_before_bytes)
        beyond_s = max(0.0, operations_s - plain_s - (plan.iteration_s - plan.compute_s))
        self._each_s = beyond_s / max(1, plan.recomputed + plan.swapped)
        little_s = (1.0 - FASTER) * operations_s
        if self._other is RecomputeWay.CALLS and beyond_s + plan.stall_s <= little_s:
            self._why_not = "with them nothing waits for the host or for copies"
        return beyond_s > little_s


def _drift(a_s: float, b_s: float) -> float:
    """How many times the shorter the longer is."""
    return max(a_s, b_s) / min(a_s, b_s)
