"""Whether the second forward fits beside the optimizer state that the first step has made."""

from __future__ import annotations

import weakref
from typing import Any

from kilter.observe import optimizer_steps

FULL = 0.75
"""Weights and state may take this share of the level in the second iteration; above it, tensors are
offloaded. Casts of weights, and tensors that are being offloaded, need the rest."""


class FirstStep:
    """Sees which optimizers step in the first iteration. In the program's thread."""

    def __init__(self, begun_bytes: int) -> None:
        """`begun_bytes` are in use before the first step, by little more than weights."""
        self._begun_bytes = begun_bytes
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._leave = optimizer_steps.listen(
            before=lambda optimizer, *_: self.optimizers.add(optimizer)
        )

    def remove(self) -> None:
        """Stop looking."""
        self._leave()

    def room_bytes(self, level_bytes: int) -> int | None:
        """Room for state, where tensors are offloaded above `level_bytes` in use; None: the state
        that was just made fits."""
        state_bytes = sum(state_bytes_of(optimizer) for optimizer in self.optimizers)
        if not state_bytes or self._begun_bytes + state_bytes <= FULL * level_bytes:
            return None
        return max(0, level_bytes - self._begun_bytes) // 2


def state_bytes_of(optimizer: Any) -> int:
    """Of the tensors that it keeps beside the parameters."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if hasattr(value, "nbytes"))
