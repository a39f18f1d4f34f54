"""Passes of sizes that were never seen: texts of other lengths, batches of other sizes.

They save the same tensors in the same order, only smaller or larger. Each tensor grows with the one
that the pass begins with, or as its square, or not at all, so two passes tell the sizes in all
others; where one comes out otherwise, the pass departs from its plan. What was planned for a pass
serves those that are a little smaller: the same tensors leave at the same events, and everything
takes less. So where shapes keep changing a few passes are tried and planned, and stand for the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from kilter.memory.engine.pass_record import PassRecord, SavedTensor

if TYPE_CHECKING:
    from kilter.memory.engine.pass_kinds import PassKind, PassKinds
    from kilter.memory.engine.ready import Ready

LESS = 1.25
"""A plan serves passes that begin with up to so many times less than its own."""
MISFITS = 4
"""After so many passes that were otherwise than expected by others of a structure, nothing is
expected by those any more. One that was as expected makes up for half of one that was not."""
TRIES = 8
"""So many kinds are tried before any serves passes of other sizes; then one more for every two such
passes. (Where each pass is larger than all before, none ever does.)"""
RESTED = 16
"""After so many passes without a trial nothing more is expected to be tried."""
MOST_OTHERS = 16
"""So many sizes of passes are remembered that one plan serves."""


def structure(record: PassRecord) -> int:
    """The same for passes that differ in the sizes of their tensors alone."""
    events = tuple(min(code, 1) for code in record.events)
    return hash((events, record.names, record.backward_from))


def of_another_size(one: PassRecord, other: PassRecord, first: int) -> PassRecord | None:
    """The pass of the structure of these two that begins with this event, as far as they tell; None
    if some tensor would not be a whole number of bytes. That its recipes make the right bits is
    known where it is for both."""
    begins, ends = one.events[0], other.events[0]
    if begins == ends:
        return None
    share = (first - begins) / (ends - begins)

    def between(mine: float, theirs: float) -> float:
        return max(0.0, mine + share * (theirs - mine))

    events = []
    for mine, theirs in zip(one.events, other.events, strict=True):
        code = Fraction(mine)
        if mine * ends**2 == theirs * begins**2:  # the scores of attention, say
            code *= Fraction(first, begins) ** 2
        elif mine != theirs:
            code += (theirs - mine) * Fraction(first - begins, ends - begins)
        if code.denominator > 1 or (mine > 0 and code <= 0):
            return None
        events.append(int(code))
    sizes = iter([code for code in events if code > 0])
    levels = zip(one.level_bytes, other.level_bytes, strict=True)
    times = zip(one.operation_s, other.operation_s, strict=True)
    return replace(
        one,
        events=tuple(events),
        data=tuple(_data(one, other, sizes)),
        operation_s=[between(*pair) for pair in times],
        level_bytes=[int(between(*pair)) for pair in levels],
        passes=0,
        segments=(),
    )


def _data(one: PassRecord, other: PassRecord, sizes: Iterator[int]) -> Iterator[SavedTensor]:
    """What neither of the two frees sooner, or needs later."""
    for mine, theirs, size_bytes in zip(one.data, other.data, sizes, strict=True):
        free = (mine.free_at, theirs.free_at)
        needed = [at for at in (mine.needed_at, theirs.needed_at) if at is not None]
        yield replace(
            mine,
            size_bytes=size_bytes,
            free_at=None if free[0] is None or free[1] is None else max(free[0], free[1]),
            needed_at=min(needed, default=None),
            recompute_s=None if theirs.recompute_s is None else mine.recompute_s,
        )


class OtherSizes:
    """Plans for passes that begin with a tensor of a size that none of the known ones has."""

    def __init__(self, kinds: PassKinds) -> None:
        self._kinds = kinds
        self._misfits: dict[int, float] = {}
        """So many, by the structure that was expected."""
        self._structure = 0
        """It is what was expected last."""
        self._served = 0
        """So many passes ran under the plan of a larger one."""
        self._tried = 0
        self._since = 0
        """So many passes have begun since the last one in which something was tried."""

    @property
    def serves(self) -> bool:
        """Some plan serves other passes than its own."""
        return any(kind.plan is not None and kind.plan.others for kind in self._kinds)

    @property
    def tries(self) -> bool:
        """Not all that is to be tried was tried yet, as it seems."""
        return self._tried > 0 and self._since < RESTED

    def forget(self) -> None:
        """There are other plans from here on."""
        self._misfits.clear()
        self._served = self._tried = 0

    def ended(self, *, as_expected: bool) -> None:
        """A pass of which this was expected has ended."""
        misfits = self._misfits.get(self._structure, 0.0) + (-0.5 if as_expected else 1)
        self._misfits[self._structure] = max(0.0, misfits)

    def plan(self, first: int, budget_bytes: int) -> Ready | None:
        """That of the kind that is the least larger, made now if it has none yet; None where the
        pass fits without one."""
        self._since += 1
        kind = self._a_little_larger(first)
        if kind is None:
            return None
        self._structure = kind.structure
        if kind.outdated or (kind.plan is None and not kind.hopeless):
            self._kinds.plan(kind, budget_bytes)
        plan = kind.plan
        if plan is None or kind.record.events[0] == first:
            return plan
        if plan.segments:
            return None
        if first not in plan.others:
            record = self._expected(kind, first, budget_bytes)
            if record is None:
                return None
            if len(plan.others) == MOST_OTHERS:
                del plan.others[next(iter(plan.others))]
            plan.others[first] = self._kinds.scaled(plan, record)
        self._served += 1
        return plan.others[first]

    def candidate(self, first: int, budget_bytes: int) -> PassKind | None:
        """A kind that is to be tried in the pass that begins so, and then serves smaller ones."""
        enough = self._tried >= TRIES + self._served // 2
        if enough or self._a_little_larger(first) is not None:
            return None
        known = [kind for kind in self._kinds if kind.weighed and self._trusted(kind)]
        nearest = min(known, key=lambda kind: abs(kind.record.events[0] - first), default=None)
        record = None if nearest is None else self._expected(nearest, first, budget_bytes)
        if record is None or not self._kinds.has_room(record):
            return None
        self._tried, self._since = self._tried + 1, 0
        expected = self._kinds.expect(record)
        self._structure = expected.structure
        return expected

    def _trusted(self, kind: PassKind) -> bool:
        return self._misfits.get(kind.structure, 0.0) < MISFITS

    def _a_little_larger(self, first: int) -> PassKind | None:
        """The smallest kind that was tried, is as large, and not much larger."""
        found = [
            kind
            for kind in self._kinds
            if kind.tried and first <= kind.record.events[0] <= LESS * first and self._trusted(kind)
        ]
        return min(found, key=lambda kind: kind.record.events[0], default=None)

    def _expected(self, kind: PassKind, first: int, budget_bytes: int) -> PassRecord | None:
        """The pass of this kind's structure that begins so, by another one of that structure, if it
        exceeds the budget, and is not much smaller or larger than both."""
        begin = kind.record.events[0]
        others = [
            other.record
            for other in self._kinds
            if other.structure == kind.structure and other.record.events[0] != begin
        ]
        if not others:
            return None
        other = max(others, key=lambda record: abs(record.events[0] - begin))
        low, high = sorted((begin, other.events[0]))
        if not low <= LESS * first <= LESS * LESS * high:
            return None
        grown = (first - begin) / (other.events[0] - begin)
        peaks = kind.record.peak_bytes, other.peak_bytes
        if peaks[0] + grown * (peaks[1] - peaks[0]) <= kind.may_use(budget_bytes):
            return None
        return of_another_size(kind.record, other, first)
