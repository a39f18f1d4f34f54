"""The kinds of passes that a job has: what was seen of each, and its plan.

A kind is watched, then tried, then planned. A plan whose measured peak is above the budget is
replaced by one for a smaller budget. Kinds are distinguished by their events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

from kilter.core.errors import PlanError
from kilter.core.reasons import Reason
from kilter.memory import messages
from kilter.memory.engine.backend import HostMemoryError
from kilter.memory.engine.call_choice import CallChoice, Segments
from kilter.memory.engine.differences import MOST_EXTRA
from kilter.memory.engine.host import HostArena
from kilter.memory.engine.other_sizes import structure
from kilter.memory.engine.pass_record import PassRecord, SavedSegment
from kilter.memory.engine.plan_feedback import (
    LISTEN_EVERY,
    MAX_ANSWERS,
    MAX_SHIFTS,
    Corrections,
    PassPeaks,
    PlanChecks,
)
from kilter.memory.engine.ready import Ready, ready
from kilter.memory.engine.resolved import ResolvedRecipes
from kilter.memory.engine.store import Store
from kilter.memory.engine.trial import TrialTerms
from kilter.memory.engine.waits import Waits
from kilter.memory.engine.watch import Attention
from kilter.memory.kept_calls import KeptCalls
from kilter.memory.layer_paths import without_numbers
from kilter.memory.plan.choose import SWAP_ONLY, arena, described, plan
from kilter.memory.plan.feedback import NOTICED, Waiting, earlier, expected, slower, slowness
from kilter.memory.plan.problem import IdleInterval, Link, Problem
from kilter.memory.plan.simulate import simulate
from kilter.memory.plan.state import Visits
from kilter.memory.usable_bytes import countable_bytes

SETTLED_STEPS = 2
"""A pass counts as settled after so many optimizer steps: the first creates gradients and state."""
SETTLED_PASSES = 6
"""It is the same for jobs without a `torch.optim` optimizer."""
MANY_ALIKE = 8
"""Where so many kinds of passes begin alike, each pass may be another one."""
MANY_SERVED = 3
"""It is the same where the longest of them could serve so many others."""
MAX_TRIALS = 3
"""A kind of pass that does not come again within so many is left without a plan."""
TUNED = 3
"""So many passes under a new plan are measured: their peak, and how long they wait for copies."""
LESS_BESIDE = 1 / 16
"""If passes begin with this share of the budget less in use than when they were watched, they are
watched anew."""
MAX_FAILED_CALLS = 2
"""After so many passes of one kind in which a call ran otherwise than planned, no calls are
recomputed."""
MAX_KINDS = 32
"""So many kinds are remembered; the oldest is forgotten, one without a plan first."""


@dataclass(slots=True)
class PassKind:
    """One kind of pass: its record, and its plan."""

    record: PassRecord
    structure: int = field(init=False)
    """The same for kinds that differ in sizes alone."""
    tried: bool = False
    """Its recipes were tried against the real tensors."""
    trials: int = 0
    calls_alone: bool = False
    """Its recipes were tried, and calls of modules were not: that is to come."""
    without_calls: PassKind | None = None
    """The same kind as it was planned and measured before calls of modules were tried."""
    segments: tuple[SavedSegment, ...] = ()
    """The plan may recompute each of these calls of modules, or parts of them, at one time."""
    kept: KeptCalls | None = None
    """They are the same for another run; None: there was nothing to choose from."""
    plan: Ready | None = None
    outdated: bool = False
    """Its plan was measured otherwise than predicted, and another one is to be made."""
    failed_calls: int = 0
    """So many passes have departed from its plan in a call that was to be recomputed."""
    weighed: bool = False
    """Its levels were measured after an optimizer step, which makes the optimizer's state."""
    hopeless: bool = False
    corrections: Corrections = field(default_factory=Corrections)
    checks: PlanChecks = field(default_factory=PlanChecks)

    def __post_init__(self) -> None:
        self.structure = structure(self.record)

    def trial_terms(self, budget_bytes: int) -> TrialTerms:
        """What is to be tried in a pass of this kind."""
        return TrialTerms(
            operations=not self.calls_alone,
            expected_bytes=self.record.saved_bytes,
            budget_bytes=budget_bytes,
        )

    def may_use(self, budget_bytes: int) -> int:
        """What a plan may count on."""
        return countable_bytes(budget_bytes) - self.corrections.less_bytes

    def fits_beside(self, older_bytes: int, budget_bytes: int) -> bool:
        """Its plan serves a pass that begins while older graphs have so many bytes: no more than
        were there when it was watched, or than the budget leaves room for."""
        if self.plan is None:
            return False
        room_bytes = max(budget_bytes - self.plan.value.peak_bytes, LESS_BESIDE * budget_bytes)
        return older_bytes - self.record.older_bytes <= room_bytes

    @property
    def moves(self) -> bool:
        """Under its plan something is offloaded or recomputed."""
        value = None if self.plan is None else self.plan.value
        return value is not None and value.swapped + value.recomputed > 0

    @property
    def settled(self) -> bool:
        """Its plan, if it has one, was measured and holds."""
        plan = self.plan
        return plan is None or (
            plan.use.tuned >= TUNED and not self.outdated and not plan.use.waits
        )


