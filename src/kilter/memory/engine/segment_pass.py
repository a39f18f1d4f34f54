"""The segments of the present pass: tried where the pass is tried, recomputed where planned."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kilter.memory import messages
from kilter.memory.engine.modified import Modified
from kilter.memory.engine.pass_record import SavedSegment
from kilter.memory.engine.ready import Ready
from kilter.memory.engine.recompute import Foreign, Unlike
from kilter.memory.engine.segments import ModuleCall, ModuleCalls, tensors_in
from kilter.memory.engine.store import EVICTED, PREFETCHING, Saved, Store
from kilter.memory.engine.trial import Equal, same_bytes
from kilter.memory.engine.watch import Watch

if TYPE_CHECKING:
    from kilter.memory.engine.pass_under_plan import DueMoves
    from kilter.memory.engine.small_copies import SmallCopies

COMPARED_AWAY = 2
"""Where there is no room to bring a tensor back, a copy of it is compared with what the first turns
of a trial make: with all four, the copies would take most of the time."""
LARGEST_SHARE = 1 / 4
"""One segment may save at most this share of all bytes: it is recomputed at one time."""


class SegmentPass:
    """`next_event` gives the number of the pass's next event, None outside of passes."""

    def __init__(
        self,
        store: Store,
        moves: DueMoves,
        copies: SmallCopies,
        next_event: Callable[[], int | None],
        depart: Callable[[], None],
    ) -> None:
        """`depart` is called where the pass departs from its plan."""
        self._store = store
        self._backend = store.backend
        self._moves = moves
        self._next_event = next_event
        self._depart = depart
        self._plan: Ready | None = None
        self._watch: Watch | None = None
        self.on = False
        """Calls may be recomputed."""
        self.calls = ModuleCalls(store, copies, self._begins, self._ended)

    def enter(self) -> None:
        """Calls of this thread are seen from here on."""
        if self.on:
            self.calls.enter()

    def exit(self) -> None:
        """No calls are seen any more."""
        self._watch = None
        self.dropped()
        self.calls.exit()

    def switch(self, *, on: bool) -> None:
        """Whether calls may be recomputed, from the next pass on."""
        if on != self.on:
            self.on = on
            if on:
                self.enter()
            else:
                self.exit()

    def begin_pass(self, watch: Watch | None, plan: Ready | None) -> None:
        """A pass begins that is watched, or runs under a plan, or neither."""
        self._watch = watch if self.on and watch is not None and watch.trial else None
        self._plan = plan if self.on and plan is not None and plan.segments else None
        wanted = None
        if self._plan is not None:
            wanted = frozenset(id(segment.module()) for segment in self._plan.segments.values())
        self.calls.begin_pass(self._watch is not None or wanted is not None, wanted)

    def dropped(self) -> None:
        """The pass has departed from its plan."""
        self._plan = self.calls.present = None

    def saved(self, saved: Saved) -> None:
        """A tensor is saved that the plan counts to a call."""
        call = self.calls.present
        if call is not None:
            call.members.append(saved.itself)
            saved.recipe = call

    def _begins(self, module: torch.nn.Module) -> tuple[int, Any] | None:
        """The event at which a call begins that is of interest, and what it is to be."""
        event = self._next_event()
        if event is None:
            return None
        if self._watch is not None:
            return event, (self._watch, self._watch.saved)
        found = None if self._plan is None else self._plan.segments.get(event)
        if found is None or found.module() is not module:
            return None
        return event, (self._plan, found)

    def _ended(self, call: ModuleCall, result: Any) -> None:
        event = self._next_event()
        if event is None or event <= call.first:
            return
        call.last = event - 1
        under, what = call.expected
        if isinstance(under, Watch):
            self._to_try(call, result, under, what)
        elif under is self._plan:
            try:
                self._take_part(call, what)
            except Foreign:  # what was tried is not what has run now
                for saved in call.alive():
                    saved.recipe = None
                self._depart()

    # Under a plan

    def _take_part(self, call: ModuleCall, segment: SavedSegment) -> None:
        if call.last != segment.last or len(call.members) != len(segment.members):
            raise Foreign("a call has saved something else than when it was tried")
        sources = [self._moves.followed(number) for number in segment.sources]
        call.ended_as_planned([one for one in sources if one is not None], segment.copied)
        tried = iter(segment.operations)  # of fewer tensors, if the program holds some
        if not all(name in tried for name in call.operations):
            raise Foreign("in a call other operations ran than when it was tried")
        self._moves.follow_call(call)

    # In a trial

    def _to_try(self, call: ModuleCall, result: Any, watch: Watch, first: int) -> None:
        """Have the call tried when backward needs the first of the tensors that it saved."""
        trial = watch.trial
        assert trial is not None
        returned = {tensor.untyped_storage()._cdata for tensor in tensors_in(result)}
        members: dict[int, Saved] = {}
        for saved in watch.saved_since(first):
            storage = call.made(saved)
            if storage is not None and saved.key not in returned and not saved.cast:
                members[storage] = saved
        total_bytes = sum(saved.size_bytes for saved in members.values())
        if not members or total_bytes > LARGEST_SHARE * trial.terms.expected_bytes:
            return
        try:
            call.ended(members, watch.saved_since(0))
        except Foreign as error:
            trial.refuse(messages.segment_failed(type(call.module).__name__, error))
            return
        trial.reads(call.parameters)
        watch.waits_for(call.held)
        call.expected = watch, None
        for saved in members.values():
            saved.calls = [*(saved.calls or ()), call]

    def use(self, saved: Saved) -> None:
        """Backward needs a tensor."""
        calls, saved.calls = saved.calls, None
        for call in calls or ():
            if self._watch is not None and call.expected == (self._watch, None):
                call.expected = None, None
                self._try(call, self._watch)

    def _try(self, call: ModuleCall, watch: Watch) -> None:
        """Carry out what a call did beside the real one: note how long it takes and whether all is
        equal."""
        trial = watch.trial
        assert trial is not None
        members = call.alive()
        if len(members) < len(call.members):
            return
        name = type(call.module).__name__
        if any(not self._store.alone(one.tensor) for one in call.held):
            trial.refuse(messages.segment_failed(name, Foreign("reads what others hold")))
            return
        if trial.emptied(call.parameters):
            trial.refuse(messages.recipe_of_sharded_weights(name))
            return
        backend = self._backend
        made_bytes = sum(saved.size_bytes for saved in members)
        try:
            self._bring_back(members, trial.terms.budget_bytes - made_bytes)
            backend.peak_bytes()
            before_bytes = backend.used_bytes()
            repeated = trial.repeat(call.run, partial(self._compare, members))
        except (Unlike, Modified, RuntimeError) as error:
            trial.refuse(messages.segment_failed(name, error))
            return
        peak_bytes = backend.peak_bytes()
        extra_bytes = 0
        if peak_bytes is not None and before_bytes is not None:
            extra_bytes = max(0, peak_bytes - before_bytes - made_bytes)
        found = SavedSegment(
            name=name,
            module=weakref.ref(call.module),
            first=call.first,
            last=call.last,
            members=frozenset(saved.number for saved in members),
            sources=frozenset(view.saved.number for view in call.inputs),
            closed=frozenset(one.saved.number for one in call.inputs if not one.saved.cast),
            operations=call.operations,
            held=watch.held(call.held),
            copied_bytes=call.copied_bytes,
            extra_bytes=extra_bytes,
            recompute_s=0.0,
            reads=call.reads,
        )
        segments = watch.segments

        def takes(recompute_s: float) -> None:
            segments.append(replace(found, recompute_s=recompute_s))

        trial.when_over(repeated, takes, messages.segment_differs(name))

    def _bring_back(self, members: Sequence[Saved], most_bytes: int) -> None:
        """Fetch what backward is about to need, if no more than that is in use then."""
        missing_bytes = sum(saved.size_bytes for saved in members if saved.state == EVICTED)
        used_bytes = self._backend.used_bytes()
        if used_bytes is None:  # only the engine's own count is to be had
            used_bytes = self._store.counts.on_device_bytes
        fits = used_bytes + missing_bytes <= most_bytes
        for saved in members:
            if saved.state == PREFETCHING or (fits and saved.state == EVICTED):
                self._store.fetch(saved)

    def _compare(
        self, members: Sequence[Saved], made: Sequence[torch.Tensor], turn: int
    ) -> list[Equal]:
        pairs = zip(members, made, strict=True)
        return [
            same_bytes(self._alias_of(saved), one)
            for saved, one in pairs
            if saved.alias is not None or turn < COMPARED_AWAY
        ]

    def _alias_of(self, saved: Saved) -> torch.Tensor:
        """A tensor, or a copy of it where there was no room to bring it back."""
        alias, host = saved.alias, saved.host
        if alias is None:
            assert host is not None
            alias = self._backend.alloc_like(host)
            self._backend.wait(self._backend.copy_in(alias, host))
        return alias
