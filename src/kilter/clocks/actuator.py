"""A real device as the conductor sees it: sampled all the time, set under a lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kilter.core.errors import DeviceError
from kilter.core.setting import DeviceInfo, Sample, Setting
from kilter.lease.lease import Lease
from kilter.observe.sensor_record import DEFAULT_PERIOD_S, SensorRecord

RECENT_S = 5.0
"""Readings so recent tell the class of a job; the warm-up at the default takes longer."""
LOW_SETTING_HOLD_S = 60.0
HOLD_ITERATIONS = 5
"""A low setting has the longer of these two deadlines, renewed as long as iterations end."""


class Sensors(Protocol):
    """Who reads the device: a `Sampler`, or whoever stands in for one."""

    @property
    def record(self) -> SensorRecord: ...
    @property
    def why_ended(self) -> str | None: ...
    @property
    def cost_s(self) -> float: ...


class Paced(Protocol):
    """Who tells how long an iteration takes: an `IterationClock`, or the telemetry."""

    @property
    def usual_s(self) -> float | None: ...


class DeviceActuator:
    """A device as the conductor sees it. Without a lease it only looks. `clock` is that of the
    device: the monotonic one, or the virtual time of a simulated device."""

    def __init__(
        self,
        sampler: Sensors,
        info: DeviceInfo,
        marks: Paced,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sampler = sampler
        self._marks = marks
        self._clock = clock
        self._latency_s = info.switch_latency_s or info.sensor_period_s or DEFAULT_PERIOD_S
        self._set_s = 0.0
        self._renewed_s = 0.0
        self._verified: Sample | None = None
        self.lease: Lease | None = None

    def apply(self, setting: Setting) -> None:
        if self.lease is not None:
            before = self.lease.setting
            self.lease.set(setting, hold_s=self._hold_s)
            if self.lease.setting != before:
                self._set_s = self._clock()

    def check(self) -> None:
        if self.lease is None:
            return
        if self._sampler.why_ended is not None:
            raise DeviceError(f"nobody can see what the device does: {self._sampler.why_ended}")
        sample = self._sampler.record.latest
        if sample is not None and sample is not self._verified:
            self._verified = sample
            self.lease.verify(sample)
        if self._clock() - self._renewed_s > LOW_SETTING_HOLD_S / 6:
            self._renewed_s = self._clock()
            self.lease.renew(hold_s=self._hold_s)

    @property
    def _hold_s(self) -> float:
        """Long iterations need a longer deadline: only their ends renew it."""
        return max(LOW_SETTING_HOLD_S, HOLD_ITERATIONS * (self._marks.usual_s or 0.0))

    def settled(self) -> bool:
        return self._clock() >= self._set_s + self._latency_s

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        return self._sampler.record.mean_power_w(begin_s, end_s)

    def sustained(self) -> Setting:
        return self._sampler.record.sustained()

    def recent(self) -> Sequence[Sample]:
        latest = self._sampler.record.latest
        return () if latest is None else self._sampler.record.since(latest.t_s - RECENT_S)
