"""The present pass under its plan: what is saved and used is compared with what the plan expects,
and the moves that the plan has due at each event are issued.

Under a plan the host's time counts: a job that issues its work just in time has none to spare. So
tensors that the plan leaves alone are handed to autograd as they are, and an event costs one look
at a list. Where the compiled library is there, hardly one comes here (`position.py`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kilter.memory.engine.collector import Collector
from kilter.memory.engine.demand import Demand
from kilter.memory.engine.differences import Differences, code_of_extra
from kilter.memory.engine.modified import Modified
from kilter.memory.engine.pass_kinds import TUNED, PassKinds
from kilter.memory.engine.pass_record import FOREIGN, use_code
from kilter.memory.engine.position import NO_STEPS, Position
from kilter.memory.engine.ready import Due, Ready, in_place_of
from kilter.memory.engine.recompute import Reader, Recipe
from kilter.memory.engine.segment_pass import SegmentPass
from kilter.memory.engine.store import EVICTED, RESIDENT, Pass, Saved, Store
from kilter.memory.engine.waits import Waits

if TYPE_CHECKING:
    from kilter.memory.engine.segments import ModuleCall


@dataclass(slots=True)
class PassCounts:
    """What passes have come to so far."""

    passes: int = 0
    planned: int = 0
    """So many ran to their end under a plan."""
    watched: int = 0
    deviations: int = 0
    """So many departed from their plan."""
    late: int = 0
    """So many tensors that were offloaded were not back when backward needed them."""
    held_peak_bytes: int = 0
    """Saved tensors had at most so many bytes on the device at one time, in the last pass that was
    watched, or among the first under a plan."""


class PassUnderPlan:
    """It has no plan in passes without one, and after the pass has departed from it."""

    def __init__(
        self,
        store: Store,
        kinds: PassKinds,
        demand: Demand,
        collector: Collector,
        next_event: Callable[[], int | None],
    ) -> None:
        """`next_event` gives the number of the pass's next event, None outside of passes."""
        self._store = store
        self._kinds = kinds
        self._demand = demand
        self._collector = collector
        self._moves = DueMoves(store)
        self._reader = Reader(store)
        self.segments = SegmentPass(
            store,
            self._moves,
            self._reader.copies,
            next_event,
            self._call_failed,
        )
        """The calls of modules that are tried in the present pass, or recomputed."""
        self.at = Position()
        self.plan: Ready | None = None
        self.measured = False
        """The peak of the present pass is measured, and what is held at each event."""
        self._quiet = False
        """The compiled library may see to the events."""
        self.deviated = False
        """The present pass has departed from its plan."""
        self._differences = Differences()
        self._older: list[weakref.ref[Saved]] = []
        """These tensors of earlier passes were in the plans' host memory when the last pass
        began."""
        self.counts = PassCounts()

    # The pass as a whole

    def begin(
        self,
        plan: Ready | None,
        budget_bytes: int,
        use_library: Callable[..., Position | None],
        *,
        may_differ: bool,
    ) -> None:
        """A pass begins, which may differ from its plan. `use_library` has the compiled
        library take part and gives its `Position`, or None (`TensorHooks.use_library`)."""
        self.at.event = 0
        self.deviated = False
        self._differences.begin(
            may=may_differ,
            most_bytes=self._store.backend.peak_so_far_bytes() if may_differ else None,
        )
        self._moves.begin()
        self._reader.begin(self._store.compiled)
        self.measured = plan is None or self._kinds.measures(plan, budget_bytes)
        self._quiet = not self.measured
        if self.measured:
            before_bytes = self._store.backend.peak_bytes()  # from here on
            if plan is not None and plan.use.tuned >= TUNED and before_bytes is not None:
                self._kinds.peaks.counted(plan, before_bytes)  # since it was measured last
        if plan is not None:
            if self._store.backend.shows_waits and self._kinds.listens(plan):
                self._store.waits = Waits(self._store.backend)
            if type(self.at) is Position:
                waiting = self._moves.overdue, self._demand.lent
                ours = self._moves.by_number, self._read, self._attend
                self.at = use_library(*waiting, *ours) or self.at
        self._follow(plan)

    def stepped(self) -> None:
        """An optimizer has stepped within the pass: what is saved next begins another one."""
        self._quiet = False
        self.at.follow(NO_STEPS, {}, {}, self._store.within, None)

    def depart(self) -> None:
        """Go on without the plan, in the middle of the pass."""
        if self.plan is not None and self.at.event < len(self.plan.events):
            self._drop(self.plan)

    def leave(self) -> None:
        """The engine stops. What is used from here on is compared with no plan."""
        self._follow(None)

    def end(self) -> tuple[int, ...] | None:
        """The pass has ended. Gives its events if they were those of its plan."""
        plan, store, counts = self.plan, self._store, self.counts
        waits, store.waits = store.waits, None
        self._differences.end()
        self.leave()
        if self.measured:
            held_bytes = counts.held_peak_bytes = store.counts.held_peak_bytes
            if self._store.backend.used_bytes() is None:  # only the engine's own count is to be had
                self._kinds.peaks.counted(plan, held_bytes)
        if plan is None:
            return None
        if self.at.event < (plan.last_save + 1 if self._differences.some else len(plan.events)):
            counts.deviations += 1
            self.deviated = True
            return None
        counts.planned += 1
        store.pool.rest()
        if waits is not None:
            waits.over()
            self._kinds.waited(plan, waits)
        return None if self._differences.some else plan.events

    def older_in_arena(self) -> bool:
        """Between two passes: tensors of older graphs are in the host memory that all plans share.
        (What was offloaded on demand is in blocks of its own.)"""
        if self._store.counts.alive == 0:  # nearly always
            self._older = []
            return False
        found = [*self._older, *self._moves.by_number.values()]
        self._older = [reference for reference in found if _in_arena(reference())]
        return bool(self._older)

    # Events

    def save(self, tensor: torch.Tensor, size_bytes: int, key: int, within: Pass) -> Any:
        """A tensor is saved, on a large storage with this address. Gives what autograd holds
        instead of it; None where the pass is not under a plan, or not any more."""
        plan = self.plan
        if plan is None:
            return None
        store, moves = self._store, self._moves
        if self._differences.may:
            known = store.find(tensor, key, within)
            found = self._finds_event(plan, size_bytes, known)
            if not found and self._is_extra(plan, known):
                if known is not None:
                    return store.view(known, tensor)
                return store.kept(tensor, code_of_extra(plan), within)
        else:
            found = plan.steps[self.at.event].expected == size_bytes
        if not found:
            plan = self._switch(plan, size_bytes)
            if plan is None:
                return None
        step = plan.steps[self.at.event]
        expected, number, due, followed, read, recomputed, called, version, _ = step
        saved = store.find(tensor, key, within) if followed else None
        if followed and saved is not moves.followed(number):
            self._drop(plan)
            return None
        self.at.event += 1
        if due is not None or moves.overdue or self.measured:
            self._issue(plan, due)
        if not followed:
            if size_bytes != expected:
                self._differences.sizes[number] = size_bytes
            return store.kept(tensor, use_code(number), within)
        if saved is not None:
            return store.view(saved, tensor)
        if size_bytes != expected and not self._differences.takes_size(plan, step, size_bytes):
            return store.kept(tensor, use_code(number), within)
        saved = store.save(tensor, size_bytes, key, within, number)
        moves.follow(number, saved)
        if called:
            self.segments.saved(saved)
        view = store.view(saved, tensor)
        if tensor._version != version:  # it is not what its node has made
            store.mark_written(tensor)
            return view
        if read:
            store.mark(view, tensor)
        if recomputed:
            saved.recipe = self._reader.read(tensor)
        return view

    def _read(self, tensor: torch.Tensor) -> Recipe | None:
        """The recipe of the tensor that is saved, which the compiled library has not found."""
        plan = self.plan
        assert plan is not None
        number = plan.steps[self.at.event].number
        return plan.recipes.read(self._reader, tensor, number, self._store.compiled)

    def use(self, code: int) -> bool:
        """Backward needs a tensor (`use_code`). Whether the pass is under a plan still."""
        plan = self.plan
        if plan is None:
            return False
        if plan.steps[self.at.event].expected != code:
            differences = self._differences
            may = differences.may and code != FOREIGN
            if may and code == code_of_extra(plan):
                return True
            followed = self._moves.followed
            event = differences.uses_at(plan, self.at.event, code, followed) if may else None
            if event is not None:
                self._go_on(plan, event)
            elif may and differences.takes_extra(self.at.event):
                return True
            else:
                plan = self._switch(plan, code)
                if plan is None:
                    return False
        due = plan.steps[self.at.event].due
        self.at.event += 1
        if due is not None or self._moves.overdue or self.measured:
            self._issue(plan, due)
        return True

    def _attend(self, moves: bool, saved: Saved | None) -> None:
        """The compiled library has come to the event before this one, as planned: issue what of its
        moves is left, and fetch this tensor, which backward needs. It stays away if it was
        modified."""
        plan = self.plan
        assert plan is not None
        if moves and self._store.backend.stream() is not None:
            self._issue(plan, plan.steps[self.at.event - 1].due)
        if saved is not None and saved.state != RESIDENT:
            self.note_late(saved)
            with contextlib.suppress(Modified):  # Python finds it again, and tells the program
                self._store.fetch(saved)

    def note_late(self, saved: Saved) -> None:
        """Backward needs this tensor now."""
        if saved.state == EVICTED and saved.host is not None:
            self.counts.late += 1

    def used(self, budget_bytes: int) -> None:
        """Backward has been given that tensor."""
        if self.measured:
            self._measure(budget_bytes, in_use=True)

    def over(self, budget_bytes: int) -> None:
        """Nothing that was saved in the pass is left."""
        plan, differences = self.plan, self._differences
        if self.measured:
            self._measure(budget_bytes, in_use=False)
        elif plan is not None and differences.may:
            peak_bytes = differences.peak_bytes(self._store.backend.peak_so_far_bytes())
            if peak_bytes is not None and peak_bytes > budget_bytes:
                self._kinds.measured(plan, peak_bytes, budget_bytes)

    def _measure(self, budget_bytes: int, *, in_use: bool) -> None:
        """The peak of a pass is taken when backward uses its last tensor; of one without a backward
        when its tensors are gone."""
        plan = self.plan
        ended = plan is not None and self.at.event == len(plan.events)
        if plan is not None and ended and plan.ends_in_use == in_use:
            self._kinds.measured(plan, self._store.backend.peak_bytes(), budget_bytes)

    def _issue(self, plan: Ready, due: Due | None) -> None:
        """Issue the moves that are due, or were before. Where the pass is measured, count what is
        held before and after them."""
        moves, counts = self._moves, self._store.counts
        if moves.overdue:
            moves.catch_up()
        if not self.measured:
            if due is not None:
                moves.carry_out(plan, due)
            return
        beside_bytes = plan.beside_bytes[self.at.event - 1]
        counts.beside_bytes = min(beside_bytes, counts.beside_bytes)
        if due is not None:
            moves.carry_out(plan, due)
        counts.beside_bytes = beside_bytes
        counts.hold(0)

    # Which plan

    def _follow(self, plan: Ready | None) -> None:
        """The pass is under this plan from here on, or under none."""
        self.plan = plan
        steps, hosts, recipes = NO_STEPS, dict[int, torch.Tensor](), dict[int, Any]()
        if plan is not None and self._quiet:
            steps, hosts, recipes = plan.packed_steps, plan.hosts, plan.recipes.by_number
        self.at.follow(steps, hosts, recipes, self._store.within, self.segments.calls)

    def _switch(self, before: Ready, code: int) -> Ready | None:
        """The pass departs from its plan: take the plan of a kind that began alike, or none."""
        other = self._kinds.branch(before, self.at.event, code)
        alike = not self._differences.sizes
        if alike and other is not None and self._moves.on_host_alike(before, other):
            self._follow(other)
            self.segments.dropped()
            return other
        self._drop(before)
        return None

    def _finds_event(self, plan: Ready, size_bytes: int, saved: Saved | None) -> bool:
        """Whether the plan has an event for a tensor of this size that is saved now, in a pass that
        may differ from it. If so, go on there. `saved`: it is followed already."""
        step = plan.steps[self.at.event]
        followed, differences = self._moves.followed, self._differences
        comes = differences.comes(step, size_bytes)
        if comes and (not step.followed or followed(step.number) is saved):
            return True
        if plan.segments:  # a call belongs to its own module
            self._kinds.call_failed(plan)
            return False
        if saved is not None:
            return False
        event = differences.saves_at(plan, self.at.event, size_bytes, followed)
        if event is not None:
            self._go_on(plan, event)
        return event is not None

    def _is_extra(self, plan: Ready, saved: Saved | None) -> bool:
        """Whether nothing is to be done for what is saved now, which the plan does not expect: it
        is followed already, or sizes vary, and it was too small to be followed before."""
        if plan.segments or not (saved or self._kinds.vary(plan.events[0])):
            return False
        return self._differences.takes_extra(self.at.event)

    def _go_on(self, plan: Ready, event: int) -> None:
        """Issue what is due before this event, which comes now."""
        while self.at.event < event:
            due = plan.steps[self.at.event].due
            self.at.event += 1
            self._issue(plan, due)

    def _call_failed(self) -> None:
        """A call of the present plan cannot be recomputed."""
        if self.plan is not None:
            self._kinds.call_failed(self.plan)
            self._drop(self.plan)

    def _drop(self, plan: Ready) -> None:
        self._collector.let_go()
        self._moves.overdue.clear()
        self._follow(None)
        self._demand.take_over(self._moves.alive())
        self.segments.dropped()
        self.deviated = True
        self.counts.deviations += 1
        peak_bytes = self._store.backend.peak_bytes()  # from here on
        if self.measured and peak_bytes is not None:
            self._kinds.peaks.counted(plan, peak_bytes)
        event = min(self.at.event, len(plan.events) - 1)
        self._store.counts.beside_bytes = plan.beside_bytes[event]


