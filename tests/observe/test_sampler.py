"""The sampler against a scripted device in virtual time, and its thread against a real clock."""

import dataclasses
import functools
import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.core.errors import DeviceHung, DeviceLost
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo, Sample, Setting, Supported, Throttle
from kilter.observe.sampler import Sampler
from kilter.observe.sensor_record import integrate

TICK_S = 0.1
CALL_S = 10e-6
COUNTER_CALL_S = 3e-3


class Scripted:
    """A device in virtual time: `power(t)` in W, sensors and counter that move once a tick."""

    def __init__(self, power=lambda t: 300.0, *, counter=True, lost_at=None, gain=1.0):
        self.now_s = 0.0
        self.counter_calls = 0
        self._power, self._counter, self._lost_at, self._gain = power, counter, lost_at, gain

    def info(self):
        return DeviceInfo(
            name="Scripted", uuid="scripted", backend="sim", label=Label.SIMULATED, can_set=False,
            has_energy_counter=self._counter, sensor_period_s=TICK_S,
        )  # fmt: skip

    def sample(self, *, energy=False):
        self.now_s += CALL_S
        if self._lost_at is not None and self.now_s >= self._lost_at:
            raise DeviceLost("fell off the bus")
        t_s = self.now_s
        ticks = int(t_s / TICK_S)
        joules = None
        if energy and self._counter:
            self.counter_calls += 1
            self.now_s += COUNTER_CALL_S
            joules = 1000.0 + sum(self._power((i + 0.5) * TICK_S) * TICK_S for i in range(ticks))
        # The last digit tells one tick from the next, as noise does on a real card.
        power_w = self._power(ticks * TICK_S) * self._gain + 1e-6 * (ticks % 2)
        busy = self._power(t_s) > 100.0
        return Sample(
            t_s=t_s, power_w=power_w, energy_j=joules, sm_clock_hz=1.5e9 if busy else 0.3e9,
            memory_clock_hz=3e9, sm_utilisation=float(busy),
            throttle=(Throttle.POWER_CAP,) if busy else (Throttle.IDLE,),
        )  # fmt: skip

    def supported(self):
        return Supported()

    def settings(self):
        return Setting()

    def set(self, setting):
        raise AssertionError("a sampler sets nothing")

    reset = close = set

    def sleep(self, seconds):
        self.now_s += seconds


def sampled(device, until_s, **options):
    """A sampler that was driven at the sensor's pace until then."""
    sampler = Sampler(device, clock=lambda: device.now_s, sleep=device.sleep, **options)
    due_s = 0.03
    while due_s < until_s and sampler.poll() is not None:
        due_s += TICK_S
        device.now_s = max(device.now_s, due_s)
    return sampler


def wave(t):
    return 200.0 + 150.0 * (int(t) % 3)


def true_energy(power, begin_s, end_s, dt=1e-3):
    n = round((end_s - begin_s) / dt)
    return sum(power(begin_s + (i + 0.5) * dt) * dt for i in range(n))


def test_a_long_interval_is_measured_by_the_counter():
    sampler = sampled(Scripted(wave, gain=1.05), 60.0)
    energy_j = sampler.record.energy_between(7.0, 49.0)
    assert energy_j == pytest.approx(true_energy(wave, 7.0, 49.0), rel=0.01)
    assert sampler.record.energy_method == "counter"
    assert sampler.record.disagreement == pytest.approx(0.05, abs=0.015)


def test_a_short_interval_is_the_integral_of_power():
    sampler = sampled(Scripted(wave), 30.0)
    energy_j = sampler.record.energy_between(12.2, 14.7)
    assert energy_j == pytest.approx(true_energy(wave, 12.2, 14.7), rel=0.06)
    assert sampler.record.energy_method == "power integral"


def test_ends_on_ticks_make_a_shorter_interval_good_enough_for_the_counter():
    sampler = sampled(Scripted(wave), 20.0, counter_every_s=2.5)
    energy_j = sampler.record.energy_between(7.0, 13.0)
    assert energy_j == pytest.approx(true_energy(wave, 7.0, 13.0), rel=0.03)
    assert sampler.record.energy_method == "counter"


def test_the_counter_is_read_rarely_and_only_by_the_sampler():
    device = Scripted()
    sampled(device, 100.0)
    assert device.counter_calls <= 100.0 / 10.0 + 1


def test_a_device_without_a_counter():
    sampler = sampled(Scripted(wave, counter=False), 30.0)
    energy_j = sampler.record.energy_between(5.0, 25.0)
    assert energy_j == pytest.approx(true_energy(wave, 5.0, 25.0), rel=0.02)
    assert sampler.record.energy_method == "power integral"
    assert sampler.record.disagreement is None


def test_a_counter_that_stands_still_does_not_count():
    class Stuck(Scripted):
        def sample(self, *, energy=False):
            sample = super().sample(energy=False)
            joules = 5.0 if energy else None
            return Sample(t_s=sample.t_s, power_w=sample.power_w, energy_j=joules)

    record = sampled(Stuck(wave), 30.0).record
    assert record.energy_between(1.0, 29.0) is not None
    assert record.energy_method == "power integral"


@pytest.mark.parametrize(("begin_s", "end_s"), [(-5.0, 2.0), (5.0, 90.0), (200.0, 210.0)])
def test_energy_outside_of_what_was_sampled_is_unknown(begin_s, end_s):
    sampler = sampled(Scripted(), 20.0)
    assert sampler.record.energy_between(begin_s, end_s) is None
    assert sampler.record.mean_power_w(begin_s, end_s) is None
    assert sampler.record.energy_method == "none"


