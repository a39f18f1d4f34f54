"""What a governed run leaves for the next run of the same job: `PastRun`, a row of the history."""

from __future__ import annotations

import math

import msgspec

from kilter.core.label import Label
from kilter.core.setting import Setting

LEAST_FREEDOM = 4
"""A spread that is worth keeping has at least so many degrees of freedom."""
MOST_FREEDOM = 60
"""What earlier runs count for at most, so that a job whose noise has changed is noticed in time."""


class KnownSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The setting that an earlier run of a job has chosen, and how much its pairs varied."""

    setting: Setting
    time_sd: float
    energy_sd: float
    freedom: int
    began: str

    @property
    def day(self) -> str:
        return self.began[:10]

    def spread_with(
        self, time_sd: float, energy_sd: float, freedom: int
    ) -> tuple[float, float, int]:
        """The spread of this run's pairs pooled with that of earlier ones: a run that only confirms
        has too few of its own."""
        all_of_them = self.freedom + freedom
        time = (self.freedom * self.time_sd**2 + freedom * time_sd**2) / all_of_them
        energy = (self.freedom * self.energy_sd**2 + freedom * energy_sd**2) / all_of_them
        return math.sqrt(time), math.sqrt(energy), min(all_of_them, MOST_FREEDOM)


class SeenSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What the pairs of one run say of one setting: means of the log ratios to the baseline."""

    setting: Setting
    log_time: float
    log_energy: float
    pairs: int


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a job under its baseline setting; None where the device does not tell."""

    iteration_s: float | None = None
    power_w: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    sm_utilisation: float | None = None
    memory_utilisation: float | None = None
    throttled: float | None = None
    """This share of the readings names a limit of power, temperature or hardware."""
    flop_per_s: float | None = None
    """The whole iteration runs at this rate, as the trace counts its FLOPs."""
    bytes_per_s: float | None = None
    """The bytes that its operations move have this rate."""
    kernels_per_s: float | None = None
    """It is the trace's, as `TraceFeatures` has it; so are the next two."""
    host_gap: float | None = None
    exposed_communication: float | None = None


class PastRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one governed run leaves for the next: an attribute for each column of the history."""

    signature: str
    label: Label
    gpu: str
    driver: str | None
    command: tuple[str, ...]
    world_size: int
    began: str
    """The run began at this ISO time."""
    max_slowdown: float
    objective: str
    reference: Setting
    """It is the setting as found, with the observed clock where it named none."""
    features: Features
    seen: tuple[SeenSetting, ...]
    chosen: Setting | None
    """What was held at the end; the setting as found where nothing saved enough; None: the search
    was not over."""
    found: Setting
    """It is the setting of the baseline."""
    time_sd: float
    """The log time ratio of one pair has this spread, and the log energy ratio the next one."""
    energy_sd: float
    freedom: int
    """These have so many degrees of freedom."""

    @property
    def known(self) -> KnownSetting | None:
        """What the next run may begin with; None where there is nothing to confirm."""
        if self.chosen is None or self.chosen == self.found or self.freedom < LEAST_FREEDOM:
            return None
        return KnownSetting(
            setting=self.chosen,
            time_sd=self.time_sd,
            energy_sd=self.energy_sd,
            freedom=self.freedom,
            began=self.began,
        )
