"""What work costs at given clocks, and which clock a power or temperature limit leaves.

    V(f)     = 1 below the knee, then rising linearly           (relative to the floor voltage)
    waiting  = static + leakage * V + clock * V^2 * f + standing memory power * memory clock
    energy   = waiting * t + busy * V^2 * f * t_busy + flops * e_flop * V^2 + bytes * e_byte

The first line is why low clocks stop paying: below the knee the voltage is at its floor, dynamic
energy per operation no longer falls, and the static part is paid for longer.

All functions take floats or arrays and broadcast. Units are SI, temperatures in degrees Celsius.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kilter.model.roofline import Quantity, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """The appetite of one device."""

    idle_w: float
    """The device draws this asleep: with nothing to do for a while, at its lowest clocks."""
    static_w: float
    """It draws this awake, whatever the clocks: board, regulators, the rest of the memory."""
    leakage_w: float
    """It leaks this at the floor voltage and `LEAKAGE_AT_C`, in proportion to voltage."""
    leakage_per_k: float
    """The leakage grows by this share per kelvin."""
    clock_w_per_hz: float
    """Clocks that toggle although nothing is computed draw this, times V^2 f."""
    busy_w_per_hz: float
    """The clocks draw this on top while a kernel is resident, times V^2 f."""
    joule_per_flop: float
    """It is this at the floor voltage, and grows with V^2."""
    memory_w_per_hz: float
    """The memory draws this per hertz of its clock."""
    joule_per_byte: float
    knee_hz: float
    """The voltage stays at its floor up to this SM clock."""
    volts_per_hz: float
    """The relative voltage rises by this per hertz above the knee."""

    def __post_init__(self) -> None:
        may_be_zero = (
            "leakage_w",
            "leakage_per_k",
            "clock_w_per_hz",
            "busy_w_per_hz",
            "memory_w_per_hz",
            "joule_per_byte",
            "volts_per_hz",
        )
        require_positive(self, or_zero=may_be_zero)

    def voltage(self, sm_hz: Quantity) -> Quantity:
        """Relative to the floor voltage."""
        return 1.0 + self.volts_per_hz * np.maximum(0.0, sm_hz - self.knee_hz)

    def waiting_w(
        self, sm_hz: Quantity, memory_hz: Quantity, temperature_c: Quantity | None = None
    ) -> Quantity:
        """Awake with nothing to do. Without a temperature: at `LEAKAGE_AT_C`."""
        v = self.voltage(sm_hz)
        warmer = 0.0 if temperature_c is None else temperature_c - LEAKAGE_AT_C
        leakage = self.leakage_w * v * np.maximum(0.0, 1.0 + self.leakage_per_k * warmer)
        clocks = self.clock_w_per_hz * v**2 * sm_hz
        return self.static_w + leakage + clocks + self.memory_w_per_hz * memory_hz

    def work_j(
        self,
        flops: Quantity,
        bytes_moved: Quantity,
        busy_s: Quantity,
        sm_hz: Quantity,
        *,
        activity: Quantity = 1.0,
    ) -> Quantity:
        """What the work costs on top of waiting. `activity` scales the SMs' share of it: operands
        with many zeros, or lighter instructions, switch less."""
        v2 = self.voltage(sm_hz) ** 2
        busy = self.busy_w_per_hz * sm_hz * busy_s
        return v2 * activity * (busy + self.joule_per_flop * flops) + (
            self.joule_per_byte * bytes_moved
        )


LEAKAGE_AT_C = 60.0
"""`Power.leakage_w` is for this temperature."""


def capped_clock(
    power_w: Callable[[Quantity], Quantity],
    lowest_hz: Quantity,
    highest_hz: Quantity,
    limit_w: Quantity,
) -> Quantity:
    """The highest clock in the range at which `power_w` keeps the limit; the lowest clock where
    none does (a device does not switch itself off for a limit below its floor).

    `power_w` must not fall with the clock. Bisection to 1e-9 of the range.
    """
    low = np.zeros(np.broadcast(lowest_hz, highest_hz, limit_w).shape) + lowest_hz
    high = np.zeros_like(low) + highest_hz
    free = power_w(high) <= limit_w
    if np.all(free):
        return high
    for _ in range(30):
        middle = (low + high) / 2
        fits = power_w(middle) <= limit_w
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.where(free, highest_hz, low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thermal:
    """First-order warming: one thermal mass behind one resistance."""

    ambient_c: float
    kelvin_per_watt: float
    time_constant_s: float
    limit_c: float
    """Above this the device slows down."""

    def __post_init__(self) -> None:
        require_positive(self)
        if self.limit_c <= self.ambient_c:
            raise ValueError(f"limit_c={self.limit_c} must be above ambient_c={self.ambient_c}")

    def after(self, temperature_c: float, power_w: float, seconds: float) -> float:
        """Temperature after drawing `power_w` for `seconds`: exact step of the linear model."""
        final = self.ambient_c + self.kelvin_per_watt * power_w
        return final + (temperature_c - final) * math.exp(-seconds / self.time_constant_s)

    @property
    def sustainable_w(self) -> float:
        """Power that ends exactly at the limit."""
        return (self.limit_c - self.ambient_c) / self.kelvin_per_watt