Kinds = dict[tuple[int, ...], PassKind]
"""A kind is known by its events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTerms:
    """What counts for the plans of all kinds."""

    link: Link
    planner: str
    min_bytes: int
    alone_s: float
    """This counts for each tensor that is recomputed alone or offloaded."""


class PassKinds:
    """All kinds of passes so far, and the host memory that their plans share."""

    def __init__(self, store: Store, terms: PlanTerms) -> None:
        self._store = store
        self._terms = terms
        self._streams: dict[tuple[int, ...], Visits] = {}
        """Optimizer state streams so in passes with these events: of one kind, or none."""
        self._by_events: Kinds = {}
        self._tried_before: dict[tuple[int, ...], PassRecord] = {}
        """It has what trials have found of kinds that are watched anew, since their levels are
        others."""
        self._expected: PassKind | None = None
        """What is tried in the present pass was not seen before."""
        self._kept: dict[str, KeptCalls] = {}
        """What an earlier run has chosen, by the fingerprint of the kind of pass."""
        self._departures: dict[int, float] = {}
        """So many passes that began with this event have departed from every plan; one that did not
        makes up for half of one that did. It is `MANY_ALIKE` where so many kinds begin with it."""
        self._retained = False
        """Some pass has departed from its plan and retained its graph."""
        self._arena = HostArena(store.backend)
        self.peaks = PassPeaks()
        self.waited_s: float | None = None
        """A pass under the plan waited so long for copies, when that was timed last."""
        self.hastened = 0
        """So many loads start earlier than planned, since they were late."""
        self.refused: dict[Reason, None] = {}
        self.attention = Attention()

    def __iter__(self) -> Iterator[PassKind]:
        return iter(tuple(self._by_events.values()))  # other threads of the program train as well

    def _outdate_plans(self) -> None:
        """Every plan is to be made anew, also those that calls of modules have put aside."""
        for kind in self:
            for each in filter(None, (kind, kind.without_calls)):
                each.outdated = each.plan is not None

    @property
    def host_bytes(self) -> int:
        """Host memory that plans have taken."""
        return self._arena.host_bytes

    def forget(self, *, arena: bool = False) -> None:
        """Forget all kinds, and with `arena` the host memory, which was given back."""
        self._by_events.clear()
        self._tried_before.clear()
        self.attention = Attention()
        if arena:
            self._arena.forget()

    def exchange(self, others: Kinds | None, budget_bytes: int) -> Kinds:
        """Go on with `others`, which an earlier call gave, or with none. Gives the present ones.
        Shapes that keep changing will go on to do so."""
        before, self._by_events = self._by_events, {}
        attention = self.attention
        self.forget()
        if attention.every > 1:
            self.attention = attention
        self._by_events = others or {}
        for kind in self:
            if kind.plan is not None:
                self._settled_in(kind.plan)  # the arena may have grown meanwhile
                kind.outdated |= kind.plan.problem.budget_bytes != kind.may_use(budget_bytes)
        return before

    def weigh_anew(self, state: Visits | None, events: tuple[int, ...]) -> None:
        """Watch all kinds anew for their levels. How tensors are recomputed stays as it was; in
        passes with these events optimizer state streams like this from now on."""
        self._streams = {} if state is None else {events: state}
        tried = {kind.record.events: kind.record for kind in self if kind.tried}
        self.forget()
        self._tried_before = tried

    def kept_calls(self) -> tuple[KeptCalls, ...]:
        """What another run may begin with, of kinds that this run has met and of others."""
        met = {kind.kept.events: kind.kept for kind in self if kind.kept is not None}
        known = (self._kept | met).values()
        return tuple(kept for kept in known if isfinite(kept.cost_s))[-MAX_KINDS:]

    def recompute(self, *, calls: bool, each_s: float, kept: Iterable[KeptCalls]) -> None:
        """Those that were tried without calls of modules are tried again with them; or all go on
        without them, under the plans that they had before. `kept` is what an earlier run has
        chosen."""
        if each_s != self._terms.alone_s:  # others may be better
            for kind in self:
                kind.kept = None
        self._terms = replace(self._terms, alone_s=each_s)
        self._kept = {one.events: one for one in kept}
        self._tried_before.clear()
        for events, kind in self._by_events.items():
            if calls and kind.tried and not kind.record.segments:
                before = kind.corrections
                after = Corrections(less_bytes=before.less_bytes, slow=before.slow)
                self._by_events[events] = PassKind(
                    kind.record,
                    weighed=True,
                    calls_alone=True,
                    without_calls=kind,
                    corrections=after,
                )
            elif not calls:
                kind.record.segments = ()
                if kind.without_calls is not None:
                    kind = self._by_events[events] = kind.without_calls
                if kind.plan is not None:
                    self._settled_in(kind.plan)  # the arena may have grown meanwhile
                    otherwise = kind.plan.problem.alone_s != each_s
                    kind.outdated |= otherwise or bool(kind.plan.segments)
                kind.tried |= any(datum.recipe is not None for datum in kind.record.data)
                kind.hopeless = False

    # Observe

    def alike(self, first: int) -> list[PassKind]:
        """Those that begin with this event."""
        return [kind for kind in self if kind.record.events[0] == first]

    def differ(self, first: int) -> bool:
        """Many kinds begin with this event: the plans of longer ones serve others."""
        return self._departures.get(first, 0.0) >= MANY_ALIKE

    def vary(self, first: int) -> bool:
        """Some kinds that begin with this event differ in sizes alone."""
        return any(kind.record.varies for kind in self.alike(first))

    def candidate(self, steps: int, first: int, *, planned: bool) -> PassKind | None:
        """One that was watched long enough, has no plan yet, and begins with this event. `planned`
        says that a pass with a plan is to be expected: no kind is tried in it that was tried in
        vain before. Where many kinds begin alike, longer ones come first, which serve others."""
        alike, trials = self.alike(first), MAX_TRIALS
        differ = self.differ(first)
        if differ:  # the longest may come seldom
            alike.sort(key=_first_to_try)
            planned, trials = False, MANY_ALIKE * MAX_TRIALS
        for kind in alike:
            if not kind.tried and kind.trials < trials:
                kind.hopeless = False
            elif not kind.tried and not kind.hopeless:
                # One that serves others is planned as it is: nothing can be recomputed.
                kind.tried = differ and _served(kind.record, alike) > 1
                kind.hopeless = not kind.tried
            in_vain = planned and kind.trials and not kind.tried
            if kind.plan or kind.hopeless or in_vain:
                continue
            passes = kind.record.passes
            settled = (differ or passes >= 2) and steps >= SETTLED_STEPS and kind.weighed
            if settled or passes >= SETTLED_PASSES:
                return kind
        return None

    def branch(self, before: Ready, event: int, code: int) -> Ready | None:
        """A plan whose pass is that of `before` up to `event`, and then goes on like this."""
        for kind in self:
            other = kind.plan
            if (
                other is not None
                and other.events[:event] == before.events[:event]
                and event < len(other.events)
                and other.steps[event].expected == code
            ):
                return other
        return None

    def watched(self, record: PassRecord, *, weighed: bool) -> None:
        """A pass was watched to its end; `weighed` if the optimizer's state was there."""
        kind = self._by_events.get(record.events)
        like = kind or self._of_other_sizes(record)
        self.attention.met(useful=like is not None and like.plan is None)
        if kind is None and like is not None:
            self._join(like, PassKind(record, weighed=weighed))
        elif kind is not None:
            if weighed and not kind.weighed:  # the passes before had no optimizer state beside them
                kind.record.begin_bytes = record.begin_bytes
            kind.record.merge(record)
            kind.weighed |= weighed
        else:
            before = self._tried_before.pop(record.events, None)
            if before is not None:
                record.learn(before)
            self._add(PassKind(record, weighed=weighed, tried=before is not None))

    def _of_other_sizes(self, record: PassRecord) -> PassKind | None:
        """Where many kinds begin alike: the one that differs from this pass in sizes alone."""
        if not record.events or not self.differ(record.events[0]):
            return None
        wanted = structure(record)
        found = [kind for kind in self.alike(record.events[0]) if kind.structure == wanted]
        return max(found, key=lambda kind: (bool(kind.plan), kind.record.saved_bytes), default=None)

    def ended(self, first: int, *, departed: bool) -> None:
        """A pass that began with this event, under a plan, has ended. Where such passes depart from
        every plan again and again, and sizes alone differ, the kinds become one: their order is not
        foreseen."""
        alike = self.alike(first)
        if not self.differ(first) and len({kind.structure for kind in alike}) < len(alike):
            before = self._departures.get(first, 0.0)
            self._departures[first] = max(0.0, before + (1 if departed else -0.5))
            if self.differ(first):
                self._join_all(first)

    def _join_all(self, first: int) -> None:
        """Of kinds that begin so and differ in sizes alone one stays."""
        for kind in self.alike(first):
            like = self._of_other_sizes(kind.record)
            if like is not None and like is not kind:
                self._join(like, kind)
                like.outdated = like.plan is not None

    def _join(self, one: PassKind, other: PassKind) -> None:
        """Of two kinds that differ in sizes alone the one with a plan stays, or else the larger
        one, and knows what is known of the other."""

        def worth(kind: PassKind) -> tuple[bool, int]:
            return kind.plan is not None, kind.record.saved_bytes

        stays, goes = sorted((one, other), key=worth, reverse=True)
        self._by_events.pop(goes.record.events, None)
        self._by_events[stays.record.events] = stays
        stays.record.merge(goes.record)
        stays.weighed |= goes.weighed
        if goes.record.tried_as:
            stays.tried |= stays.record.learn(goes.record)

    def _add(self, kind: PassKind) -> None:
        if not kind.record.events:  # an exception has ended the first hook of the pass
            return
        first = kind.record.events[0]
        planned = [other for other in self.alike(first) if other.plan is not None]
        if self.differ(first) and any(_serves(other.record, kind.record) for other in planned):
            return
        if len(self._by_events) == MAX_KINDS:
            plans = {events: kind.plan for events, kind in self._by_events.items()}
            del self._by_events[min(plans, key=lambda events: plans[events] is not None)]
        self._by_events[kind.record.events] = kind
        if not self.differ(first) and _many(self.alike(first)):
            self._departures[first] = MANY_ALIKE
            for other in planned:
                self._serve_by(other)
            self._join_all(first)

    def has_room(self, record: PassRecord) -> bool:
        """A pass like this could keep everything: in a trial what recipes read comes back early."""
        usable_bytes = self._store.backend.usable_bytes()
        made_bytes = max(datum.size_bytes for datum in record.data)
        return usable_bytes is None or record.peak_bytes + made_bytes <= usable_bytes

    def expect(self, record: PassRecord) -> PassKind:
        """A pass like this begins, as far as is known, and is tried; if it is one, it is a kind."""
        self._expected = PassKind(record, weighed=True)
        return self._expected

    def tried(self, record: PassRecord, *, operations: bool) -> None:
        """A pass was watched while its tensors were recomputed beside the real ones, by single
        `operations` too. It may be of another kind than the one for which that was done, or of none
        that is known."""
        expected, self._expected = self._expected, None
        kind = self._by_events.get(record.events)
        if kind is None and expected is not None and expected.record.events == record.events:
            kind = expected
            self._add(kind)
        kind = kind or self._of_other_sizes(record)
        if kind is None or not (operations or kind.calls_alone):
            return
        known = True
        if operations:
            known = kind.record.learn(record)
        else:
            kind.record.segments = record.segments if kind.record.events == record.events else ()
        times = zip(kind.record.operation_s, record.operation_s, strict=True)
        kind.record.operation_s = [min(pair) for pair in times]
        kind.hopeless &= kind.tried  # it was given up because it had not come while it was tried
        kind.tried |= known

    @property
    def highest_bytes(self) -> int:
        """The largest peak of a pass of any kind, as they run now."""
        peaks = [kind.plan.use.peak_bytes for kind in self if kind.plan is not None]
        return max([self.peaks.unplanned_bytes, *peaks])

    def measures(self, planned: Ready, budget_bytes: int) -> bool:
        """Whether the peak of the pass that begins under this plan is to be measured."""
        if planned.use.tuned < TUNED:
            return True
        kind = self._kind_of(planned)
        if kind is not None and kind.checks.due():
            self._look_beside(kind, budget_bytes)
            peak_bytes = self._store.backend.peak_so_far_bytes()  # since a pass was measured
            if peak_bytes is None or peak_bytes > budget_bytes:
                return True
            kind.corrections.excesses = 0  # the plan holds
        return False

    def _look_beside(self, kind: PassKind, budget_bytes: int) -> None:
        """Where the program has come to keep less beside its passes (another training has ended, a
        checkpoint was loaded), the plan moves more than it has to: watch the kind anew."""
        used_bytes = self._store.backend.used_bytes()
        if used_bytes is None or not kind.moves:
            return
        if kind.record.begin_bytes - used_bytes > LESS_BESIDE * budget_bytes:
            del self._by_events[kind.record.events]
            self._tried_before[kind.record.events] = kind.record

    def measured(self, planned: Ready, peak_bytes: int | None, budget_bytes: int) -> None:
        """A pass under a plan has ended with this peak. If that is above the budget, plan for less:
        fragments and workspace are seen by no event, nor what the program keeps beside the pass."""
        planned.use.tuned += 1
        if peak_bytes is None:
            return
        self.peaks.counted(planned, peak_bytes)
        self.peaks.planned_bytes.append(peak_bytes)
        over_bytes = peak_bytes - budget_bytes
        kind = self._kind_of(planned)
        if over_bytes > 0 and kind is not None:
            kind.outdated |= kind.corrections.exceeded(over_bytes)

    def call_failed(self, planned: Ready) -> None:
        """In a pass under this plan a call ran otherwise than when it was tried."""
        kind = self._kind_of(planned)
        if kind is not None:
            kind.failed_calls += 1
            if kind.failed_calls >= MAX_FAILED_CALLS:
                kind.record.segments, kind.outdated = (), True

    def _kind_of(self, planned: Ready) -> PassKind | None:
        """The kind for which that was planned."""
        kinds = (kind for kind in self if kind.plan is not None and kind.plan.use is planned.use)
        return next(kinds, None)

    def outdate(self) -> None:
        """The budget is another: every plan is made anew, and earlier peaks do not count."""
        self.peaks.unplanned_bytes = self.peaks.most_bytes = 0
        self._outdate_plans()
        for kind in self:
            kind.hopeless = False

    def listens(self, planned: Ready) -> bool:
        """Whether waiting for copies is to be timed in the pass that begins."""
        if planned.use.quiet:
            planned.use.quiet -= 1
            return False
        return bool(planned.places)

    def waited(self, planned: Ready, waits: Waits) -> None:
        """A pass under a plan has ended in which waiting was timed. After `TUNED` of them late
        loads are started earlier; if that does not help, the link is slower than its table says."""
        use = planned.use
        use.waits.append(waits)
        if len(use.waits) < TUNED:
            return
        found, took_s = _usual(planned), median(one.took_s() for one in use.waits)
        use.waits.clear()
        use.quiet = LISTEN_EVERY
        self.waited_s = found.total_s
        kind = self._kind_of(planned)
        if kind is None or kind.outdated or kind.corrections.answers == MAX_ANSWERS:
            return
        problem, value = planned.problem, planned.value
        predicted = expected(problem, value.schedule)
        # Where the host or the optimizer takes most of the time, a wait is not worth a plan, which
        # the host would have to make meanwhile.
        limit_s = NOTICED * max(value.iteration_s, took_s)
        if found.total_s - predicted.total_s <= limit_s:
            return
        corrections, late = kind.corrections, found.beyond(predicted)
        corrections.answers += 1
        may_shift = late.out_s <= limit_s and corrections.shifts < MAX_SHIFTS
        if may_shift and self._hasten(kind, late):
            corrections.shifts += 1
            return
        corrections.slower(*slowness(problem, value.schedule, late))
        kind.outdated = True
        self.refused[messages.slower_link(*corrections.slow)] = None

    def _hasten(self, kind: PassKind, late: Waiting) -> bool:
        """The same plan with late loads earlier; `False` if there is no memory for it."""
        assert kind.plan is not None
        before = kind.plan
        problem, value = before.problem, before.value
        schedule = earlier(problem, value.schedule, late.in_s)
        hastened = len({*schedule.moves} - {*value.schedule.moves})
        outcome = simulate(problem, schedule)
        slower_s = outcome.iteration_s - value.iteration_s
        if not hastened or outcome.faults or slower_s > late.total_s:
            return False
        self.hastened += hastened
        value = described(problem, schedule, outcome, planner=value.planner)
        kind.plan = self._settled_in(
            self._made_ready(kind, problem, before.numbers, value, before.places)
        )
        return True

    # Plan

    def plan(self, kind: PassKind, budget_bytes: int) -> None:
        """Give it a plan. If that takes more host memory than there is, one within what there is;
        if there is none, or too little, one that only recomputes."""
        kind.outdated = False
        problem, _ = kind.record.problem(
            link=self._terms.link,
            state=self._streams.get(kind.record.events),
            budget_bytes=kind.may_use(budget_bytes),
            min_bytes=self._terms.min_bytes,
        )
        if kind.record.on_demand(problem, self._terms.min_bytes) is not None:
            self.refused[messages.UNNEEDED] = None
            kind.plan, kind.hopeless = None, True
            return
        in_use = self._store.counts.alive > 0
        for room in (lambda: None, lambda: self._arena.room_bytes(in_use=in_use), lambda: 0):
            try:
                kind.plan = self._ready(kind, budget_bytes, room())
            except (PlanError, HostMemoryError) as error:
                self.refused[messages.of_error(error)] = None
                continue
            self.peaks.unplanned_bytes = 0
            self._serve_by(kind)
            return
        kind.hopeless = kind.plan is None

    def _serve_by(self, planned: PassKind) -> None:
        """Forget the kinds that this plan serves too."""
        first = planned.record.events[0]
        if self.differ(first):
            for other in self.alike(first):
                if other is not planned and _serves(planned.record, other.record):
                    self._by_events.pop(other.record.events, None)

    def _ready(self, kind: PassKind, budget_bytes: int, room_bytes: int | None) -> Ready:
        out, back = kind.corrections.slow
        terms = self._terms
        link = slower(terms.link, out=out, back=back)
        make_problem = partial(
            PassRecord.problem,
            link=link,
            state=self._streams.get(kind.record.events),
            budget_bytes=kind.may_use(budget_bytes),
            min_bytes=terms.min_bytes,
            host_room_bytes=room_bytes,
            recompute=terms.planner not in SWAP_ONLY or room_bytes == 0,
        )
        before, kind.segments, kind.kept = kind.kept, (), None
        if terms.planner == "mix" and kind.record.segments:
            choice = CallChoice(kind.record, make_problem, terms.alone_s)
            kind.segments, kind.kept = self._calls(choice, before)
        problem, numbers = make_problem(kind.record, segments=kind.segments)
        problem = replace(problem, alone_s=terms.alone_s, moved_s=terms.alone_s)
        value = plan(problem, terms.planner)
        roomy = replace(problem, intervals=_at_most(problem, numbers, kind.record))
        offsets, total = arena(roomy, value.schedule)
        places = {
            numbers[index]: (offset, roomy.intervals[index].size_bytes)
            for index, offset in offsets.items()
        }
        self._make_room(total)
        return self._settled_in(self._made_ready(kind, problem, numbers, value, places))

    def _calls(self, choice: CallChoice, before: KeptCalls | None) -> tuple[Segments, KeptCalls]:
        """Those of the plan before or of an earlier run, if they are as good as they were; else the
        best, which takes seconds to find."""
        for kept in (before, self._kept.get(choice.record.fingerprint)):
            again = None if kept is None else choice.again(kept)
            if kept is not None and again is not None:
                return again, kept
        best = choice.best()
        return best, choice.kept(best)

    def retain(self) -> None:
        """A pass has departed from its plan and retains its graph, above the budget: tensors that
        plans have left to autograd cannot be offloaded. From now on they follow all tensors."""
        if not self._retained:
            self._retained = True
            self._outdate_plans()

    def _made_ready(self, kind: PassKind, *planned: Any) -> Ready:
        segments = kind.segments
        return ready(kind.record, *planned, retained=self._retained, segments=segments)

    def scaled(self, plan: Ready, record: PassRecord) -> Ready:
        """The same plan for passes like this, which are of the same structure and no larger."""
        places = {
            number: (offset, record.data[number].size_bytes)
            for number, (offset, _) in plan.places.items()
        }
        made = ready(
            record, plan.problem, plan.numbers, plan.value, places, retained=self._retained
        )
        made.use, made.recipes = plan.use, ResolvedRecipes(seldom=True)
        return self._settled_in(made)

    def _settled_in(self, made: Ready) -> Ready:
        if self._arena.memory is not None:
            made.settle_in(self._arena.memory)
        return made

    def _make_room(self, total_bytes: int) -> None:
        """Host memory of this size for the plan that is being made, if need be with what passes
        without a plan have taken and do not use now."""
        before = self._arena.memory
        in_use = self._store.counts.alive > 0
        try:
            try:
                self._arena.grow(total_bytes, in_use=in_use)
            except HostMemoryError:
                self._store.pool.empty()
                self._arena.grow(total_bytes, in_use=in_use)
        finally:
            if self._arena.memory is not before:
                for kind in self:
                    if kind.plan is not None:
                        self._settled_in(kind.plan)


