"""The kinds of passes that a job has: what was seen of each, and its plan.

A kind is watched, then tried, then planned; a plan whose measured peak is above the budget is made
anew for less. Kinds are told apart by their events.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kilter.act.swapper.backend import Backend, HostMemoryError
from kilter.act.swapper.ready import Ready, ready
from kilter.act.swapper.store import Store
from kilter.core.errors import PlanError
from kilter.observe.data import PassRecord
from kilter.plan.swap.choose import arena, plan
from kilter.plan.swap.problem import Link

if TYPE_CHECKING:
    import torch

SETTLED_STEPS = 2
"""Optimizer steps before a pass counts as settled: the first creates gradients and state."""
SETTLED_PASSES = 6
"""The same for jobs without a `torch.optim` optimizer."""
MAX_TRIALS = 3
"""A kind of pass that does not come again within so many is left without a plan."""
TUNED = 3
"""Passes under a new plan whose peak is measured."""
ROUNDING = 512
"""One part in so many of the budget is left to the allocator, which rounds sizes up."""
MAX_PLANS = 5
"""For one kind: each time that a plan's peak was measured above the budget is a new one."""
MAX_KINDS = 32
"""To know; the oldest is forgotten, one without a plan first."""


@dataclass(slots=True)
class Kind:
    """What is known of one kind of pass."""

    record: PassRecord
    tried: bool = False
    """Its recipes were tried against the real data."""
    trials: int = 0
    plan: Ready | None = None
    plans: int = 0
    """Made so far."""
    exceeded: bool = False
    """Its plan measured above the budget, and there is to be another."""
    weighed: bool = False
    """Its levels were looked at after an optimizer step, which makes the optimizer's state."""
    hopeless: bool = False
    less_bytes: int = 0
    """Taken off the budget because passes under a plan measured more than predicted."""

    @property
    def settled(self) -> bool:
        """Its plan, if it has one, was measured and holds."""
        return self.plan is None or (self.plan.tuned >= TUNED and not self.exceeded)


class Kinds:
    """All kinds met so far, and the host memory that their plans share."""

    def __init__(
        self, backend: Backend, store: Store, *, link: Link, planner: str, min_bytes: int
    ) -> None:
        self._backend = backend
        self._store = store
        self._link = link
        self._planner = planner
        self.taken = 0.0
        """Share of the way to the device that others take."""
        self._min_bytes = min_bytes
        self._by_events: dict[tuple[int, ...], Kind] = {}
        self._arena: torch.Tensor | None = None
        self.peaks_bytes: list[int] = []
        self.refused: list[str] = []

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._by_events.values())

    @property
    def arena_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.numel()

    def forget(self, *, arena: bool = False) -> None:
        """Everything, the host memory too if it is gone."""
        self._by_events.clear()
        if arena:
            self._arena = None

    def relevel(self, record: PassRecord, level_bytes: list[int]) -> None:
        """Passes of this kind take so much from now on, and are planned anew; all others are
        forgotten."""
        kept = {e: Kind(k.record, tried=True) for e, k in self._by_events.items() if k.tried}
        self._by_events = {e: kind for e, kind in kept.items() if kind.record is record}
        for kind in self:
            kind.record.level_bytes = level_bytes
            kind.weighed = True

    # See

    def alike(self, first: int) -> list[Kind]:
        """Those that begin with this event."""
        return [kind for kind in self if kind.record.events[0] == first]

    def candidate(self, steps: int) -> Kind | None:
        """One that was watched long enough and has no plan yet."""
        for kind in self:
            if kind.plan or kind.hopeless or (kind.trials >= MAX_TRIALS and not kind.tried):
                continue
            passes = kind.record.passes
            settled = passes >= 2 and steps >= SETTLED_STEPS and kind.weighed
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
        if kind is not None:
            kind.record.merge(record)
            kind.weighed |= weighed
        else:
            if len(self._by_events) == MAX_KINDS:
                plans = {events: kind.plan for events, kind in self._by_events.items()}
                del self._by_events[min(plans, key=lambda events: plans[events] is not None)]
            self._by_events[record.events] = Kind(record, weighed=weighed)

    def tried(self, kind: Kind, record: PassRecord) -> None:
        """A pass was watched while its data were made again; it may be of another kind."""
        if kind.record.events != record.events:
            return
        kind.record.learn(record)
        times = zip(kind.record.operation_s, record.operation_s, strict=True)
        kind.record.operation_s = [min(pair) for pair in times]
        kind.tried = True

    def measured(self, planned: Ready, peak_bytes: int | None, budget_bytes: int) -> None:
        """A pass under a plan has ended with this peak. If that is above the budget, plan for less:
        fragments and workspace are seen by no event."""
        planned.tuned += 1
        if peak_bytes is None:
            return
        self.peaks_bytes.append(peak_bytes)
        for kind in self:
            if peak_bytes > budget_bytes and kind.plan is planned and kind.plans < MAX_PLANS:
                # More each time, since another plan errs by another amount.
                kind.less_bytes += kind.plans * (peak_bytes - budget_bytes)
                kind.exceeded = True

    # Plan

    def plan(self, kind: Kind, budget_bytes: int) -> None:
        """Give it a plan; without host memory, one that moves nothing."""
        kind.plans += 1
        kind.exceeded = False
        for swap in (True, False):
            try:
                kind.plan = self._ready(kind, budget_bytes, swap=swap)
            except (PlanError, HostMemoryError) as error:
                self.refused.append(str(error))
                continue
            return
        kind.hopeless = kind.plan is None

    def _ready(self, kind: Kind, budget_bytes: int, *, swap: bool) -> Ready:
        link = self._link.less(self.taken)
        problem, numbers = kind.record.problem(
            link=link,
            budget_bytes=budget_bytes - budget_bytes // ROUNDING - kind.less_bytes,
            min_bytes=self._min_bytes,
            swap=swap,
        )
        value = plan(problem, self._planner, alone=not self.taken)
        offsets, total = arena(problem, value.schedule)
        places = {
            numbers[index]: (offset, problem.intervals[index].size_bytes)
            for index, offset in offsets.items()
        }
        self._make_room(total)
        made = ready(kind.record, problem, numbers, replace(value, host_bytes=total), places)
        if self._arena is not None:
            made.settle_in(self._arena)
        return made

    def _make_room(self, total_bytes: int) -> None:
        """An arena of this size. What left without a plan needs its host memory no more."""
        self._store.empty_pool()
        if total_bytes <= self.arena_bytes:
            return
        before, self._arena = self._arena, self._backend.reserve(total_bytes)
        if before is not None and self._store.alive == 0:
            self._backend.give_back(before)
        for kind in self:
            if kind.plan is not None:
                kind.plan.settle_in(self._arena)
