"""The moves that a plan has due at the events of the present pass."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kilter.memory.engine.position import NOTHING_OVERDUE
from kilter.memory.engine.ready import Due, Ready, in_place_of
from kilter.memory.engine.store import Saved, Store

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine.segments import ModuleCall


HELD_LONG = 4
"""What is overdue for so many events is looked at every other event, and so on: some tensors the
program holds for a whole pass, of many hundred events."""


@dataclass(slots=True)
class Overdue:
    """What is due to be evicted but held by the program."""

    host: torch.Tensor | None
    """The host memory for the copy; None: it is to be recomputed."""
    since: int
    look_at: int
    """Events of the pass: at which it was due, and at which the program may have dropped it."""

    def wait(self, event: int) -> None:
        """It is still held."""
        self.look_at = event + 1 + (event - self.since) // HELD_LONG


class DueMoves:
    """Issues what is due. A tensor that the program still holds is overdue until it is dropped."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_number: dict[int, weakref.ref[Saved]] = {}
        """Data of the present pass that are followed."""
        self._calls: dict[int, weakref.ref[ModuleCall]] = {}
        """By `in_place_of` its tensors, the calls that are recomputed."""
        self.overdue: dict[int, Overdue] = {}

    def begin(self) -> None:
        """A pass begins."""
        self._by_number.clear()
        self._calls.clear()
        self.overdue.clear()

    def follow(self, number: int, saved: Saved) -> None:
        """This tensor of the pass is the one that the plan calls `number`."""
        self._by_number[number] = saved.itself

    def follow_call(self, call: ModuleCall) -> None:
        """What this call has saved is evicted together."""
        self._calls[in_place_of(call.first)] = weakref.ref(call)

    def followed(self, number: int) -> Saved | None:
        """The tensor of that number, while autograd may still ask for it."""
        reference = self._by_number.get(number)
        return None if reference is None else reference()

    @property
    def look_at(self) -> int:
        """The event at which something overdue is to be looked at."""
        return min((each.look_at for each in self.overdue.values()), default=NOTHING_OVERDUE)

    def carry_out(self, planned: Ready, due: Due, event: int) -> None:
        """Issue what is due at one event."""
        store = self._store
        for number in due.offload:
            saved = self.followed(number)
            if saved is not None:
                host = store.offload(saved, planned.hosts[number])
                if host is not None:
                    planned.hosts[number] = host
                elif store.pending(saved):
                    self.overdue[number] = Overdue(planned.hosts[number], event, event + 1)
        for number in due.evict:
            if number in self.overdue:
                continue
            if number < 0:
                left = self._evict_call(number)
            else:
                saved = self.followed(number)
                left = saved is None or self._evict(saved)
            if not left:
                self.overdue[number] = Overdue(None, event, event + 1)
        for number in due.prefetch:
            self.overdue.pop(number, None)
            saved = self.followed(number)
            if saved is not None:
                store.prefetch(saved)

    def catch_up(self, event: int) -> None:
        """Evict what is overdue and no longer held by the program."""
        for number, each in list(self.overdue.items()):
            if each.look_at > event:
                continue
            saved = None if number < 0 else self.followed(number)
            if saved is not None and each.host is not None:
                self._store.offload(saved, each.host)
                self._store.evict(saved)
                left = not self._store.pending(saved)
            elif saved is not None:
                left = self._evict(saved)
            else:
                left = number >= 0 or self._evict_call(number)
            if left:
                del self.overdue[number]
            else:
                each.wait(event)

    def _evict(self, saved: Saved) -> bool:
        """`False` if it is to be recomputed, and the program holds it."""
        self._store.evict(saved)
        return saved.recipe is None or not self._store.pending(saved)

    def _evict_call(self, number: int) -> bool:
        """`False` if the program holds some of what the call has saved."""
        reference = self._calls.get(number)
        call = None if reference is None else reference()
        if call is None:
            return True
        store, saved = self._store, call.alive()
        store.give_up(call, saved)
        return not any(
            one.alias is not None and one.recipe is call and store.pending(one) for one in saved
        )

    def on_host_alike(self, before: Ready, other: Ready) -> bool:
        """Tensors of this pass that are on the host have the same places in the other plan."""
        moved = [number for number in before.places if self._is_on_host(number)]
        return all(other.places.get(number) == before.places[number] for number in moved)

    def _is_on_host(self, number: int) -> bool:
        saved = self.followed(number)
        return saved is not None and saved.host is not None
