"""Reads a device's sensors in a thread, at their own pace.

Power is read at every tick of the sensors, or several times where ticks have to be told apart. The
counter costs milliseconds a reading (3 ms on an H200) and moves only once a tick, so it is read
rarely, always in this thread, and right after a tick. What the readings say about energy is in
`sensor_record.py`; what the sampler itself costs is known as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kilter.core.errors import DeviceError, DeviceHung, DeviceLost
from kilter.core.setting import Sample
from kilter.device.protocol import Device
from kilter.observe.sensor_record import DEFAULT_PERIOD_S, LONG_S, SensorRecord

_POLL_S = 0.002
"""How closely a tick is caught before the counter is read."""


class Sampler:
    """Samples one device until it is stopped or the device is lost. All times are `Sample.t_s`,
    the device's clock, which for a real device is the monotonic clock of the host.

    `start` and `stop` are for a thread; `poll` alone drives it in virtual time. `fence` wraps what
    the thread runs: errors of ours must end there. It has many attributes because clock, sleep and
    fence are given, so that the same code samples in virtual time.
    """

    def __init__(
        self,
        device: Device,
        *,
        counter_every_s: float = LONG_S,
        readings_per_tick: int = 1,
        fence: Callable[[Callable[..., None]], Callable[..., None]] = lambda function: function,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device = device
        self.record = SensorRecord()
        self._counter_every_s = counter_every_s
        self._readings_per_tick = readings_per_tick
        self._fence = fence
        self._clock = clock
        self._sleep = sleep
        self._has_counter = False
        self._wanted = False
        self._over = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self.cost_s = 0.0
        """Calls of the device took this time."""
        self.late = 0
        """So many samples came after the next one was due."""
        self.why_ended: str | None = None
        """This error of the device ended the sampling, if one did."""

    def start(self) -> None:
        """Sample from now on, in a daemon thread. Device errors end up in `why_ended`."""
        if self._thread is None and not self._stopped:
            run = self._fence(self._run)
            self._thread = threading.Thread(target=run, name="kilter-sampler", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Read the counter a last time and end. Final; twice is once."""
        if self._stopped:
            return
        self._stopped = True
        self._wanted = True
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def poll(self) -> Sample | None:
        """One reading of the sensors; None if the device is lost. The thread does just this."""
        if self.why_ended is not None:
            return None
        try:
            if self.record.latest is None:
                self._begin()
            return self._sample(energy=self._counter_due())
        except (DeviceLost, DeviceHung) as error:
            self.why_ended = str(error) or type(error).__name__
        except DeviceError as error:
            self.why_ended = str(error)
        return None

    # The thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        due_s = self._clock()
        while self.poll() is not None and not self._over.is_set():
            every_s = self.record.period_s / self._readings_per_tick
            due_s += every_s
            ahead_s = due_s - self._clock()
            if ahead_s < -every_s:
                self.late += 1
                due_s = self._clock()
            elif ahead_s > 0.0:
                self._over.wait(ahead_s)
        if self._over.is_set() and self._has_counter and self.why_ended is None:
            self._wanted = True
            self.poll()

    def _begin(self) -> None:
        info = self._device.info()
        self._has_counter = info.has_energy_counter
        self.record.period_s = info.sensor_period_s or DEFAULT_PERIOD_S

    def _counter_due(self) -> bool:
        if not self._has_counter:
            return False
        age_s = self.record.counter_age_s
        return self._wanted or age_s is None or age_s >= self._counter_every_s

    def _sample(self, *, energy: bool) -> Sample:
        # a counter that is read at every sample is never far behind its tick
        on_tick = energy and self._counter_every_s > 0.0 and self._catch_tick()
        begin = time.perf_counter()
        sample = self._device.sample(energy=energy)
        self.cost_s += time.perf_counter() - begin
        if energy:
            self._wanted = False
        self.record.add(sample, on_tick=on_tick)
        return sample

    def _catch_tick(self) -> bool:
        """Wait, a period at most, until the sensors have just changed. Whether they did."""
        before = self._quick_power_w()
        give_up_s = self._clock() + 1.5 * self.record.period_s
        while before is not None and self._clock() < give_up_s:
            self._sleep(_POLL_S)
            if self._quick_power_w() != before:
                return True
        return False

    def _quick_power_w(self) -> float | None:
        begin = time.perf_counter()
        power_w = self._device.sample().power_w
        self.cost_s += time.perf_counter() - begin
        return power_w
