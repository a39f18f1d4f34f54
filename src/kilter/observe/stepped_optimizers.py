"""The optimizers of a program: whose step ends an iteration, and what they step."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

_MAX_KNOWN = 4096
MAX_CYCLE = 64
"""An optimizer that rests longer than this many iterations is not part of their rhythm."""


class Cycle:
    """Finds the end of iterations among the steps of one or more optimizers.

    The iteration is the whole cycle, so it ends with the step of the *leader*: the optimizer that
    steps least often, and among equals the one that joined last (it ends the first
    iteration). A GAN's critic that steps five times for one step of the generator thus gives one
    iteration per step of the generator. An optimizer that joins, or stepped once where the leader
    stepped twice or more, takes over; a leader that stays away for four times its usual rest is
    given up. `changed` counts these changes: an interval across one is no iteration.
    """

    __slots__ = ("_patience", "_seen", "_since", "_steps", "changed", "leader")

    def __init__(self) -> None:
        self.leader: int | None = None
        self.changed = 0
        self._steps = 0
        """The leader has made so many steps since it leads."""
        self._seen: dict[int, tuple[int, int]] = {}
        """It has `changed` and `_steps` as they were at each optimizer's last step."""
        self._since: dict[int, int] = {}
        """The others made so many steps since the leader's last one."""
        self._patience = 0
        """So many steps of another without one of the leader end its lead."""

    def step(self, key: int) -> bool:
        """`key` stepped. Is this the end of an iteration?"""
        if key == self.leader:
            if self._since:
                self._patience = max(8, 4 * max(self._since.values()))
                self._since.clear()
            self._steps += 1
            return True
        changed, steps = self._seen.get(key, (-1, 0))
        joins = changed < 0
        rested = self._steps - (steps if changed == self.changed else 0)
        self._seen[key] = self.changed, self._steps
        if (joins or rested >= 2) and rested <= MAX_CYCLE:
            return self._lead(key, rested)
        count = self._since[key] = self._since.get(key, 0) + 1
        return count > self._patience and self._lead(key, 1)

    def _lead(self, key: int, rested: int) -> bool:
        if self.leader is not None:
            self.changed += 1
            if len(self._seen) >= _MAX_KNOWN:
                self._seen.clear()
            self._seen[self.leader] = self.changed, 1
        self.leader = key
        self._since.clear()
        self._patience = max(8, 4 * rested)
        self._steps = 1
        return True


class SteppedOptimizers:
    """Meets each optimizer at its first step."""

    def __init__(self) -> None:
        self._cycle = Cycle()
        self._devices: dict[int, Any] = {}
        """It maps `id(optimizer)` to the CUDA device of its parameters, or None."""
        self._shapes: list[str] = []
        """They are those of the parameters that are stepped here, with their types."""

    @property
    def role(self) -> str:
        """Told by the shapes of the parameters that are stepped."""
        return hashlib.sha256(repr(sorted(self._shapes)).encode()).hexdigest()[:6]

    @property
    def changed(self) -> int:
        """How often another optimizer than before began to end the iterations."""
        return self._cycle.changed

    def knows(self, optimizer: Any) -> bool:
        return id(optimizer) in self._devices

    def meet(self, optimizer: Any) -> None:
        """Its first step has ended."""
        if len(self._devices) > _MAX_KNOWN:
            self._devices.clear()
        self._shapes += _shapes(optimizer)
        self._devices[id(optimizer)] = _cuda_device(optimizer)

    def device_of(self, optimizer: Any) -> Any:
        """The CUDA device of the parameters that it had then, or None."""
        return self._devices[id(optimizer)]

    def step(self, optimizer: Any) -> bool:
        """It has stepped; whether an iteration ends with that."""
        return self._cycle.step(id(optimizer))


def _cuda_device(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return parameter.device if parameter.is_cuda else None
    return None


def _shapes(optimizer: Any) -> list[str]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [f"{tuple(p.shape)} {p.dtype}" for p in parameters]


def called_by_scaler() -> bool:
    """Is this optimizer stepped by a `GradScaler`? Asked once per optimizer."""
    frame = sys._getframe(1)
    for _ in range(24):
        if frame.f_code.co_filename.endswith("grad_scaler.py"):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
