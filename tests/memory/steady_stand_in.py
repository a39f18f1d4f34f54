"""A stand-in for a device on whose clock every operation takes the same time.

Plans follow from measured times. By this clock they do not depend on how busy the machine is, and
every run of a program makes the same calls.
"""

from __future__ import annotations

from typing import Any

from kilter.memory.engine import CpuStandIn

OPERATION_S = 1e-4


class SteadyStandIn(CpuStandIn):
    """`CpuStandIn` with a clock that goes on by `OPERATION_S` each time that it is read."""

    _marks = 0

    def mark(self) -> Any:
        self._marks += 1
        return self._marks * OPERATION_S
