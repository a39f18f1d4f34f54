"""Offloading on demand: what has no plan leaves as soon as the budget is reached.

Backward uses saved tensors about in reverse, so the oldest leave first, as they are needed last
(Belady: A study of replacement algorithms for a virtual-storage computer, 1966), and come back
before they are used, the latest first. Copies to the host start a little below the level at which
memory has to be freed, so that operations need not wait for them.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

import torch

from kilter.core.reasons import Reason
from kilter.memory import messages
from kilter.memory.engine.backend import HostMemoryError
from kilter.memory.engine.store import EVICTED, PREFETCHING, Saved, Store

UNSEEN_SHARE = 0.6
"""Above this share of the budget tensors are offloaded in the first pass. The rest is for tensors
that cannot be offloaded and have not been seen yet (the logits of a language model are often the
largest)."""
EARLY_SHARE = 1 / 16
"""Copies start this share of the budget below the level at which tensors are evicted."""
MOST_SURGES = 256
"""Where shapes keep changing, passes begin in ever new ways. The last ones are remembered then."""

Reference = weakref.ref[Saved]


class SurgeShown(NamedTuple):
    """What a pass has shown: how far it goes above a level."""

    level_bytes: int
    """It was kept at this one. At a higher level passes go less far above it, or as far."""
    over_bytes: int


class RisesBetweenSaves:
    """What is in use each time that a pass saves a tensor without a plan, and how far it has risen
    since the time before.

    The most of this, less one rise, is a level that the pass can be kept at. How far the peak is
    above that does not depend on the level that was asked for, which may be out of reach: below
    what weights and state take, all that can leave does.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self.largest_bytes = 0
        """The largest rise."""
        self._last_bytes: int | None = None

    def before_save(self, used_bytes: int) -> None:
        """So much is in use, with what is being saved."""
        self.most_bytes = max(self.most_bytes, used_bytes)
        if self._last_bytes is not None:
            self.largest_bytes = max(self.largest_bytes, used_bytes - self._last_bytes)

    def after_save(self, used_bytes: int) -> None:
        """So much is left in use."""
        self._last_bytes = used_bytes

    def keeps(self, level_bytes: int) -> bool:
        """The pass was kept at this level, but for one rise."""
        return self.most_bytes <= level_bytes + self.largest_bytes


