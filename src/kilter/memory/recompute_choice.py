"""`--recompute auto`: single operations, or, if it is faster in this job, the checkpointing that a
model brings with it; then calls of modules, or parts of them, if those are faster still.

A plan counts the device's time. What the host needs to issue each recomputed tensor is in no plan,
and depends on the program. So each way is carried out for a few iterations (`way_in_force.py`),
and measured; two at a time are compared (`way_comparison.py`). What single operations have shown of
the host's time is counted in plans for them where that makes iterations shorter, and when calls are
chosen, for each tensor that they spare (`host_time.py`).

Where shapes keep changing, passes have the plan of a larger one, or none, and tensors are offloaded
on demand. Then that is compared with the model's own checkpointing, by all iterations.

A job that comes again begins with the way that its last run has measured to be the fastest
(`kept_recompute.py`), before it has made a plan, and compares them only where that way is not to be
had any more.

Several ranks choose together: at the end of each turn they agree on what the slowest has measured
(`rank_agreement.py`), so that all go on alike from the same iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kilter.memory.host_time import HostTime
from kilter.memory.iteration_times import IterationTimes
from kilter.memory.kept_recompute import KeptRecompute, RecomputeHistory, RecomputeWay
from kilter.memory.own_checkpointing import OwnCheckpointing
from kilter.memory.rank_agreement import RankAgreement, TurnNote
from kilter.memory.way_comparison import FASTER, WayComparison
from kilter.memory.way_in_force import WayInForce

if TYPE_CHECKING:
    from kilter.memory.engine.engine import Swapper

MOST_TENSORS = 4000
"""In a pass of more saved tensors calls are not tried: their plans would take minutes, in which the
program waits (2,000 layers on a busy CPU: about two)."""
COVERED = 1.2
"""The model's own checkpointing covers this many times the bytes that have to go, where blocks can
be left out: a block keeps its input, and blocks differ. What the budget then still lacks is planned
around it."""


@dataclass(frozen=True, slots=True)
class PlainPass:
    """The largest pass with everything kept, before checkpointing makes it another one."""

    peak_bytes: int = 0
    tensors: int = 0
    """So many are saved in it."""
    events: str = ""
    """It has this fingerprint."""
    share: float = 1.0
    """The model's own checkpointing is to cover this share of its blocks."""


