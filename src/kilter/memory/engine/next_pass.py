"""What the pass that begins is to be: watched, tried, under a plan, or none of these.

A pass that begins like one with a plan runs under that plan, unless programs that did so have
departed from it after the same passes before, or too many passes have lately departed from theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kilter.memory import messages
from kilter.memory.engine.other_sizes import OtherSizes
from kilter.memory.engine.pass_kinds import SETTLED_STEPS, PassKind, PassKinds
from kilter.memory.engine.ready import Ready

TELL_OF_OLDER = 8
"""After so many passes that ran without their plan because of an older graph, a line names that as
the reason."""
HOPELESS_EVERY = 8
"""One pass in so many is watched again, of those that begin like one that cannot be planned."""
TRIED_EVERY = 4
"""One pass in so many is tried where many kinds begin alike and some have a plan."""
DEVIATION_PATIENCE = 2
"""So many passes may depart from every plan before some are watched again. A pass that keeps to its
plan makes up for half of one that did not."""
MOST_ORDERS = 256
"""What came before passes; where shapes keep changing there is no end to it."""
TRUSTED = 4
"""After so many passes a plan is known to fit: it may fail as often before another one is tried."""
AGREED = 2
"""If a plan has failed so often at a place, it does not fit there, whatever came before."""
PLANS_AT_ONCE = 4
"""So many plans are made anew before a pass. Where sizes keep changing there may be many more."""
LOOK = 4
"""How many passes are watched then, so that kinds that alternate are all watched."""


class Deviations:
    """Whether passes depart from their plans so often that some have to be watched again."""

    def __init__(self) -> None:
        self._misses = 0.0
        self.to_watch = 0
        """So many passes are still to be watched though there is a plan."""

    def forget(self) -> None:
        """There are other plans from here on."""
        self._misses, self.to_watch = 0.0, 0

    def pass_ended(self, *, deviated: bool) -> None:
        """`deviated` says that it departed from its plan, or from every plan."""
        self._misses = max(0.0, self._misses + (1 if deviated else -0.5))
        if self._misses >= DEVIATION_PATIENCE:
            self._misses, self.to_watch = 0.0, LOOK


class PassOrder:
    """Which plan fits after which passes.

    Passes that begin alike may end otherwise. Programs repeat theirs in the same order, so the last
    two passes tell most of them apart (a critic twice, once with the gradient penalty, then its
    generator). How long ago an unusual pass was tells those that come once in so many (a penalty in
    every sixteenth pass)."""

    def __init__(self) -> None:
        self._last: tuple[int, int] = (0, 0)
        """How the last passes went."""
        self._fits: dict[tuple[int, int], dict[int, int]] = {}
        """For each two passes in a row: how often a pass whose events have this hash has come next,
        of late; less than 0: its plan was begun with and did not fit."""
        self._since = 0
        """So many passes have ended since the last one that was not the usual one at its place."""
        self._fits_then: dict[tuple[int, int, int], dict[int, int]] = {}
        """The same for places at which another pass than the usual one has come. A place is known
        by the two passes before it and by how long ago an unusual one was (`_since`)."""

    def plan(self, plans: Sequence[Ready]) -> Ready | None:
        """The one to begin with; None where each has failed."""
        best = max(plans, key=lambda plan: self._judged(hash(plan.events)), default=None)
        return None if best is None or self._fit(hash(best.events)) < 0 else best

    def trusts(self, plan: Ready) -> bool:
        """It has always fitted here of late."""
        return self._fit(hash(plan.events)) == TRUSTED

    def expects(self, plans: Sequence[Ready]) -> bool:
        """One of them is for the pass that begins now, as far as those before tell."""
        return any(self._fit(hash(plan.events)) > 0 for plan in plans)

    def _fit(self, events: int) -> int:
        then, usually = self._judged(events)
        return then or usually

    def _judged(self, events: int) -> tuple[int, int]:
        """How often passes whose events have this hash have lately come at the present place, and
        after the last passes; less than 0: never. One that failed to come once does not count
        there."""
        then = self._fits_then.get((*self._last, self._since), {}).get(events, 0)
        usually = self._fits.get(self._last, {}).get(events, 0)
        return 0 if -AGREED < then < 0 else then, usually

    def pass_ended(self, begun: Ready | None, events: tuple[int, ...] | None, event: int) -> None:
        """A pass that began with a plan had these events; None: others than those of any plan, from
        its event number `event` on."""
        came = None if events is None else hash(events)
        fits = begun is None or begun.events == events
        missed = None if begun is None or fits else hash(begun.events)
        rare, place = self._is_rare(came), (*self._last, self._since)
        _count(self._fits, self._last, missed, came)
        if rare or place in self._fits_then:
            _count(self._fits_then, place, missed, came)
        self._since = 0 if rare else self._since + 1
        self._last = self._last[1], event if came is None else came

    def pass_unseen(self) -> None:
        """A pass without a plan has ended that was not watched. It is taken for the one that came
        at this place most often."""
        then = self._fits_then.get((*self._last, self._since), {})
        known = {**then, **self._fits.get(self._last, {})}
        came = max(known, key=self._judged, default=None)
        if came is not None and self._fit(came) <= 0:
            came = None
        self._since = 0 if self._is_rare(came) else self._since + 1
        self._last = self._last[1], came or 0

    def _is_rare(self, came: int | None) -> bool:
        """After such passes as the last ones another pass is usual."""
        known = self._fits.get(self._last, {})
        usual = max(known, key=known.__getitem__, default=None)
        return usual is not None and known[usual] > 0 and usual != came


def _count(
    fits: dict[Any, dict[int, int]], place: tuple[int, ...], missed: int | None, came: int | None
) -> None:
    """At this place a pass came whose events have the hash `came`, where the plan of another one
    (`missed`) was begun with."""
    if len(fits) == MOST_ORDERS:
        fits.clear()
    known = fits.setdefault(place, {})
    if missed is not None:
        known[missed] = known.get(missed, 0) - 1
    if came is not None:
        known[came] = min(TRUSTED, known.get(came, 0) + 1)


class Beginning(NamedTuple):
    """How a pass begins."""

    candidate: PassKind | None
    """It is taken for a pass of this kind, and the recipes of that kind are tried in it."""
    watched: bool
    plan: Ready | None
    may_differ: bool
    """It may differ from its plan: lack some events, or have tensors of other sizes."""


class NextPass:
    """Decides how a pass begins, and remembers how earlier ones went."""

    def __init__(self, kinds: PassKinds) -> None:
        self._kinds = kinds
        self.sizes = OtherSizes(kinds)
        self._scaled: Ready | None = None
        """The present pass began with this plan of a larger one."""
        self._expected: PassKind | None = None
        """What is tried in the present pass was not seen before."""
        self._deviations = Deviations()
        self._order = PassOrder()
        self._begun: Ready | None = None
        """The present pass began with this plan."""
        self._round = 0
        self._waited_for_older = 0
        """So many passes ran without their plan because of an older graph."""
        self.steps = 0
        """Optimizers have made so many steps."""

    def begin(
        self,
        first: int,
        budget_bytes: int,
        *,
        may_plan: bool,
        older_in_arena: bool,
        older_bytes: int,
    ) -> Beginning:
        """A pass begins with this event. Plans that are to be made are made now, new ones only if
        that may be. Older graphs have so many bytes of saved tensors; `older_in_arena` says that
        one of them needs the plans' host memory."""
        self._round += 1
        candidate = self._candidate(first, budget_bytes, may_plan=may_plan)
        alike = self._kinds.alike(first)
        fitting = _plans(kind for kind in alike if kind.fits_beside(older_bytes, budget_bytes))
        plan, differ = self._order.plan(fitting), self._kinds.differ(first)
        if differ and not (plan and self._order.trusts(plan)):
            plan = max(fitting, key=lambda each: len(each.events), default=None)
        self._scaled = self._expected = None
        if may_plan and candidate is None and not _plans(alike):
            self._look_at_other_sizes(first, budget_bytes)
            candidate = self._expected
        unknown = self._scaled is None
        watched = candidate is not None or (unknown and self._to_be_watched(alike, plan))
        begun = plan or self._scaled
        if begun is not None and not watched and older_in_arena:
            self._tell_of_older_graph()
        if watched or older_in_arena:
            begun = plan = self._scaled = None
        self._begun = plan
        return Beginning(candidate, watched, begun, may_differ=differ and begun is plan)

    def _look_at_other_sizes(self, first: int, budget_bytes: int) -> None:
        """Where shapes keep changing, take the plan of a larger pass, or try what is expected."""
        if self._kinds.attention.every == 1 or self.steps < SETTLED_STEPS:
            return
        self._scaled = self.sizes.plan(first, budget_bytes)
        if self._scaled is None:
            self._expected = self.sizes.candidate(first, budget_bytes)

    def ended(
        self, events: tuple[int, ...] | None, event: int, *, deviated: bool, watched: bool
    ) -> None:
        """The present pass had these events; None: they are not known, or others than those of its
        plan from its event number `event` on. `deviated` says that it departed from its plan."""
        self._deviations.pass_ended(deviated=deviated)
        if self._begun is not None:
            self._kinds.ended(self._begun.events[0], departed=deviated)
        if self._scaled is not None:
            self.sizes.ended(as_expected=not deviated)
        if self._expected is not None:
            self.sizes.ended(as_expected=self._expected.tried)
        if self._begun is None and not watched:
            self._order.pass_unseen()
        else:
            self._order.pass_ended(self._begun, events, event)

    def forget(self) -> None:
        """There are other plans from here on."""
        self._deviations.forget()
        self.sizes.forget()

    def _candidate(self, first: int, budget_bytes: int, *, may_plan: bool) -> PassKind | None:
        """The kind of pass that is to be tried now. Those that were tried are planned."""
        alike = self._kinds.alike(first)
        plans = _plans(alike)
        planned = self._order.expects(plans)
        candidate = self._kinds.candidate(self.steps, first, planned=planned)
        if candidate is not None and candidate.tried:
            if may_plan:
                self._kinds.plan(candidate, budget_bytes)
            candidate = None
        if plans and self._kinds.differ(first) and self._round % TRIED_EVERY:
            candidate = None
        outdated = [kind for kind in self._kinds if kind.outdated]
        if len(outdated) > PLANS_AT_ONCE:  # the others when they come
            outdated = [kind for kind in alike if kind.outdated]
        for kind in outdated:
            self._kinds.plan(kind, budget_bytes)
        return candidate

    def _to_be_watched(self, alike: list[PassKind], plan: Ready | None) -> bool:
        """Whether a pass that begins like these is to be watched, rather than to run under this
        plan of theirs, or without one."""
        attention = self._kinds.attention
        if self._deviations.to_watch:
            asked = attention.asks()
            self._deviations.to_watch -= asked
            return asked
        if plan is not None:
            return False
        # Plans of the others have been found not to fit here.
        unplanned = [kind for kind in alike if kind.plan is None]
        hopeless = bool(unplanned) and all(kind.hopeless for kind in unplanned)
        return not (hopeless and self._round % HOPELESS_EVERY) and attention.asks()

    def _tell_of_older_graph(self) -> None:
        """The pass that begins runs without its plan. Where that comes again and again the user is
        told."""
        self._waited_for_older += 1
        if self._waited_for_older == TELL_OF_OLDER:
            self._kinds.refused[messages.OLDER_GRAPH] = None


def _plans(kinds: Iterable[PassKind]) -> list[Ready]:
    return [kind.plan for kind in kinds if kind.plan is not None]
