"""A real device as the conductor sees it: sampled all the time, set under a lease."""

from __future__ import annotations

import time

from kilter.core.errors import DeviceError
from kilter.core.setting import DeviceInfo, Sample, Setting
from kilter.lease.lease import Lease
from kilter.observe.iteration_clock import IterationClock
from kilter.observe.sampler import Sampler
from kilter.observe.sensor_record import DEFAULT_PERIOD_S

LOW_SETTING_HOLD_S = 60.0
HOLD_ITERATIONS = 5
"""Deadline of a low setting, renewed as long as iterations end: the longer of the two."""


class DeviceActuator:
    """A real device as the conductor sees it. Without a lease it only looks."""

    def __init__(self, sampler: Sampler, info: DeviceInfo, marks: IterationClock) -> None:
        self._sampler = sampler
        self._marks = marks
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
                self._set_s = time.monotonic()

    def check(self) -> None:
        if self.lease is None:
            return
        if self._sampler.why_ended is not None:
            raise DeviceError(f"nobody can see what the device does: {self._sampler.why_ended}")
        sample = self._sampler.record.latest
        if sample is not None and sample is not self._verified:
            self._verified = sample
            self.lease.verify(sample)
        if time.monotonic() - self._renewed_s > LOW_SETTING_HOLD_S / 6:
            self._renewed_s = time.monotonic()
            self.lease.renew(hold_s=self._hold_s)

    @property
    def _hold_s(self) -> float:
        """Long iterations need a longer deadline: only their ends renew it."""
        return max(LOW_SETTING_HOLD_S, HOLD_ITERATIONS * (self._marks.usual_s or 0.0))

    def settled(self) -> bool:
        return time.monotonic() >= self._set_s + self._latency_s

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        return self._sampler.record.mean_power_w(begin_s, end_s)

    def sustained(self) -> Setting:
        return self._sampler.record.sustained()
