"""Offloading on demand: without a plan, data are offloaded as soon as the budget is reached."""

from __future__ import annotations

import weakref

from kilter.core.reasons import Reason
from kilter.memory import messages
from kilter.memory.engine.backend import Backend, HostMemoryError
from kilter.memory.engine.store import Saved, Store

UNSEEN_SHARE = 0.6
"""Above this share of the budget tensors are offloaded in the first pass. The rest is for tensors
that cannot be offloaded and have not been seen yet (the logits of a language model are often the
largest)."""


class Demand:
    """Offloads tensors above a level of memory, and measures how far passes go above that level."""

    def __init__(self, backend: Backend, store: Store) -> None:
        self._backend = backend
        self._store = store
        self._surge_bytes: int | None = None
        """How far a pass went above the level; None before the first pass has ended."""
        self.chosen: list[weakref.ref[Saved]] = []
        """These tensors are offloaded as soon as the program holds them no longer. It is always
        this list."""
        self.spilled = 0
        self.refused: dict[str, Reason] = {}
        """It has the first reason of each code."""

    def begin(self) -> None:
        """A pass begins."""
        self.chosen.clear()

    def learn(self, peak_bytes: int, budget_bytes: int) -> None:
        """A pass was watched to its end."""
        over_bytes = peak_bytes - self.offload_above_bytes(budget_bytes)
        self._surge_bytes = max(self._surge_bytes or 0, over_bytes)

    def saved(self, saved: Saved, budget_bytes: int) -> bool:
        """If the budget is reached, this tensor is offloaded at a later event."""
        used_bytes = self._backend.used_bytes()
        if used_bytes is None:
            store = self._store
            over = store.counts.held_bytes + store.counts.beside_bytes > budget_bytes
        else:
            over = used_bytes > self.offload_above_bytes(budget_bytes)
        if over:
            self.chosen.append(weakref.ref(saved))
        return over

    def event(self) -> None:
        """Offload the chosen tensors that nothing else uses; the others wait for a later event."""
        if not self.chosen:
            return
        still = []
        for reference in self.chosen:
            saved = reference()
            if saved is None or not self._store.pending(saved):
                continue
            try:
                left = self._store.offload_unplanned(saved)
            except HostMemoryError as error:
                reason = messages.of_error(error)
                self.refused.setdefault(reason.code, reason)
                continue
            self.spilled += left
            if not left:
                still.append(reference)
        self.chosen[:] = still

    def offload_above_bytes(self, budget_bytes: int, peak_bytes: int | None = None) -> int:
        """Bytes in use above which tensors are offloaded. `peak_bytes` is the peak of the first
        pass, for the level of the next one."""
        first_bytes = int(UNSEEN_SHARE * budget_bytes)
        surge_bytes = self._surge_bytes
        if surge_bytes is None and peak_bytes is not None:
            surge_bytes = peak_bytes - first_bytes
        return first_bytes if surge_bytes is None else budget_bytes - surge_bytes
