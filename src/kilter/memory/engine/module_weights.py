"""Which weights belong to which module, and fetching them before the module runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from kilter.memory.engine.moved_weight import MovedWeight
from kilter.memory.engine.weight_store import WeightStore

FAST_MODULES = (
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
    torch.nn.MultiheadAttention,
)
"""These modules may compute in C++ with the weights of the modules below them, which do not run."""


class ModuleWeights:
    """The weights of the modules that have run. `arrived` is put as a hook on the gradient of one
    parameter of each module: it shows when backward needs the module's weights."""

    def __init__(
        self,
        store: WeightStore,
        device: torch.device,
        min_bytes: int,
        arrived: Callable[[Any], None],
    ) -> None:
        self._store = store
        self._device = device
        self._min_bytes = min_bytes
        self._arrived = arrived
        self._known: dict[int, weakref.ref[Any]] = {}
        """These parameters were seen."""
        self._handles: list[Any] = []
        self.used_by: dict[int, list[MovedWeight]] = {}
        """It has, by module, its weights that may be offloaded."""

    def fetch(self, module: Any, inputs: Any) -> None:
        """Fetch the weights of a module that is about to run: some modules look at their class."""
        if not self._store.offloaded:
            return
        whole = isinstance(module, FAST_MODULES)
        for parameter in module.parameters() if whole else module._parameters.values():
            self._store.fetch(parameter)

    def of_module(self, module: Any) -> list[MovedWeight]:
        """The weights of this module, found when it first runs."""
        mine = []
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            found = self._known.get(id(parameter))
            if found is None or found() is not parameter:
                self._known[id(parameter)] = weakref.ref(parameter)
                self._meet(parameter, module)
            weight = self._store.weights.get(id(parameter))
            if weight is not None:
                mine.append(weight)
        if mine:
            self.used_by[id(module)] = mine
        return mine

    def _meet(self, parameter: Any, module: Any) -> None:
        trained = [
            p
            for p in module._parameters.values()
            if p is not None and p.requires_grad and p.is_leaf
        ]
        marker = max(trained, key=lambda p: p.numel(), default=None)
        if marker is parameter:
            self._handles.append(marker.register_post_accumulate_grad_hook(self._arrived))
        if (
            type(parameter) is not torch.nn.Parameter
            or not parameter.is_leaf
            or parameter.device != self._device
            or parameter.layout is not torch.strided
            or parameter.is_conj()
            or parameter.is_neg()
            or parameter.nbytes < self._min_bytes
            or parameter.untyped_storage().nbytes() != parameter.nbytes
        ):
            return
        weight = self._store.add(parameter)
        if marker is not None:
            weight.use.marker = id(marker)

    def close(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
