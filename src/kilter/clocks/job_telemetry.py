"""What the readings of a GPU's sensors show of the job on it, under one setting after another."""

from __future__ import annotations

import msgspec

from kilter.core.setting import Setting
from kilter.model.period import Detection, Familiar, Pace, detect, doubt, pace, telemetry
from kilter.observe.sensor_record import SensorRecord

IDLE_S = 5.0
IDLE_PERIODS = 3.0
"""A GPU without work for so long, and for so many iterations, is idle."""
REFERENCE_PERIODS = 40
LEAST_REFERENCE = 8
"""What iterations look like under a setting is learned from at least, and at most, so many."""
RECENT_PERIODS = 2.2
"""Compared with the reference."""


class JobTelemetry:
    """Reads `record`, to which somebody else adds. Times are the device's clock."""

    def __init__(self, record: SensorRecord) -> None:
        self._record = record
        self._familiar: dict[Setting, Familiar] = {}

    @property
    def now_s(self) -> float:
        """Time of the last reading; before the first, minus infinity."""
        latest = self._record.latest
        return float("-inf") if latest is None else latest.t_s

    @property
    def sensor_period_s(self) -> float:
        return self._record.period_s

    def idle(self, period_s: float = 0.0) -> bool:
        """Whether the GPU has had nothing to do for a while. One that does not tell is not idle."""
        long_s = max(IDLE_S, IDLE_PERIODS * period_s)
        samples = self._record.since(self.now_s - long_s)
        if not samples or samples[-1].t_s - samples[0].t_s < 0.8 * long_s:
            return False
        return all(sample.sm_utilisation == 0.0 for sample in samples)

    def busy(self) -> bool:
        """Whether the last reading shows work, or does not tell."""
        latest = self._record.latest
        return latest is not None and latest.sm_utilisation != 0.0

    def detect(self, since_s: float) -> Detection:
        """The verdict on the readings from a time on; what may be an alias is no period."""
        seen = telemetry(self._record.since(since_s))
        detection = detect(seen)
        reason = doubt(seen, detection)
        if reason is None:
            return detection
        return msgspec.structs.replace(detection, period_s=None, code="unresolvable", reason=reason)

    def pace(self, since_s: float, about_s: float) -> Pace | None:
        """The iterations from a time on; None where they are not recognised."""
        return pace(telemetry(self._record.since(since_s)), about_s)

    def mean_power_w(self, seen: Pace) -> float | None:
        return self._record.mean_power_w(seen.begin_s, seen.end_s)

    def learn(self, setting: Setting, since_s: float, period_s: float) -> None:
        """The readings from a time on show what iterations look like under this setting, all but
        the last ones, which may be the first of another kind."""
        until_s = self.now_s - RECENT_PERIODS * period_s
        begin_s = max(since_s, until_s - REFERENCE_PERIODS * period_s)
        samples = [sample for sample in self._record.since(begin_s) if sample.t_s <= until_s]
        if until_s - begin_s < LEAST_REFERENCE * period_s or not samples:
            return
        familiar = Familiar(telemetry(samples), period_s)
        known = self._familiar.get(setting)
        if known is None or familiar.periods >= known.periods - 1:
            self._familiar[setting] = familiar

    def changed(self, setting: Setting, since_s: float, period_s: float) -> bool:
        """Whether the last iterations look like none under this setting, which is in force since
        `since_s`. False as long as too few have been seen under it."""
        familiar = self._familiar.get(setting)
        recent_s = RECENT_PERIODS * period_s
        if familiar is None or self.now_s - since_s < recent_s:
            return False
        return familiar.lacks(telemetry(self._record.since(self.now_s - recent_s)))

    def forget(self) -> None:
        """Another job, or another iteration: nothing learned holds any more."""
        self._familiar.clear()
