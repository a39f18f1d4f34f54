"""The moves that a plan has due at the events of the present pass."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from kilter.memory.engine.ready import Due, Ready, in_place_of
from kilter.memory.engine.store import Saved, Store

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine.segments import ModuleCall


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
                elif store.pending(saved):
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
