"""Weights are copied to the host again after optimizers have updated them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kilter.memory.engine.moved_weight import MovedWeight
from kilter.memory.engine.weight_store import WeightStore


class WeightUpdates:
    """Has weights resident for their updates, and copies what was updated."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.updated: list[MovedWeight] = []
        """These weights were updated in backward and not copied yet."""

    def before_update(self, parameters: Iterable[torch.Tensor]) -> None:
        """These are updated now, inside backward or a step. They have to be resident and of their
        own class, which optimizers look at."""
        for parameter in parameters:
            self._store.fetch(parameter)
            self._store.wrote(parameter)
            weight = self._store.weights.get(id(parameter))
            if weight is not None:
                self.updated.append(weight)

    def publish(self, tick: int) -> None:
        """Copy what was updated since the last gradient arrived, which is now, at this tick."""
        for weight in self.updated:
            weight.use.updated_at = tick
            if weight.copy is not None:
                self._store.copy_out(weight)
                weight.copy.published = True
        self.updated.clear()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._store.offloaded:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._store.fetch(parameter)

    def after_step(self, optimizer: Any) -> None:
        """Copy what the optimizer wrote, also where no version shows it."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                weight = self._store.weights.get(id(parameter))
                copy = None if weight is None else weight.copy
                if weight is None or copy is None:
                    continue
                if not copy.published or parameter._version != copy.version or copy.lent:
                    self._store.copy_out(weight)
                copy.published = False
