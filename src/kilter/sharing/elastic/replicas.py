"""The models of one rank: how their gradients and running statistics are summed up with those of
the other active ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kilter.sharing.elastic.groups import Groups, Reduction
from kilter.sharing.elastic.state import Buffers


class Replicas:
    def __init__(self, models: Sequence[Any], reduction: Reduction, groups: Groups) -> None:
        self._reduction, self._groups = reduction, groups
        self._syncs = [model for model in models if getattr(model, "broadcast_buffers", False)]
        self._buffers = Buffers(models if self._syncs else [])

    def take_over(self, on_last: Callable[[], object], on_reduced: Callable[[], object]) -> None:
        """From here on buffers are averaged; on all ranks at once. For the callbacks see
        `Reduction`."""
        self._reduction.on_last, self._reduction.on_reduced = on_last, on_reduced
        for model in self._syncs:
            model.broadcast_buffers = False

    def give_up(self) -> None:
        """The models train as without kilter; on all ranks at once, while all are up to date."""
        self.train_plainly()
        for model in self._syncs:
            model.broadcast_buffers = True

    def train_plainly(self) -> None:
        """All ranks count alike."""
        self._reduction.plain()

    def begin(self, ranks: tuple[int, ...], weight: float) -> None:
        """The next gradients are summed up over these ranks."""
        self._reduction.group = self._groups.of(ranks)
        self._reduction.weight = weight

    def end(self, iteration: int) -> None:
        self._buffers.average(self._reduction.weight, self._reduction.group, iteration)