def _at_most(
    problem: Problem, numbers: Sequence[int], record: PassRecord
) -> tuple[IdleInterval, ...]:
    """Intervals as large as their tensors have ever been."""
    intervals = list(problem.intervals)
    for index, number in enumerate(numbers):
        most_bytes = record.data[number].most_bytes
        if most_bytes and not intervals[index].together:
            intervals[index] = replace(intervals[index], size_bytes=most_bytes)
    return tuple(intervals)


def _usual(planned: Ready) -> Waiting:
    """For each copy the median of the passes that were timed. One of them may be delayed by
    something else, and in the first one, right after planning, the device may wait for the host
    instead of for copies."""
    found = [waits.read() for waits in planned.use.waits]
    usual = {number: median(one.get(number, 0.0) for one in found) for number in found[0]}
    out_s = usual.pop(None, 0.0)
    indices = {number: index for index, number in enumerate(planned.numbers)}
    in_s = {indices[number]: s for number, s in usual.items() if number in indices}
    return Waiting(out_s=out_s, in_s=in_s)


def _first_to_try(kind: PassKind) -> tuple[int, ...]:
    """Where many kinds begin alike: those that many passes differ from in sizes alone, then those
    that save the most."""
    record = kind.record
    passes = record.passes if record.varies else 0
    return not kind.tried, -passes, -len(record.data), -record.saved_bytes


def _many(alike: Sequence[PassKind]) -> bool:
    """Plans for a few of them have to do."""
    longest = max(alike, key=lambda kind: len(kind.record.data)).record
    return len(alike) >= MANY_ALIKE or _served(longest, alike) > MANY_SERVED


def _served(longer: PassRecord, alike: Sequence[PassKind]) -> int:
    """So many of these kinds could run under its plan, its own among them."""
    return sum(_serves(longer, kind.record) for kind in alike)


def _serves(longer: PassRecord, other: PassRecord) -> bool:
    """The other one saves what this one saves, in the same modules or in layers that are alike, but
    for some that it lacks, and for sizes that vary. Where they do, it may save a few more."""
    vary = {without_numbers(datum.module) for datum in longer.data if datum.most_bytes}
    more = _saves(other, vary) - _saves(longer, vary)
    return more.total() <= (MOST_EXTRA if vary else 0)


def _saves(record: PassRecord, vary: Set[str]) -> Counter[tuple[str, int]]:
    """How many tensors of each size modules that are alike save; these in sizes that vary."""
    paths = ((without_numbers(datum.module), datum.size_bytes) for datum in record.data)
    return Counter((path, 0 if path in vary else size_bytes) for path, size_bytes in paths)
