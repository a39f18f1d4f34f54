"""What the sensors of a device have said, and the energy of any interval by it.

Two witnesses of energy are kept apart: the integral of power by trapezoids, and the energy counter.
Of an interval that holds two readings of the counter far enough apart the energy is their
difference, plus the two edges by the integral of power, scaled to the counter. Whatever was used,
both are known where both exist.
"""

from __future__ import annotations

import statistics
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from kilter.core.setting import Sample, Setting, Throttle

DEFAULT_PERIOD_S = 0.1
LONG_S = 10.0
"""Over this long a counter difference is right to about 1 % wherever its ends fall between ticks;
ends that are known to lie on ticks are good from `SHORT_S` on."""
SHORT_S = 1.0
DISAGREEMENT = 0.05
"""If counter and integral are further apart than this, one of them is wrong, and people should
know."""
_KEPT = 72_000
"""So many samples are two hours at ten a second, at least."""
_HOLE_PERIODS = 5.0
"""Over more missing periods than this no power is guessed."""


@dataclass(frozen=True, slots=True)
class _Reading:
    t_s: float
    energy_j: float
    on_tick: bool


class SensorRecord:
    """The samples of one device, added by one thread, and what follows from them for any. Times are
    `Sample.t_s`, the clock of the device."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._readings: deque[_Reading] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()
        """It is held while the lists change or are copied."""
        self._methods: set[str] = set()
        self._compared_j = [0.0, 0.0]
        """Energies that both witnesses know sum up to these: by the counter, by the integral."""
        self._integral_j: float | None = None
        self._first_counter_j: float | None = None
        self._last_counter_j: float | None = None
        self.period_s = DEFAULT_PERIOD_S
        """Two samples are this far apart."""

    @property
    def latest(self) -> Sample | None:
        """The last sample, with the energy counter only if it was read then."""
        return self._samples[-1] if self._samples else None

    @property
    def energy_method(self) -> str:
        """What the energies handed out so far were from, for the report."""
        return " and ".join(sorted(self._methods)) or "none"

    @property
    def disagreement(self) -> float | None:
        """(integral - counter) / counter over all energies handed out that both knew."""
        counter_j, integral_j = self._compared_j
        return integral_j / counter_j - 1.0 if counter_j > 0.0 else None

    @property
    def total_j(self) -> float | None:
        """Energy since the first sample: by the counter if it counts, else by the integral of
        power, without the holes in it."""
        first_j, last_j = self._first_counter_j, self._last_counter_j
        if first_j is not None and last_j is not None and last_j > first_j:
            return last_j - first_j
        return self._integral_j

    @property
    def counter_age_s(self) -> float | None:
        """From the last reading of the counter to the last sample; None: it was never read."""
        if not self._readings:
            return None
        return self._samples[-1].t_s - self._readings[-1].t_s

    def add(self, sample: Sample, *, on_tick: bool) -> None:
        """One more sample; `on_tick` says that the sensors had just changed."""
        with self._lock:
            # A clock that stands still would make intervals of no length.
            if not self._samples or sample.t_s > self._samples[-1].t_s:
                self._add_up(sample)
                self._samples.append(sample)
                if len(self._samples) >= 2 * _KEPT:
                    del self._samples[:_KEPT]
                if sample.energy_j is not None:
                    self._readings.append(_Reading(sample.t_s, sample.energy_j, on_tick))

    def _add_up(self, sample: Sample) -> None:
        """For `total_j`: samples themselves are not kept for ever."""
        if sample.energy_j is not None:
            if self._first_counter_j is None:
                self._first_counter_j = sample.energy_j
            self._last_counter_j = sample.energy_j
        last = self._samples[-1] if self._samples else None
        if last is None or last.power_w is None or sample.power_w is None:
            return
        passed_s = sample.t_s - last.t_s
        if passed_s <= _HOLE_PERIODS * self.period_s:
            added_j = passed_s * (last.power_w + sample.power_w) / 2
            self._integral_j = (self._integral_j or 0.0) + added_j

    def since(self, begin_s: float) -> list[Sample]:
        with self._lock:
            return self._samples[bisect_left(self._samples, begin_s, key=_time) :]

    def energy_between(self, begin_s: float, end_s: float) -> float | None:
        """Energy over an interval; None if neither witness covers it.

        The interval may reach a few periods beyond the first or the last sample.
        """
        with self._lock:
            readings = list(self._readings)
            samples = self._between(begin_s, end_s)
        integral_j = self._integral(samples, begin_s, end_s)
        counter_j = self._counted(samples, readings, begin_s, end_s)
        if counter_j is not None:
            self._methods.add("counter")
            if integral_j is not None:
                self._compared_j[0] += counter_j
                self._compared_j[1] += integral_j
            return counter_j
        if integral_j is not None:
            self._methods.add("power integral")
        return integral_j

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        """Mean power over an interval, by the better witness; None if it is not known."""
        energy_j = self.energy_between(begin_s, end_s) if end_s > begin_s else None
        return None if energy_j is None else energy_j / (end_s - begin_s)

    def sustained(self, seconds: float = 10.0) -> Setting:
        """The clocks that the busy device held over the last seconds: what it really runs at,
        which under a power or thermal limit is less than what it is allowed to."""
        with self._lock:
            end_s = self._samples[-1].t_s if self._samples else 0.0
            samples = self._between(end_s - seconds, end_s)
        recent = [s for s in samples if s.t_s >= end_s - seconds and _busy(s)]
        sm = [s.sm_clock_hz for s in recent if s.sm_clock_hz is not None]
        memory = [s.memory_clock_hz for s in recent if s.memory_clock_hz is not None]
        return Setting(
            sm_clock_hz=statistics.median_low(sm) if sm else None,
            memory_clock_hz=statistics.median_low(memory) if memory else None,
        )

    def _between(self, begin_s: float, end_s: float) -> list[Sample]:
        """The samples of an interval, and those around it that belong to its edges."""
        reach_s = (_HOLE_PERIODS + 1.0) * self.period_s
        first = bisect_left(self._samples, begin_s - reach_s, key=_time)
        return self._samples[first : bisect_right(self._samples, end_s + reach_s, key=_time)]

    def _integral(self, samples: list[Sample], begin_s: float, end_s: float) -> float | None:
        known = [(s.t_s, s.power_w) for s in samples if s.power_w is not None]
        return integrate(known, begin_s, end_s, reach_s=_HOLE_PERIODS * self.period_s)

    def _counted(
        self, samples: list[Sample], readings: list[_Reading], begin_s: float, end_s: float
    ) -> float | None:
        times = [r.t_s for r in readings]
        first = bisect_left(times, begin_s)
        last = bisect_right(times, end_s) - 1
        if last <= first:
            return None
        a, b = readings[first], readings[last]
        least_s = SHORT_S if a.on_tick and b.on_tick else LONG_S
        if b.t_s - a.t_s < least_s or b.energy_j < a.energy_j:
            return None
        if a.energy_j == b.energy_j:
            return None  # A counter that stands still for so long does not count.
        counted_j = b.energy_j - a.energy_j
        parts = [
            self._integral(samples, t0, t1) if t1 > t0 else 0.0
            for t0, t1 in ((begin_s, a.t_s), (a.t_s, b.t_s), (b.t_s, end_s))
        ]
        before, between, after = parts
        if before is None or between is None or after is None:
            return None
        # The integral knows how power went, the counter how much it was.
        gain = counted_j / between if between > 0.0 else 1.0
        return counted_j + gain * (before + after)


def integrate(
    points: list[tuple[float, float]], begin: float, end: float, *, reach_s: float
) -> float | None:
    """Integral of the line through `points` (time, value) over `[begin, end)`.

    The first and the last value hold `reach_s` beyond their points. None where that does not
    reach, or where the interval contains a hole longer than `reach_s`.
    """
    times = [t for t, _ in points]
    low, high = bisect_right(times, begin) - 1, bisect_left(times, end)
    inside = points[max(low, 0) : high + 1]
    if not inside or begin < inside[0][0] - reach_s or end > inside[-1][0] + reach_s:
        return None
    if inside[0][0] > begin:
        inside.insert(0, (begin, inside[0][1]))
    if inside[-1][0] < end:
        inside.append((end, inside[-1][1]))
    total = 0.0
    for (t0, v0), (t1, v1) in pairwise(inside):
        if t1 - t0 > reach_s:
            return None
        a, b = max(t0, begin), min(t1, end)
        if a < b:
            slope = (v1 - v0) / (t1 - t0)
            total += (b - a) * (v0 + slope * ((a + b) / 2 - t0))
    return total


def _time(sample: Sample) -> float:
    return sample.t_s


def _busy(sample: Sample) -> bool:
    if sample.throttle is not None and Throttle.IDLE in sample.throttle:
        return False
    return sample.sm_utilisation is None or sample.sm_utilisation > 0.0
