"""Profiles of simulated devices: what a card can be set to, its models, and where they come from.

Each `profiles/*.toml` is written by `tools/fit_profiles.py` and names the measurements it was
fitted to, its error there, its error on workloads that it was not fitted to, and what is assumed.
"""

from __future__ import annotations

import math
import tomllib
import zlib
from dataclasses import dataclass
from importlib import resources

import msgspec
import numpy as np

from kilter.core.errors import FileError, NoDevice
from kilter.core.setting import Setting, Supported
from kilter.device.sim.cards import names
from kilter.model.power import Power, Thermal
from kilter.model.roofline import Roofline, require_positive

PROFILE_SCHEMA = "kilter.profile/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What can be set, and what rules when nothing is."""

    sm_lowest_hz: float
    sm_highest_hz: float
    sm_step_hz: float
    sm_idle_hz: float
    """Where the clock falls when the device is asleep."""
    memory_clocks_hz: tuple[float, ...]
    """They are ascending; the last one is the default."""
    limit_lowest_w: float
    limit_highest_w: float
    """It is the default as well."""
    limit_step_w: float
    limit_kept: float
    """Once it throttles, the device holds its power at this fraction of the limit."""

    def __post_init__(self) -> None:
        require_positive(self)
        if not self.sm_lowest_hz <= self.sm_highest_hz:
            raise ValueError("sm_lowest_hz must not be above sm_highest_hz")
        if not self.limit_lowest_w <= self.limit_highest_w:
            raise ValueError("limit_lowest_w must not be above limit_highest_w")
        if not self.memory_clocks_hz or list(self.memory_clocks_hz) != sorted(
            set(self.memory_clocks_hz)
        ):
            raise ValueError("memory_clocks_hz must be ascending and not empty")
        if self.memory_clocks_hz[0] <= 0 or self.limit_kept > 1:
            raise ValueError("memory clocks must be positive and limit_kept at most 1")

    @property
    def default_hz(self) -> tuple[float, float]:
        """The clocks of SMs and memory when nothing is set."""
        return self.sm_highest_hz, self.memory_clocks_hz[-1]

    def supported(self) -> Supported:
        """Every value that the simulated device accepts. A single memory clock is no knob."""
        memory = self.memory_clocks_hz
        return Supported(
            sm_clocks_hz=_steps(self.sm_lowest_hz, self.sm_highest_hz, self.sm_step_hz),
            memory_clocks_hz=memory if len(memory) > 1 else (),
            power_limits_w=_steps(self.limit_lowest_w, self.limit_highest_w, self.limit_step_w),
        )


def _steps(lowest: float, highest: float, step: float) -> tuple[float, ...]:
    count = math.floor((highest - lowest) / step + 1e-6)
    values = [lowest + step * i for i in range(count + 1)]
    return tuple(values if math.isclose(values[-1], highest) else [*values, highest])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensor:
    """How the device's own instruments see it."""

    period_s: float
    """Power, clocks, utilisation and the energy counter change this often."""
    window_s: float
    """Power is the mean over this long before the change."""
    gain_error: float
    """A board reads up to this fraction too much or too little, always the same."""
    energy_counter: bool

    def __post_init__(self) -> None:
        require_positive(self, or_zero=("gain_error",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """How long a set takes to act: log-normal, with a median that depends on the target."""

    median_s: float
    target_spread: float
    """The logarithm has this standard deviation between targets."""
    spread: float
    """It has this one between repetitions of one target."""

    def __post_init__(self) -> None:
        require_positive(self, or_zero=("target_spread", "spread"))

    def median_to_s(self, setting: Setting) -> float:
        """Of the switches to one target, which has a median of its own."""
        target = np.random.default_rng(zlib.crc32(repr(setting).encode())).standard_normal()
        return self.median_s * math.exp(self.target_spread * float(target))

    @property
    def p95_s(self) -> float:
        """Over targets and repetitions."""
        return self.median_s * math.exp(1.645 * math.hypot(self.target_spread, self.spread))


@dataclass(frozen=True, slots=True, kw_only=True)
class FitEvidence:
    """Where the numbers come from. Errors are medians over rows of |model / measured - 1|."""

    fitted_to: str
    workloads: int
    rows: int
    fit_time_error: float | None = None
    """It is `None` where the measurements do not say."""
    fit_energy_error: float | None = None
    held_out: str
    """How the errors on workloads that the card was not fitted to were found."""
    held_out_rows: int
    held_out_time_error: float | None = None
    held_out_energy_error: float | None = None
    checks: tuple[str, ...]
    """They are other measurements that the fit has not seen, and how well it meets them."""
    assumed: tuple[str, ...]
    """What no measurement stands behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that makes one simulated device."""

    schema: str
    name: str
    """The command line has it as in `sim:NAME`."""
    title: str
    memory_bytes: int
    sleep_after_s: float
    """Without work for this long the device falls asleep."""
    knobs: Knobs
    roofline: Roofline
    power: Power
    thermal: Thermal
    sensor: Sensor
    switch: Switch
    evidence: FitEvidence


def load_profile(name: str) -> Profile:
    """A shipped profile by name; `NoDevice` says which there are."""
    if name not in names():
        raise NoDevice(f"no simulated device {name!r}; there are: {', '.join(names())}")
    file = resources.files("kilter.device.sim") / "profiles" / f"{name}.toml"
    return parse_profile(file.read_text(encoding="utf-8"), where=f"{name}.toml")


def parse_profile(text: str, *, where: str) -> Profile:
    """A profile from TOML; `FileError` names the file and what is wrong with it."""
    try:
        found = tomllib.loads(text)
        profile = msgspec.convert(found, Profile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise FileError(f"{where}: not a usable profile ({error})") from error
    if profile.schema != PROFILE_SCHEMA:
        raise FileError(f"{where}: holds {profile.schema!r}, expected {PROFILE_SCHEMA!r}")
    return profile