class RecomputeChoice:
    """Compares ways on the running job. All but `tick` and `conclude` are called in the thread
    whose tensors are governed."""

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
        self._can_record = can_record
        self._ranks = ranks
        self._history = history
        self._begins = True
        """It is not agreed on yet what an earlier run has chosen."""
        self.kept: KeptRecompute | None = None
        """What an earlier run has chosen, and this one begins with; once it is decided by
        measurement, what the next run is to begin with."""
        self._times = times
        self._host = HostTime(swapper, times)
        self.in_force = WayInForce(swapper, times, own, self._host)
        self._comparison = WayComparison()
        self.plain = PlainPass()
        self._note: TurnNote | None = None
        """This rank's turn is over, and that is what it has found, and has to say."""
        self._changing = False
        """Shapes keep changing."""
        self.words = ""
        """What came of it, in a sentence; empty: not decided."""

    @property
    def decided(self) -> bool:
        """The job stays as it is from here on."""
        return bool(self.words)

    def tick(self) -> None:
        """In the session's thread: hear of the other ranks, and of an earlier run."""
        self._ranks.tick()
        self._history.tick()

    def iteration_ended(
        self, *, met: bool, settled: bool, changing: bool = False, step_wait_s: float = 0.0
    ) -> None:
        """`met` says that the job's budget is in force and a pass was watched, `settled` that its
        plans stand, but for this choice; `changing` that its shapes keep changing, so that they
        never will. The optimizer's step waits `step_wait_s` for its state."""
        self._host.step_wait_s = step_wait_s
        if changing != self._changing and not self._comparison.begun:
            self._changing = changing
            self._times.mixed_s.clear()
        if not (self._ranks.said or self._say(met, settled)):
            return
        heard = self._ranks.heard()
        if heard is not None:
            self._go_on(heard)
        elif self._ranks.lost:
            self._stay(self._ranks.lost)

    def keep(self) -> None:
        """For the next run of this job."""
        if self.decided and self.kept is not None:
            calls = self.in_force.way is RecomputeWay.CALLS
            kept_calls = self._swapper.kept_calls() if calls else ()
            self._history.keep(replace(self.kept, calls=kept_calls))

    def close(self) -> None:
        """The script is over: the model is as it was found."""
        if self._ranks.said and not self.decided:
            self._stay("not all ranks came to the end of a turn")
        elif self._comparison.begun and not self.decided:
            self._stay("the run ended before ways to recompute were compared")
        self.in_force.close()

    def conclude(self) -> None:
        """At the end of the run: plans may have been made since it was decided."""
        self.keep()
        self._history.tick()

    def _say(self, met: bool, settled: bool) -> bool:
        """Whether the turn of this rank is over, and the others are told."""
        operations = self.in_force.way is RecomputeWay.OPERATIONS
        settled |= self._changing
        if self._begins and self._note is None:
            self._note = self._earlier(met, settled)
        turns = not self._begins and (not operations or (settled and self._looked()))
        if turns and self._note is None:
            self._note = self._turn()
        note = self._note
        if note is None:
            return False
        kept = note.kept
        records = kept.way is RecomputeWay.CALLS if kept else operations and not self._begins
        records &= not (note.changing or (self._ranks.alone and self._nothing_to_spare(note)))
        if records and not note.why_not and not self._can_record():
            return False
        self._ranks.say(note)
        self._note = None
        return True

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
        comparison, way = self._comparison, self.in_force.way
        self._changing = comparison.on_demand = heard.changing
        clear = comparison.add(heard.seconds)
        assert comparison.other is not None
        if clear and self._calls_are_next(heard):
            comparison.go_on_with(RecomputeWay.CALLS)
            clear, way = False, comparison.base
        why_not = heard.why_not or self._nothing_to_spare(heard)
        if clear or why_not:
            self._decide(heard, why_not)
        else:
            other = comparison.other if way is comparison.base else comparison.base
            self.in_force.take(other, heard.share)

    def _calls_are_next(self, heard: TurnNote) -> bool:
        """They are compared with what has turned out to be the faster of the other two."""
        own = self._comparison.other is RecomputeWay.OWN
        return own and heard.tensors <= MOST_TENSORS and not heard.changing

    def _nothing_to_spare(self, heard: TurnNote) -> str:
        """Why calls are not tried beside single operations: they spare waits, and nothing else."""
        comparison, operations = self._comparison, RecomputeWay.OPERATIONS
        calls_next = comparison.other is RecomputeWay.CALLS and self.in_force.way is operations
        if calls_next and comparison.base is operations and heard.keeps_up:
            return "with them no pass waits for the host or for copies"
        return ""

    def _looked(self) -> bool:
        """It is known what single operations are compared with. One iteration is looked at for
        that."""
        if self._comparison.other is None:
            if self.in_force.looks():
                return False
            own = self.in_force.models
            self._comparison.other = RecomputeWay.OWN if own else RecomputeWay.CALLS
        if not self._comparison.begun:
            self._note_pass()
        return True

    def _earlier(self, met: bool, settled: bool) -> TurnNote | None:
        """What an earlier run has chosen, as soon as passes are as they were then; None: not known.
        What is not found until plans stand is not waited for."""
        history, alone = self._history, self._ranks.alone
        if alone and history.known and history.last is None:
            self._begins = False
            return None
        if not (history.known and (met or settled) and self._looked()):
            return None
        kept = history.last
        if kept is not None and (kept.models, kept.events) != (
            self.in_force.models,
            self.plain.events,
        ):
            if not settled:
                return None
            kept = None
        if kept is None and alone:
            self._begins = False
            return None
        return self._note_of(None, self._no_calls, kept)

    def _begin_with(self, kept: KeptRecompute) -> None:
        self.kept = kept
        if kept.way is RecomputeWay.CALLS:
            self._host.each_s = kept.each_s
        else:
            self._host.count(kept.each_s)
        if kept.way is RecomputeWay.OPERATIONS:
            self._stay_with(kept, "")
        else:
            self.in_force.take(kept.way, kept.share, kept.calls)

    def _stay_with(self, kept: KeptRecompute, why_not: str) -> None:
        """It has a plan on all ranks, and stays; or it has none, and the ways are compared."""
        if not why_not:
            self._stay(f"an earlier run of this job chose that ({kept.day}) [measured]")
            return
        self.kept = None
        self.in_force.take(RecomputeWay.OPERATIONS, kept.share)
        self._host.count(0.0)

    def _turn(self) -> TurnNote | None:
        """The present way was measured, or will not be. None: neither."""
        if self._changing:
            return self._turn_of_changing_shapes()
        way, swapper, other = self.in_force.way, self._swapper, self._comparison.other
        measured_s = self._times.measured_s()
        why_not = ""
        if way is RecomputeWay.OPERATIONS:
            report = swapper.report()
            waits = any(plan.compute_s < FASTER * plan.iteration_s for plan in report.plans)
            own = waits and other is RecomputeWay.OWN
            if not (report.recomputed or own):
                return None
            if not self._comparison.begun:
                measured_s = self._host.shorter_s(measured_s)
            if measured_s is None:
                return None
            why_not = self._no_calls
        elif way is RecomputeWay.CALLS and swapper.planned and not swapper.recomputes_calls:
            why_not = "no call of a module is worth recomputing"
        elif measured_s is None:
            if not self._times.in_vain():
                return None
            why_not = f"{way.value} got no plan in time"
        return self._note_of(measured_s, why_not)

    def _turn_of_changing_shapes(self) -> TurnNote | None:
        """The same where most passes have no plan. What single operations would take is not
        known."""
        if self._comparison.other is not RecomputeWay.OWN or not self._swapper.report().spilled:
            return None
        measured_s = self._times.mixed_measured_s()
        return None if measured_s is None else self._note_of(measured_s, "")

    @property
    def _no_calls(self) -> str:
        """Why calls are not tried beside single operations, whatever is measured."""
        too_many = self.plain.tensors > MOST_TENSORS
        if too_many and self._comparison.other is RecomputeWay.CALLS:
            return "calls of modules are not tried with so many tensors"
        return ""

    def _note_of(
        self, measured_s: float | None, why_not: str, kept: KeptRecompute | None = None
    ) -> TurnNote:
        models, plain = self.in_force.models, self.plain
        return TurnNote(
            models=models,
            share=plain.share,
            tensors=plain.tensors,
            seconds=measured_s,
            why_not=why_not,
            changing=self._changing,
            kept=kept,
            keeps_up=self._host.keeps_up,
        )

    def _decide(self, heard: TurnNote, why_not: str) -> None:
        way = self._comparison.base
        if way is not self.in_force.way:
            self.in_force.take(way, heard.share)
        self._stay("; ".join(filter(None, (self._comparison.words, why_not))))
        if self._comparison.measured_s and not heard.changing:
            self.kept = KeptRecompute(
                day=date.today().isoformat(),
                way=way,
                models=self.in_force.models,
                events=self.plain.events,
                share=heard.share,
                each_s=self._host.of(way),
            )

    def _stay(self, why: str) -> None:
        self.words = self.in_force.stay(why, on_demand=self._comparison.on_demand)

    def _note_pass(self) -> None:
        largest = self._swapper.largest_pass()
        if largest is not None:
            saved_bytes = sum(datum.size_bytes for datum in largest.data)
            over_bytes = max(0, largest.peak_bytes - self._swapper.budget_bytes)
            share = min(1.0, COVERED * over_bytes / max(1, saved_bytes))
            tensors, events = len(largest.data), largest.fingerprint
            self.plain = PlainPass(largest.peak_bytes, tensors, events, share)
