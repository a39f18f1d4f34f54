"""Watching a pass: how long operations take, and which tensors are held.

Slow and thorough; a pass under a plan is not watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kilter.core.reasons import Reason
from kilter.memory.engine.aliases import StorageReference
from kilter.memory.engine.backend import CopyEvent
from kilter.memory.engine.head_start import HeadStart
from kilter.memory.engine.module_path import ModulePaths
from kilter.memory.engine.operation_graph import HeldSource
from kilter.memory.engine.pass_record import (
    HeldBytes,
    PassRecord,
    PassRecorder,
    SavedSegment,
    SavedTensor,
)
from kilter.memory.engine.store import Saved, Store
from kilter.memory.engine.trial import RecomputeTrial, TrialTerms
from kilter.observe import torch_internals

if TYPE_CHECKING:
    import torch


IN_VAIN = 16
"""So many passes are watched in vain before watching becomes rare. A pass is watched in vain if it
is unlike every pass before, or has a plan; a pass like an earlier one without a plan makes up for
one."""
SELDOM, RARELY = 8, 64
"""One in `SELDOM` of the passes without a plan is watched then; after `IN_VAIN` more passes that
were watched in vain, one in `RARELY`."""


class Attention:
    """Which of the passes without a plan are watched. Watching costs the device's time, and is of
    no use where shapes never repeat."""

    def __init__(self) -> None:
        self._left = IN_VAIN
        self._skipped = 0
        self._in_vain = 0

    @property
    def every(self) -> int:
        """One in this many passes without a plan is watched."""
        if self._left:
            return 1
        return SELDOM if self._in_vain < IN_VAIN else RARELY

    def asks(self) -> bool:
        """Whether the pass without a plan that begins now is to be watched."""
        self._skipped += 1
        if self._skipped < self.every:
            return False
        self._skipped = 0
        return True

    def met(self, *, useful: bool) -> None:
        """A pass was watched to its end; `useful` if it is like an earlier one without a plan."""
        if useful:
            self._left = min(IN_VAIN, self._left + 1)
            self._in_vain = 0
        elif self._left:
            self._left -= 1
        else:
            self._in_vain += 1


def described(tensor: torch.Tensor) -> str:
    """What made a tensor, its shape and its type, for people."""
    base = tensor._base if tensor._is_view() else tensor
    maker = "input" if base is None or base.grad_fn is None else base.grad_fn.name()
    return f"{maker} {tuple(tensor.size())} {str(tensor.dtype).removeprefix('torch.')}"


class Watch:
    """One pass. In a `trial` every tensor with a recipe is recomputed beside the real one.
    `after_step` says that the pass began after an optimizer had stepped."""

    def __init__(
        self,
        store: Store,
        *,
        trial: TrialTerms | None = None,
        after_step: bool = False,
    ) -> None:
        self._backend = store.backend
        self._store = store
        self._recorder = PassRecorder(
            begin_bytes=store.backend.used_bytes() or 0, older_bytes=store.counts.followed_bytes
        )
        self._head_start = HeadStart(store.backend)
        self._paths = ModulePaths()
        self.after_step = after_step
        self._saved: list[weakref.ref[Saved]] = []
        self.refused: dict[Reason, None] = {}
        """Why something is not recomputed, each reason once."""
        self.trial = (
            None if trial is None else RecomputeTrial(store, self._head_start, trial, self.refused)
        )
        self.peak_bytes = 0
        """At most this was in use so far, where that is measured."""
        self._marks: list[tuple[CopyEvent, CopyEvent]] = []
        self._begin: CopyEvent = None
        self._held_by_others: dict[int, tuple[weakref.ref[Saved], StorageReference]] = {}
        self._sources = weakref.WeakKeyDictionary[HeldSource, int | None]()
        """Calls hold these tensors; it says since which event nobody else does."""
        self._storages: dict[int, int] = {}
        """The storages of these tensors, by their addresses, have numbers. They live at one time,
        from forward on, so no address comes twice."""

    @property
    def saved(self) -> int:
        """How many tensors were saved so far."""
        return len(self._recorder.data)

    def saved_since(self, number: int) -> list[Saved]:
        """The tensors from this number on that are alive."""
        found = [reference() for reference in self._saved[number:]]
        return [saved for saved in found if saved is not None]

    @property
    def segments(self) -> list[SavedSegment]:
        """Calls of modules that were found to recompute what they saved."""
        return self._recorder.segments

    @property
    def event(self) -> int:
        """Index of the present operation."""
        return self._recorder.event

    def enter(self, code: int, *, used: bool) -> None:
        """An event begins: the operation before it has ended."""
        self._begin = self._backend.mark()
        self._head_start.renew()
        node = torch_internals.current_node() if used else None
        name = "forward" if node is None else str(node.name())
        event = self._recorder.note(code, name, backward=used)
        if event:
            peak_bytes = self._backend.peak_bytes()
            self.peak_bytes = max(self.peak_bytes, peak_bytes or 0)
            self._recorder.level(
                self._store.counts.segment_peak_bytes if peak_bytes is None else peak_bytes,
                self._store.counts.evicted_bytes,
            )
        self._poll(event)
        if self.trial is not None:
            self.trial.look()

    def leave(self) -> None:
        """The event ends: the next operation begins. What was evicted in between is not in its
        peak."""
        self._marks.append((self._begin, self._backend.mark()))
        self._backend.peak_bytes()  # from here on
        self._store.counts.segment_peak_bytes = self._store.counts.held_bytes

    def save(self, saved: Saved, tensor: torch.Tensor) -> None:
        module = self._paths.present()
        datum = SavedTensor(
            name=f"{saved.number}: {described(tensor)}" + (f" in {module}" if module else ""),
            module=module,
            size_bytes=saved.size_bytes,
            packed_at=self._recorder.event,
            version=saved.version,
        )
        self._recorder.data.append(datum)
        self._saved.append(saved.itself)
        storage = StorageReference(tensor.untyped_storage())
        self._held_by_others[saved.number] = (weakref.ref(saved), storage)
        if self.trial is not None:
            self.trial.save(saved, tensor, datum)

    def use(self, saved: Saved) -> None:
        datum = self._recorder.data[saved.number]
        if datum.needed_at is None:
            datum.needed_at = self._recorder.event
        if self.trial is not None and saved.recipe is not None:
            self.trial.use(saved, datum)

    def waits_for(self, sources: Iterable[HeldSource]) -> None:
        """A call holds these from here on: note when the program has let go of them."""
        for source in sources:
            self._sources.setdefault(source, None)

    def held(self, sources: Iterable[HeldSource]) -> tuple[HeldBytes, ...]:
        """The same, now that nobody else holds them."""
        return tuple(map(self._held_bytes, sources))

    def _held_bytes(self, source: HeldSource) -> HeldBytes:
        storage, at = source.tensor.untyped_storage(), self._sources.get(source)
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        return HeldBytes(storage.nbytes(), self.event if at is None else at, number)

    def over(self) -> None:
        """Another pass has begun, or none will. Nothing is tried any more; what was held for that
        would count in the levels of the next pass, which may need tensors of this one."""
        for saved in self.saved_since(0):
            saved.calls = saved.recipe = None
        if self.trial is not None:
            self.trial.over()

    def record(self) -> PassRecord:
        """The pass that has ended."""
        ends = [begin for begin, _ in self._marks[1:]]
        starts = [end for _, end in self._marks[:-1]]
        return self._recorder.record(
            [
                max(0.0, self._backend.elapsed_s(start, end))
                for start, end in zip(starts, ends, strict=True)
            ]
        )

    def _poll(self, event: int) -> None:
        """Note the saved storages that autograd alone still holds."""
        freed = []
        for number, (reference, storage) in self._held_by_others.items():
            saved = reference()
            free = saved is None or storage.expired() or saved.closed
            if free:
                self._recorder.data[number].free_at = event
                freed.append(number)
        for number in freed:
            del self._held_by_others[number]
        for source, at in self._sources.items():
            if at is None and self._store.alone(source.tensor):
                self._sources[source] = event
