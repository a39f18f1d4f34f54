"""A pass in which everything that can be recomputed is recomputed beside the real tensors: how long
that takes, and whether the results are equal. Both are read when the pass is over: the host would
have to wait for the device, which then would have to wait for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

from kilter.core.reasons import Reason
from kilter.memory import messages
from kilter.memory.engine.aliases import view_of
from kilter.memory.engine.backend import CopyEvent
from kilter.memory.engine.head_start import HeadStart
from kilter.memory.engine.modified import Modified
from kilter.memory.engine.operation_graph import HeldSource
from kilter.memory.engine.pass_record import SavedTensor
from kilter.memory.engine.recompute import Reader, Recipe, Unlike
from kilter.memory.engine.store import Saved, Store

T = TypeVar("T")
Equal: TypeAlias = bool | torch.Tensor
"""Whether bytes are equal; a tensor of the device until that is known."""
WORD_BYTES = 8
"""Bytes are compared so many at a time: what is found of each takes memory as well."""
WATCH_REPEATS = 3
"""How often a tensor is recomputed in a trial; the shortest time counts."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """Something was recomputed `WATCH_REPEATS` times. What came of it is not known yet."""

    equal: list[Equal]
    marks: list[tuple[CopyEvent, CopyEvent]]
    """When each time began and ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTerms:
    """What is tried in a pass, and within what."""

    operations: bool = True
    """Single operations are tried, not calls of modules alone."""
    expected_bytes: int = 0
    """Passes of this kind save so much."""
    budget_bytes: int = 0


class RecomputeTrial:
    """Reads recipes as tensors are saved, and carries them out when backward needs the tensors."""

    def __init__(
        self,
        store: Store,
        head_start: HeadStart,
        terms: TrialTerms,
        refused: dict[Reason, None],
    ) -> None:
        self._backend = store.backend
        self._store = store
        self._head_start = head_start
        self._repeated: list[tuple[Repeated, Callable[[float], None], Reason]] = []
        self._reader = Reader(store)
        self.terms = terms
        self._refused = refused
        self._read: dict[int, torch.UntypedStorage] = {}
        """It holds, by identity, storages of large parameters that recipes read."""
        self._emptied: set[int] = set()
        """These of them are emptied and filled again, as sharding does with weights."""

    def refuse(self, reason: Reason) -> None:
        """Note why something is not recomputed."""
        self._refused[reason] = None

    def emptied(self, held: Iterable[HeldSource]) -> bool:
        """One of these has lost its memory during the pass, as sharded weights do."""
        return any(one.tensor.untyped_storage()._cdata in self._emptied for one in held)

    def reads(self, held: Iterable[HeldSource]) -> None:
        """Look from now on whether one of these loses its memory."""
        for one in held:
            storage = one.tensor.untyped_storage()
            self._read[storage._cdata] = storage

    def look(self) -> None:
        """An event begins: note what has lost its memory."""
        for key, storage in self._read.items():
            if storage.nbytes() == 0:
                self._emptied.add(key)

    def save(self, saved: Saved, tensor: torch.Tensor, datum: SavedTensor) -> None:
        """Read how the tensor can be recomputed."""
        self._store.mark(self._store.view(saved, tensor), tensor)
        if not self.terms.operations:
            return
        recipe = saved.recipe = self._reader.read(tensor)
        if recipe is not None:
            datum.recipe = recipe.kind
            self.reads(recipe.parameters)
            datum.sources = tuple(sorted({source.number for source in recipe.sources}))
            datum.closed = tuple(sorted({source.number for source in recipe.closed}))
            datum.in_backward = recipe.in_backward

    def use(self, saved: Saved, datum: SavedTensor) -> None:
        """Recompute a tensor beside the real one: note how long it takes and whether it is
        equal."""
        found = saved.recipe
        saved.recipe = None
        if datum.recompute_s is not None or not isinstance(found, Recipe):
            return
        if self.emptied(found.parameters):
            self.refuse(messages.recipe_of_sharded_weights(datum.name))
            return
        alias = saved.alias
        assert alias is not None
        try:
            repeated = self.repeat(found.make, lambda made, _: [same_bytes(alias, made)])
        except (Unlike, Modified, torch.OutOfMemoryError) as error:
            self.refuse(messages.recipe_failed(datum.name, error))
            return

        def takes(recompute_s: float) -> None:
            datum.recompute_s = recompute_s

        self.when_over(repeated, takes, messages.recipe_differs(datum.name))

    def repeat(self, make: Callable[[], T], compare: Callable[[T, int], list[Equal]]) -> Repeated:
        """Recompute something some times, and compare what is made in each of these turns."""
        equal, marks = [], []
        for turn in range(1 + WATCH_REPEATS):
            self._head_start.renew()
            begin = self._backend.mark()
            made = self._store.carried_out(make)
            if turn:  # by then what it reads is resident, and its kernels are loaded
                marks.append((begin, self._backend.mark()))
            equal += compare(made, turn)
            del made
        return Repeated(equal, marks)

    def when_over(
        self, repeated: Repeated, takes: Callable[[float], None], differs: Reason
    ) -> None:
        """Once the pass is over, give `takes` the shortest time in seconds if all was equal; else
        refuse for `differs`."""
        self._repeated.append((repeated, takes, differs))

    def over(self) -> None:
        """The pass is over."""
        known = iter(_known([one for repeated, _, _ in self._repeated for one in repeated.equal]))
        for repeated, takes, differs in self._repeated:
            equal = [next(known) for _ in repeated.equal]
            if all(equal):
                takes(min(self._backend.elapsed_s(*pair) for pair in repeated.marks))
            else:
                self.refuse(differs)
        self._repeated.clear()


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> Equal:
    """Whether two storages have the same bytes."""
    size_bytes = first.untyped_storage().nbytes()
    if second.untyped_storage().nbytes() != size_bytes:
        return False
    dtype = torch.uint8 if size_bytes % WORD_BYTES else torch.int64
    words = [view_of(one, dtype, (size_bytes // dtype.itemsize,), (1,)) for one in (first, second)]
    equal: torch.Tensor = (words[0] == words[1]).all()
    return equal


def _known(equal: list[Equal]) -> list[bool]:
    """What is on the device comes in one copy: there may be tens of thousands."""
    on_device = [one for one in equal if isinstance(one, torch.Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else ())
    return [next(read) if isinstance(one, torch.Tensor) else one for one in equal]
