"""A simulated job on a simulated GPU, for a watch in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.phased_job import PhasedJob
from kilter.observe.sensor_record import SensorRecord


@dataclass(slots=True)
class SimulatedSensors:
    """Stands in for a `Sampler`: reads whenever the simulated sensors change."""

    record: SensorRecord
    why_ended: str | None = None
    cost_s: float = 0.0


class SimulatedSource:
    """Runs `job` for `seconds` of virtual time, or until `stop`."""

    def __init__(
        self,
        gpu: SimGpu,
        job: PhasedJob,
        *,
        seconds: float,
        stop: threading.Event | None = None,
    ) -> None:
        self.device = gpu
        self.sensors = SimulatedSensors(SensorRecord())
        self.sensors.record.period_s = gpu.profile.sensor.period_s
        self._job = job
        self._seconds = seconds
        self._stop = stop or threading.Event()

    def clock(self) -> float:
        return self.device.now_s

    def drive(self, step: Callable[[], bool]) -> str:
        goes_on = True

        def read() -> None:
            nonlocal goes_on
            self.sensors.record.add(self.device.sample(energy=True), on_tick=True)
            goes_on = goes_on and step()

        self.device.at_each_tick(read)
        while goes_on and self.device.now_s < self._seconds and not self._stop.is_set():
            self._job.iterate()
        if not goes_on:
            return ""
        return "it was stopped" if self._stop.is_set() else "its time is over"

    def close(self) -> None:
        self.device.close()