class Demand:
    """Offloads tensors above a level of memory, and measures how far passes go above that level."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._surges: dict[int, SurgeShown] = {}
        """By the first event of passes; at most the budget, since at a level of nothing all leaves
        that can."""
        self._short_bytes = 0
        """By so much passes went further than was expected by those that began the most alike."""
        self._first = 0
        """The present pass, or the last one, has begun with so many bytes: its first event."""
        self._surge_bytes: int | None = None
        """So far it is expected to go above the level; None: no pass has shown that."""
        self._rises = RisesBetweenSaves()
        self.lent: list[Reference] = []
        """Backward has used these in a graph that it retains, and needs them again last of all. It
        is always this list."""
        self._resident: list[Reference] = []
        """These were saved without a plan, the oldest first."""
        self._leaving: deque[Reference] = deque()
        """They are being copied to the host, and are still on the device."""
        self._left: dict[int, Reference] = {}
        """They were evicted, by number; some have come back since."""
        self._numbers: list[int] = []
        """The same numbers, in order."""
        self._ahead: list[Reference] = []
        """They come back, or have, before they are used."""
        self.number = 0
        """The next tensor that is saved without a plan has this number in its pass."""
        self.spilled = 0
        self.refused: dict[str, Reason] = {}
        """It has the first reason of each code."""

    def begin(self, first: int) -> None:
        """A pass begins with this event."""
        self._first, self._surge_bytes = first, self._expected(first)
        self._rises = RisesBetweenSaves()
        self.lent.clear()
        self._resident.clear()
        self._leaving.clear()
        self._left.clear()
        self._numbers.clear()
        self._ahead.clear()
        self.number = 0

    def take_over(self, several: list[Saved]) -> None:
        """The pass has departed from its plan, under which these tensors were saved."""
        for saved in several:
            self.number = max(self.number, saved.number + 1)
            if saved.state == EVICTED:
                self._note_left(saved)
            else:
                self._resident.append(saved.itself)

    def learn(self, peak_bytes: int, budget_bytes: int) -> None:
        """A pass, or the rest of one that departed from its plan, had this peak."""
        level_bytes, rises = self.offload_above_bytes(budget_bytes), self._rises
        exceeds = peak_bytes > budget_bytes
        over_bytes = peak_bytes - level_bytes
        if rises.most_bytes and not (exceeds and rises.keeps(level_bytes)):
            over_bytes = peak_bytes - rises.most_bytes + rises.largest_bytes
        over_bytes = min(over_bytes, budget_bytes)
        if over_bytes <= 0:
            return
        before = self._surges.pop(self._first, None)
        shown = SurgeShown(level_bytes, over_bytes)
        if before is None:
            if self._surges:
                self._short_bytes = max(self._short_bytes, over_bytes - self._alike(self._first))
        elif exceeds:  # for good: others that begin so may be larger
            shown = SurgeShown(budget_bytes, max(before.over_bytes, over_bytes))
        elif level_bytes < before.level_bytes:
            shown = before
        if len(self._surges) == MOST_SURGES:
            del self._surges[next(iter(self._surges))]
        self._surges[self._first] = shown
        self._surge_bytes = shown.over_bytes

    def _expected(self, first: int) -> int | None:
        """How far a pass that begins so is expected to go above the level: as before, or, if none
        has begun so, like those that begin the most alike. One that begins with a larger tensor
        than all others (a longer text) needs more in proportion."""
        found = self._surges.get(first)
        if found is not None or not self._surges:
            return None if found is None else found.over_bytes
        most = max(shown.over_bytes for shown in self._surges.values())
        largest = max(self._surges)
        if first > largest:
            in_proportion = self._surges[largest].over_bytes * first // max(1, largest)
            return max(most, in_proportion)
        return min(most, self._alike(first) + self._short_bytes)

    def _alike(self, first: int) -> int:
        """How far those have gone that begin with a little more and a little less."""
        nearest = (
            min((begin for begin in self._surges if begin > first), default=None),
            max((begin for begin in self._surges if begin < first), default=None),
        )
        return max(self._surges[begin].over_bytes for begin in nearest if begin is not None)

    def saved(self, saved: Saved) -> None:
        """A tensor was saved without a plan."""
        self.number = max(self.number, saved.number + 1)
        self._resident.append(saved.itself)

    def lend(self, saved: Saved, budget_bytes: int) -> bool:
        """A tensor was handed out in a backward that retains its graph. It leaves again if another
        one as large would reach the budget; whether that is so."""
        over = self._over_bytes(budget_bytes) + saved.size_bytes > 0
        if over:
            self.lent.append(saved.itself)
        return over

    def before_save(self, budget_bytes: int, size_bytes: int) -> None:
        """So many bytes are saved. Where the budget is reached, start to copy what nothing else
        uses, and evict it; what is held by the program waits for a later event."""
        over_bytes = self._over_bytes(budget_bytes, size_bytes)
        used_bytes = over_bytes + self.offload_above_bytes(budget_bytes)
        self._rises.before_save(used_bytes)
        left_bytes = 0
        if self._resident or self.lent or self._leaving:
            lacking_bytes = over_bytes + int(EARLY_SHARE * budget_bytes) - self._leaving_bytes
            for candidates in (self.lent, self._resident):
                lacking_bytes = self._start(candidates, lacking_bytes)
            if lacking_bytes > 0:
                self._resident += self._come_back()
            left_bytes = self._evict(over_bytes)
        self._rises.after_save(used_bytes - left_bytes)

    def before_use(self, budget_bytes: int, missing_bytes: int) -> None:
        """Evict what is lent if so many bytes more, which backward needs, would reach the budget.
        Everything else will be needed sooner."""
        if self.lent or self._leaving:
            over_bytes = self._over_bytes(budget_bytes) + missing_bytes
            self._start(self.lent, over_bytes - self._leaving_bytes)
            self._evict(over_bytes)

    def used(self, saved: Saved, budget_bytes: int) -> None:
        """Backward has been given this tensor: fetch those that it will ask for next, as far as
        there is room for them."""
        if not self._numbers or torch.is_grad_enabled():
            return  # a graph of backward itself is recorded: what it saves needs the room
        room_bytes = -self._over_bytes(budget_bytes)
        for number in reversed(self._numbers[: bisect_left(self._numbers, saved.number)]):
            before = self._left[number]()
            if before is not None and before.state == EVICTED and before.host is not None:
                room_bytes -= before.size_bytes
                if room_bytes < 0:
                    return
                try:
                    self._store.prefetch(before)
                except torch.OutOfMemoryError:
                    return  # it is fetched when it is needed
                self._ahead.append(before.itself)
            self._forget(number)

    @property
    def _leaving_bytes(self) -> int:
        leaving = (reference() for reference in self._leaving)
        return sum(saved.size_bytes for saved in leaving if saved is not None)

    def _start(self, candidates: list[Reference], lacking_bytes: int) -> int:
        """Start to copy so much of these; what is lacking still."""
        waiting: list[Reference] = []
        for at, reference in enumerate(candidates):
            if lacking_bytes <= 0:
                waiting += candidates[at:]
                break
            saved = reference()
            if saved is None or not self._store.pending(saved):
                continue
            try:
                leaves = self._store.offload_unplanned(saved)
            except HostMemoryError as error:
                reason = messages.of_error(error)
                self.refused.setdefault(reason.code, reason)
                continue
            if leaves:
                self._leaving.append(reference)
                lacking_bytes -= saved.size_bytes
            else:
                waiting.append(reference)
        candidates[:] = waiting
        return lacking_bytes

    def _come_back(self) -> list[Reference]:
        """Those that were fetched and not used: they may leave again."""
        found = self._ahead[:]
        self._ahead.clear()
        if len(self._numbers) > self._store.counts.evicted:
            for number in tuple(self._numbers):
                saved = self._left[number]()
                if saved is None or saved.state != EVICTED:
                    found.append(self._left[number])
                    self._forget(number)
        for reference in found:
            saved = reference()
            if saved is not None and saved.state == PREFETCHING:
                self._store.fetch(saved)
        return found

    def _evict(self, over_bytes: int) -> int:
        """Free so much of what is leaving, as far as there is so much; what was freed."""
        freed_bytes = 0
        while over_bytes > freed_bytes and self._leaving:
            saved = self._leaving.popleft()()
            if saved is None:
                continue
            self._store.evict(saved)
            if saved.state == EVICTED:
                self.spilled += 1
                freed_bytes += saved.size_bytes
                self._note_left(saved)
        return freed_bytes

    def _note_left(self, saved: Saved) -> None:
        if saved.number not in self._left:
            insort(self._numbers, saved.number)
        self._left[saved.number] = saved.itself

    def _forget(self, number: int) -> None:
        del self._left[number], self._numbers[bisect_left(self._numbers, number)]

    def _over_bytes(self, budget_bytes: int, saved_bytes: int = 0) -> int:
        """So much more is in use than the level above which tensors are offloaded. What is just
        being saved is in use, but not counted among saved tensors yet."""
        used_bytes = self._store.backend.used_bytes()
        if used_bytes is None:
            return self._store.counts.on_device_bytes + saved_bytes - budget_bytes
        return used_bytes - self.offload_above_bytes(budget_bytes)

    def offload_above_bytes(self, budget_bytes: int, peak_bytes: int | None = None) -> int:
        """Bytes in use above which tensors are offloaded. `peak_bytes` is the peak of the first
        pass, for the level of the next one."""
        first_bytes, surge_bytes = int(UNSEEN_SHARE * budget_bytes), self._surge_bytes
        if surge_bytes is None and peak_bytes is not None:
            surge_bytes = peak_bytes - first_bytes
        return first_bytes if surge_bytes is None else budget_bytes - min(surge_bytes, budget_bytes)
