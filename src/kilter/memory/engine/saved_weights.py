"""What autograd saves of weights: the parameter and the geometry of the view, without the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kilter.memory.engine.modified import Modified
from kilter.memory.engine.store import original_of
from kilter.memory.engine.weight_store import WeightStore


class SavedView:
    """A view of a weight that autograd saved, without holding its bytes. A call takes the view
    anew; to recipes it is a source that reads the parameter."""

    __slots__ = ("_fetch", "_parameter", "_size", "_start", "_stride", "_version")

    def __init__(self, view: torch.Tensor, fetch: Callable[[Any], None]) -> None:
        self._parameter = view._base
        self._size, self._stride, self._start = view.size(), view.stride(), view.storage_offset()
        self._version = view._version
        self._fetch = fetch

    def __call__(self) -> torch.Tensor:
        parameter: Any = self._parameter
        if parameter._version != self._version:
            raise Modified(parameter, self._version)
        self._fetch(parameter)
        view: torch.Tensor = parameter.detach().as_strided(self._size, self._stride, self._start)
        return view

    def __getitem__(self, index: int) -> Any:
        return (self._parameter, self._version)[index]


class SavedWeights:
    """Wraps hooks on saved tensors, so that they see resident weights only."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.reading = False
        """Weights are read by our own hooks at this moment, not by the program."""

    def around(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Any:
        """Hooks on saved tensors that hold no bytes of weights and return resident weights only."""
        store, plain_class = self._store, torch.nn.Parameter

        def pack_weight(tensor: torch.Tensor) -> Any:
            base = tensor._base
            if type(base) is plain_class and store.weights.get(id(base)) and _strided(tensor, base):
                return SavedView(tensor, store.fetch)
            self.reading = True  # perhaps by a recipe that is being read
            try:
                return pack(tensor)
            finally:
                self.reading = False

        def unpack_weight(packed: Any) -> torch.Tensor:
            try:
                tensor: torch.Tensor = packed() if type(packed) is SavedView else unpack(packed)
            except Modified as error:
                error.raise_in_the_program(
                    packed, None if type(packed) is SavedView else original_of(packed)
                )
            if type(packed) is not SavedView:
                store.fetch(tensor)
            return tensor

        return pack_weight, unpack_weight


def _strided(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Size and strides describe the view completely."""
    return view.dtype == base.dtype and not view.is_conj() and not view.is_neg()