def test_a_hole_in_the_samples_is_not_bridged():
    device = Scripted(counter=False)
    sampler = sampled(device, 5.0)
    device.now_s += 4.0
    sampler.poll()
    assert sampler.record.energy_between(4.0, 8.5) is None
    assert sampler.record.energy_between(1.0, 4.0) == pytest.approx(900.0)


def test_a_lost_device_ends_the_sampling_and_keeps_what_was_seen():
    sampler = sampled(Scripted(lost_at=8.0), 20.0)
    assert sampler.why_ended == "fell off the bus"
    assert sampler.poll() is None
    assert sampler.record.mean_power_w(2.0, 6.0) == pytest.approx(300.0)


def test_the_sustained_clock_is_that_of_the_busy_device():
    sampler = sampled(Scripted(lambda t: 300.0 if int(t * 2) % 5 else 80.0), 20.0)
    assert sampler.record.sustained() == Setting(sm_clock_hz=1.5e9, memory_clock_hz=3e9)
    assert sampled(Scripted(lambda t: 80.0), 5.0).record.sustained() == Setting()


def test_its_own_cost_is_known():
    assert sampled(Scripted(), 5.0).cost_s > 0.0


# The thread.


class Noticed(Scripted):
    """Calls `at_each` at every reading of sensors that change a thousand times a second."""

    at_each = staticmethod(lambda: None)

    def info(self):
        return dataclasses.replace(super().info(), sensor_period_s=1e-3)

    def sample(self, *, energy=False):
        self.at_each()
        return super().sample(energy=energy)


def test_the_thread_samples_and_its_end_is_final():
    device = Noticed()
    enough = threading.Event()
    count = itertools.count()
    device.at_each = lambda: next(count) >= 20 and enough.set()
    sampler = Sampler(device)
    sampler.start()
    assert enough.wait(600.0)
    sampler.stop()
    seen = next(count)
    calls = device.counter_calls
    sampler.stop()
    sampler.start()
    assert next(count) == seen + 1
    assert device.counter_calls == calls >= 2
    assert not [t for t in threading.enumerate() if t.name == "kilter-sampler"]


@pytest.mark.parametrize(("readings", "late"), [(1, False), (2, True)])
def test_a_reading_is_due_at_each_tick_or_at_each_half_of_it(readings, late):
    """On a clock that is looked at just as a tick comes."""
    device, count, enough = Noticed(counter=False), itertools.count(), threading.Event()
    device.at_each = lambda: next(count) >= 20 and enough.set()
    clock = functools.partial(next, itertools.count(0.0, 0.99e-3))
    sampler = Sampler(
        device, counter_every_s=1e9, readings_per_tick=readings, clock=clock, sleep=device.sleep
    )
    sampler.start()
    assert enough.wait(600.0)
    sampler.stop()
    assert (sampler.late > 0) is late
    assert sampler.record.period_s == 1e-3


def test_a_sampler_that_is_held_up_says_that_it_was_late():
    device = Noticed()
    seen = threading.Event()
    clock = functools.partial(next, itertools.count(0.0, 0.5))
    sampler = Sampler(device, counter_every_s=1e9, clock=clock, sleep=device.sleep)
    device.at_each = lambda: sampler.late >= 3 and seen.set()
    sampler.start()
    assert seen.wait(600.0)
    sampler.stop()


def test_a_hung_device_ends_the_thread():
    class Hung(Scripted):
        def sample(self, *, energy=False):
            raise DeviceHung("no answer in 5 s")

    sampler = Sampler(Hung())
    sampler.start()
    sampler._thread.join(600.0)
    assert sampler.why_ended == "no answer in 5 s"
    sampler.stop()


# The integral.

POINTS = st.lists(
    st.tuples(st.integers(0, 50), st.floats(0.0, 700.0)), min_size=1, max_size=12, unique_by=lambda
    p: p[0],
).map(sorted)  # fmt: skip


@settings(max_examples=200)
@given(POINTS, st.integers(0, 50), st.integers(0, 50))
def test_the_integral_is_that_of_the_line_through_the_points(points, a, b):
    begin, end = min(a, b), max(a, b)
    found = integrate(points, begin, end, reach_s=100.0)

    def line(t):
        if t <= points[0][0]:
            return points[0][1]
        for (t0, v0), (t1, v1) in itertools.pairwise(points):
            if t <= t1:
                return v0 + (v1 - v0) * (t - t0) / (t1 - t0)
        return points[-1][1]

    # Exact on half steps, since the points lie on whole ones.
    expected = sum(line(begin + i + 0.5) for i in range(end - begin))
    assert found == pytest.approx(expected, abs=1e-6)


@given(POINTS, st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_the_integral_adds_up(points, a, b, c):
    a, b, c = sorted((a, b, c))
    whole = integrate(points, a, c, reach_s=100.0)
    parts = integrate(points, a, b, reach_s=100.0) + integrate(points, b, c, reach_s=100.0)
    assert whole == pytest.approx(parts, abs=1e-6)


@pytest.mark.parametrize("counter", [True, False])
def test_the_energy_of_the_whole_run_is_known(counter):
    device = Scripted(wave, counter=counter)
    sampler = sampled(device, 30.2, counter_every_s=1.0)
    assert sampler.record.total_j == pytest.approx(true_energy(wave, 0.0, device.now_s), rel=0.03)


def test_without_power_and_counter_the_energy_of_the_run_is_unknown():
    assert Sampler(Scripted()).record.total_j is None
