"""How long work takes at given clocks: a roofline whose two roofs overlap a little.

    t_compute = flops / (flops per cycle * SM clock)
    t_memory  = bytes / bandwidth(SM clock, memory clock)
    t         = max(floor, (t_compute^p + t_memory^p)^(1/p))

`p` says how well arithmetic and memory traffic hide each other: 1 not at all (sum), large
perfectly (maximum). The bandwidth itself is the same smooth minimum of what the memory delivers
and what the SMs can ask for, so it falls a little with the SM clock (S. Williams, A. Waterman,
D. Patterson, "Roofline", CACM 52(4), 2009; the smooth maximum and its exponent are ours).

All functions take floats or arrays and broadcast. Units are SI.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Quantity = float | Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The speed of one device. Everything is positive and finite."""

    flops_per_cycle: float
    """The whole device does so many per SM clock cycle, sustained by large matrix products."""
    bytes_per_memory_cycle: float
    """What the memory delivers per cycle of the memory clock that the vendor names."""
    bytes_per_sm_cycle: float
    """What all SMs together can ask for per SM clock cycle."""
    overlap: float
    """It is the exponent `p` of the smooth maximum, at least 1."""
    launch_s: float
    """A kernel takes at least this when a host launches one after the other; no clock changes
    it."""

    def __post_init__(self) -> None:
        require_positive(self)
        if self.overlap < 1:
            raise ValueError(f"overlap={self.overlap} must be at least 1")

    def bandwidth(self, sm_hz: Quantity, memory_hz: Quantity) -> Quantity:
        """Bytes per second between SMs and memory."""
        deliver = self.bytes_per_memory_cycle * memory_hz
        ask = self.bytes_per_sm_cycle * sm_hz
        return _norm(1 / deliver, 1 / ask, self.overlap) ** -1

    def busy_s(
        self, flops: Quantity, bytes_moved: Quantity, sm_hz: Quantity, memory_hz: Quantity
    ) -> Quantity:
        """Time of the work itself, without the launch floor."""
        compute_s = flops / (self.flops_per_cycle * sm_hz)
        memory_s = bytes_moved / self.bandwidth(sm_hz, memory_hz)
        return _norm(compute_s, memory_s, self.overlap)


def _norm(a: Quantity, b: Quantity, p: float) -> Quantity:
    """(a^p + b^p)^(1/p) of non-negative numbers, safe against under- and overflow."""
    large = np.maximum(a, b)
    small = np.minimum(a, b)
    ratio = np.divide(small, large, out=np.zeros_like(large * 1.0), where=large > 0)
    result: Quantity = large * (1 + ratio**p) ** (1 / p)
    return result


def require_positive(value: Any, *, or_zero: tuple[str, ...] = ()) -> None:
    """`ValueError` naming the first field of a dataclass that is not positive and finite."""
    for field in fields(value):
        number = getattr(value, field.name)
        if not isinstance(number, int | float):
            continue
        low_enough = number >= 0 if field.name in or_zero else number > 0
        if not (math.isfinite(number) and low_enough):
            least = "non-negative" if field.name in or_zero else "positive"
            raise ValueError(f"{field.name}={number} must be {least} and finite")
