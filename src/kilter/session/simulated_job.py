"""A simulated job on a simulated GPU, for a watch in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.phased_job import PhasedJob
from kilter.observe.sensor_record import SensorRecord


@dataclass(slots=True)
class SimulatedSensors:
    """Stands in for a `Sampler`: reads whenever the simulated sensors change."""

    record: SensorRecord
    why_ended: str | None = None


class SimulatedSource:
    """Runs `job` for `seconds` of virtual time. `events` are (virtual time, what happens to the
    job then), in order."""

    def __init__(
        self,
        gpu: SimGpu,
        job: PhasedJob,
        *,
        seconds: float,
        events: Sequence[tuple[float, Callable[[], None]]] = (),
    ) -> None:
        self.device = gpu
        self.sensors = SimulatedSensors(SensorRecord())
        self.sensors.record.period_s = gpu.profile.sensor.period_s
        self._job = job
        self._seconds = seconds
        self._events = list(events)

    def clock(self) -> float:
        return self.device.now_s

    def drive(self, step: Callable[[], bool]) -> str:
        goes_on = True

        def read() -> None:
            nonlocal goes_on
            self.sensors.record.add(self.device.sample(energy=True), on_tick=True)
            goes_on = goes_on and step()

        self.device.at_each_tick(read)
        while goes_on and self.device.now_s < self._seconds:
            while self._events and self._events[0][0] <= self.device.now_s:
                self._events.pop(0)[1]()
            self._job.iterate()
        return "its time is over" if goes_on else ""

    def close(self) -> None:
        self.device.close()
