"""What can be asked of a device (`Setting`, `Supported`), what it says (`DeviceInfo`, `Sample`)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from kilter.core.label import Label
from kilter.core.units import MHZ

Knob = Literal["sm_clock_hz", "memory_clock_hz", "power_limit_w"]
CLOCKS: tuple[Literal["sm_clock_hz", "memory_clock_hz"], ...] = ("sm_clock_hz", "memory_clock_hz")
KNOBS: tuple[Knob, ...] = (*CLOCKS, "power_limit_w")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """The requested value of every knob; `None` leaves that knob to the device's own governor.

    A requested clock is not the observed clock: the device may be power-limited below it.
    """

    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_limit_w: float | None = None

    def with_(
        self,
        *,
        sm_clock_hz: float | None = None,
        memory_clock_hz: float | None = None,
        power_limit_w: float | None = None,
    ) -> Setting:
        """This setting with the given knobs changed (`None` keeps a knob as it is)."""
        changed = Setting(
            sm_clock_hz=sm_clock_hz, memory_clock_hz=memory_clock_hz, power_limit_w=power_limit_w
        )
        return over(self, changed)

    @property
    def calls(self) -> int:
        """Of the driver: one for each knob that it names."""
        return sum(getattr(self, knob) is not None for knob in KNOBS)

    def __str__(self) -> str:
        parts = []
        if self.sm_clock_hz is not None:
            parts.append(f"SM {self.sm_clock_hz / MHZ:.0f} MHz")
        if self.memory_clock_hz is not None:
            parts.append(f"memory {self.memory_clock_hz / MHZ:.0f} MHz")
        if self.power_limit_w is not None:
            parts.append(f"limit {self.power_limit_w:.0f} W")
        return ", ".join(parts) or "default"


def over(found: Setting, setting: Setting) -> Setting:
    """`setting`, with every knob that it leaves open as it was found: a plan for the SM clock must
    not undo the administrator's power limit."""
    wanted = {knob: getattr(setting, knob) for knob in KNOBS}
    return Setting(**{k: getattr(found, k) if v is None else v for k, v in wanted.items()})


def changes(found: Setting, setting: Setting) -> Setting:
    """The knobs of a setting that are not as found; the others are left open."""
    wanted = {knob: getattr(setting, knob) for knob in KNOBS}
    return Setting(**{k: v for k, v in wanted.items() if v != getattr(found, k)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Supported:
    """The values a device accepts, each ascending; empty means that the knob does not exist."""

    sm_clocks_hz: tuple[float, ...] = ()
    memory_clocks_hz: tuple[float, ...] = ()
    power_limits_w: tuple[float, ...] = ()
    """These limits are worth trying between the device's smallest and largest one."""


class Throttle(enum.Enum):
    """Why a device runs below what was asked (the vendors' clock event reasons, in our words)."""

    POWER_CAP = "power_cap"
    THERMAL = "thermal"
    HARDWARE = "hardware"
    """It is a brake, slowdown or board power signal: not ours to judge."""
    CLOCK_SETTING = "clock_setting"
    """A locked or application clock holds it: ours, or somebody else's."""
    IDLE = "idle"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """How busy the units of a device are: shares, means over the last second or so."""

    sm: float | None = None
    """So many of the SMs run something."""
    dram: float | None = None
    """So much of the memory's bandwidth is used."""
    tensor: float | None = None
    """The tensor pipes work in so many of their cycles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a device said at one instant; `None` means unknown, never zero."""

    t_s: float
    """It is the time of the device's clock: monotonic seconds, or virtual seconds of a simulated
    device."""
    power_w: float | None = None
    energy_j: float | None = None
    """It counts from an arbitrary start; it is only read when asked for, since the call may be
    slow."""
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    sm_utilisation: float | None = None
    memory_utilisation: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: float | None = None
    throttle: tuple[Throttle, ...] | None = None
    activity: Activity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a device is, and what this process may do with it."""

    name: str
    uuid: str
    """It is unique and stable across processes: it names the lock and the journal of the lease."""
    backend: str
    """It is `nvml`, `sim`, `null` or `replay`."""
    label: Label
    can_set: bool
    refusal: str | None = None
    """Why `can_set` is false, and what to do about it."""
    persistent: bool = True
    """Settings outlive the process, so a lease needs a journal and a watcher."""
    has_energy_counter: bool = False
    sensor_period_s: float | None = None
    """How often the sensors change; reading faster than this reads the same value again."""
    switch_latency_s: float | None = None
    """How long a set takes to act, at the 95th percentile, where known."""
    memory_bytes: int | None = None
    driver: str | None = None
    vbios: str | None = None
    """It is the version of the card's own firmware, where the vendor tells it."""
    index: int | None = None
    """It is the vendor's index, for messages only: it is not the framework's index."""