def _in_arena(saved: Saved | None) -> bool:
    """Its bytes are in the plans' host memory and nowhere else."""
    if saved is None or saved.state == RESIDENT or saved.transfer is None:
        return False
    return saved.transfer.host is not None and saved.transfer.pooled is None


class DueMoves:
    """Issues what is due. A tensor that the program still holds is overdue until it is dropped."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.by_number: dict[int, weakref.ref[Saved]] = {}
        """It holds the tensors of the present pass that are followed."""
        self._calls: dict[int, weakref.ref[ModuleCall]] = {}
        """It holds the calls that are recomputed, by `in_place_of` their tensors."""
        self.overdue: dict[int, torch.Tensor | None] = {}
        """What is due to be evicted but held by the program, with the host memory for the copy
        (None: to be recomputed)."""

    def begin(self) -> None:
        """A pass begins."""
        self.by_number.clear()
        self._calls.clear()
        self.overdue.clear()

    def follow(self, number: int, saved: Saved) -> None:
        """This tensor of the pass is the one that the plan calls `number`."""
        self.by_number[number] = saved.itself

    def follow_call(self, call: ModuleCall) -> None:
        """What this call has saved is evicted together."""
        self._calls[in_place_of(call.first)] = weakref.ref(call)

    def followed(self, number: int) -> Saved | None:
        """The tensor of that number, while autograd may still ask for it."""
        reference = self.by_number.get(number)
        return None if reference is None else reference()

    def alive(self) -> list[Saved]:
        """All that are followed and autograd may still ask for, in order."""
        found = (self.followed(number) for number in sorted(self.by_number))
        return [saved for saved in found if saved is not None]

    def carry_out(self, planned: Ready, due: Due) -> None:
        """Issue what is due at one event."""
        store = self._store
        for number in due.offload:
            saved = self.followed(number)
            if saved is not None:
                host = store.offload(saved, planned.hosts[number])
                if host is not None:
                    planned.hosts[number] = host
                elif store.pending(saved) and not saved.departs:
                    self.overdue[number] = planned.hosts[number]
        for number in due.evict:
            if number in self.overdue:
                continue
            if number < 0:
                self._evict_call(number)
                continue
            saved = self.followed(number)
            if saved is not None:
                store.evict(saved)
                if saved.recipe is not None and store.pending(saved):
                    self.overdue[number] = None
        for number in due.prefetch:
            self.overdue.pop(number, None)
            saved = self.followed(number)
            if saved is not None:
                store.prefetch(saved)

    def catch_up(self) -> None:
        """Evict what is overdue and no longer held by the program."""
        store = self._store
        for number, host in list(self.overdue.items()):
            if number < 0:
                self._evict_call(number)
                continue
            saved = self.followed(number)
            if saved is not None:
                if host is not None:
                    store.offload(saved, host)
                store.evict(saved)
            if saved is None or not store.pending(saved):
                del self.overdue[number]

    def _evict_call(self, number: int) -> None:
        """What the program holds is overdue."""
        self.overdue.pop(number, None)
        reference = self._calls.get(number)
        call = None if reference is None else reference()
        if call is None:
            return
        store, saved = self._store, call.alive()
        store.give_up(call, saved)
        if any(
            one.alias is not None and one.recipe is call and store.pending(one) for one in saved
        ):
            self.overdue[number] = None

    def on_host_alike(self, before: Ready, other: Ready) -> bool:
        """Tensors of this pass that are on the host have the same places in the other plan."""
        moved = [number for number in before.places if self._is_on_host(number)]
        return all(other.places.get(number) == before.places[number] for number in moved)

    def _is_on_host(self, number: int) -> bool:
        saved = self.followed(number)
        return saved is not None and saved.host is not None
