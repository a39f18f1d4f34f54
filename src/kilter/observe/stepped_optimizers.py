"""The optimizers of a program: whose step ends an iteration, and what they step."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

from kilter.observe.cycle import Cycle

_MAX_KNOWN = 4096


class SteppedOptimizers:
    """Meets each optimizer at its first step. `timed` says whether its device is of interest."""

    def __init__(self, *, timed: bool) -> None:
        self._timed = timed
        self._cycle = Cycle()
        self._devices: dict[int, Any] = {}
        """id(optimizer) -> the CUDA device of its parameters, or None."""
        self._shapes: list[str] = []
        """Of the parameters that are stepped here, with their types."""

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
        self._devices[id(optimizer)] = _cuda_device(optimizer) if self._timed else None

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
