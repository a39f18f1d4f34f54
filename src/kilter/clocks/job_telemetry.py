"""What the readings of a GPU's sensors show of the job on it, under one setting after another."""

from __future__ import annotations

import msgspec

from kilter.core.setting import Sample, Setting
from kilter.model.period import Detection, Familiar, JobPace, detect, doubt, pace, telemetry
from kilter.observe.sensor_record import SensorRecord

IDLE_S = 5.0
IDLE_PERIODS = 3.0
"""A GPU without work for so long, and for so many iterations, is idle."""
LEAST_REFERENCE = 20.0
"""Iterations seen under a setting before the next ones are compared with them."""
STRETCHES_KEPT = 12
"""So many stretches (blocks, mostly) are kept."""
RECENT_PERIODS = 2.2
"""So many periods are compared with the reference."""


class JobTelemetry:
    """Reads `record`, to which somebody else adds. Times are the device's clock."""

    def __init__(self, record: SensorRecord) -> None:
        self._record = record
        self._stretches: dict[Setting, list[list[Sample]]] = {}
        self._familiar: dict[Setting, Familiar] = {}

    @property
    def now_s(self) -> float:
        """Time of the last reading; before the first, minus infinity."""
        latest = self._record.latest
        return float("-inf") if latest is None else latest.t_s

    @property
    def latest(self) -> Sample | None:
        return self._record.latest

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

    def pace(self, since_s: float, about_s: float) -> JobPace | None:
        """The iterations from a time on; None where they are not recognised."""
        return pace(telemetry(self._record.since(since_s)), about_s)

    def mean_power_w(self, seen: JobPace) -> float | None:
        return self._record.mean_power_w(seen.begin_s, seen.end_s)

    def learn(
        self, setting: Setting, begin_s: float, period_s: float, end_s: float | None = None
    ) -> None:
        """The readings from `begin_s` on show what iterations look like under this setting: until
        `end_s`, or all but the last ones, which may be the first of another kind."""
        if end_s is None:
            end_s = self.now_s - RECENT_PERIODS * period_s
        samples = [sample for sample in self._record.since(begin_s) if sample.t_s <= end_s]
        if len(samples) < 2 or samples[-1].t_s - samples[0].t_s < 2 * period_s:
            return
        stretches = [*self._stretches.get(setting, ()), samples][-STRETCHES_KEPT:]
        self._stretches[setting] = stretches
        self._familiar[setting] = Familiar([telemetry(each) for each in stretches], period_s)

    def changed(self, setting: Setting, since_s: float, period_s: float) -> bool:
        """Whether the last iterations look like none under this setting, which is in force since
        `since_s`. False as long as too few have been seen under it."""
        familiar = self._familiar.get(setting)
        recent_s = RECENT_PERIODS * period_s
        if familiar is None or familiar.periods < LEAST_REFERENCE:
            return False
        if self.now_s - since_s < recent_s:
            return False
        return familiar.lacks(telemetry(self._record.since(self.now_s - recent_s)))

    def forget(self) -> None:
        """Another job, or another iteration: nothing learned holds any more."""
        self._familiar.clear()
        self._stretches.clear()
