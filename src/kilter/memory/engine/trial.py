"""A pass in which everything that can be recomputed is recomputed beside the real tensors: how long
that takes, and whether the results are equal."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kilter.core.reasons import Reason
from kilter.memory import messages
from kilter.memory.engine.aliases import bytes_of
from kilter.memory.engine.modified import Modified
from kilter.memory.engine.operation_graph import HeldSource
from kilter.memory.engine.pass_record import SavedTensor
from kilter.memory.engine.recompute import Reader, Recipe, Unlike
from kilter.memory.engine.store import Saved, Store

TRIAL_PAUSE_S = 4e-4
"""The device pauses so long at each event of a trial, and before each recomputing."""
WATCH_REPEATS = 3
"""How often a tensor is recomputed in a trial; the shortest time counts."""


class RecomputeTrial:
    """Reads recipes as tensors are saved, and carries them out when backward needs the tensors."""

    def __init__(self, store: Store, expected_bytes: int, refused: dict[Reason, None]) -> None:
        self._backend = store.backend
        self._store = store
        self._reader = Reader(store)
        self.expected_bytes = expected_bytes
        """Passes of this kind save so much."""
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
        marks, carried_out = [], self._store.carried_out
        try:
            made = carried_out(found.make)  # its sources are resident from now on, kernels loaded
            for _ in range(WATCH_REPEATS):
                self._backend.keep_busy(TRIAL_PAUSE_S)
                begin = self._backend.mark()
                made = carried_out(found.make)
                marks.append((begin, self._backend.mark()))
        except (Unlike, Modified, torch.OutOfMemoryError) as error:
            self.refuse(messages.recipe_failed(datum.name, error))
            return
        assert saved.alias is not None
        if torch.equal(bytes_of(saved.alias), bytes_of(made)):
            datum.recompute_s = min(self._backend.elapsed_s(*pair) for pair in marks)
        else:
            self.refuse(messages.recipe_differs(datum.name))
