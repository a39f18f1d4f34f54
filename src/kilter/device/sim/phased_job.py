"""A simulated training job whose iterations show in the sensors: each has parts of unequal power.

`SimGpu.run` runs an iteration at its mean power: all that somebody inside of the job needs.
Whoever looks from outside sees only what differs between the parts of an iteration.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from kilter.core.trace import IterationTrace, Operation
from kilter.device.sim.gpu import SimGpu


class PhasedJob:
    """One traced iteration repeated, cut where the kind of its operations changes."""

    def __init__(self, gpu: SimGpu, trace: IterationTrace) -> None:
        self._gpu = gpu
        self.iterations = 0
        self._parts = [
            gpu.work(replace(trace, operations=tuple(part)))
            for _, part in groupby(trace.operations, key=_kind)
        ]

    def scale(self, factor: float) -> None:
        """Another batch from now on: so many times the work of an iteration."""
        self._parts = [part.scaled(factor, factor) for part in self._parts]

    def iterate(self) -> float:
        """Run the next iteration; its time in (virtual) seconds. Raises `DeviceLost`."""
        self.iterations += 1
        return self._gpu.run(*self._parts)


def _kind(operation: Operation) -> str:
    return operation.kind.value
