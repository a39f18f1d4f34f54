"""Power: never negative, never less for a higher clock; limits are kept and never speed up."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.model.power import Power, Thermal, capped_clock

clocks = st.floats(1e8, 3e9)


@st.composite
def powers(draw):
    watts = st.floats(0, 200)
    per_hz = st.floats(0, 1e-7)
    return Power(
        idle_w=draw(st.floats(1, 100)),
        static_w=draw(st.floats(1, 100)),
        leakage_w=draw(watts),
        leakage_per_k=draw(st.floats(0, 0.02)),
        clock_w_per_hz=draw(per_hz),
        busy_w_per_hz=draw(per_hz),
        joule_per_flop=draw(st.floats(1e-14, 1e-10)),
        memory_w_per_hz=draw(per_hz),
        joule_per_byte=draw(st.floats(0, 1e-10)),
        knee_hz=draw(clocks),
        volts_per_hz=draw(st.floats(0, 2e-9)),
    )


@settings(deadline=None)
@given(powers(), clocks, clocks, st.floats(1, 4), st.floats(0, 110))
def test_waiting_is_positive_and_never_less_for_a_higher_clock(power, sm, memory, up, celsius):
    now = power.waiting_w(sm, memory, celsius)
    assert now > 0
    assert power.waiting_w(sm * up, memory, celsius) >= now * (1 - 1e-12)
    assert power.waiting_w(sm, memory * up, celsius) >= now * (1 - 1e-12)


@settings(deadline=None)
@given(powers(), st.floats(0, 1e15), st.floats(0, 1e13), st.floats(0, 10), clocks, st.floats(1, 4))
def test_work_costs_energy_and_never_less_at_a_higher_clock(power, flops, moved, busy_s, sm, up):
    now = power.work_j(flops, moved, busy_s, sm)
    assert now >= 0
    # The same cycles at a higher clock: busy time shrinks as the clock grows.
    assert power.work_j(flops, moved, busy_s / up, sm * up) >= now * (1 - 1e-9)


@settings(deadline=None)
@given(powers(), clocks, clocks)
def test_voltage_is_at_its_floor_below_the_knee_and_never_falls(power, a, b):
    assert power.voltage(power.knee_hz * 0.5) == 1.0
    low, high = sorted((a, b))
    assert 1.0 <= power.voltage(low) <= power.voltage(high)


def test_below_the_knee_a_lower_clock_saves_no_energy_per_operation():
    power = Power(
        idle_w=10,
        static_w=20,
        leakage_w=0,
        leakage_per_k=0,
        clock_w_per_hz=0,
        busy_w_per_hz=0,
        joule_per_flop=1e-11,
        memory_w_per_hz=0,
        joule_per_byte=0,
        knee_hz=1e9,
        volts_per_hz=5e-10,
    )

    def joules(sm_hz):
        seconds = 1e9 / sm_hz
        return seconds * power.waiting_w(sm_hz, 1e9) + power.work_j(1e12, 0, seconds, sm_hz)

    assert joules(1e9) < joules(5e8), "static power is paid for longer"
    assert joules(1e9) < joules(2e9), "voltage squared"


@settings(deadline=None)
@given(st.floats(0.1, 3), st.floats(20, 800), clocks, st.floats(1, 5))
def test_a_limit_is_kept_or_the_clock_is_the_lowest(exponent, limit_w, lowest, span):
    highest = lowest * span

    def power_w(sm_hz):
        return 50 + 1e-7 * sm_hz**exponent

    clock = capped_clock(power_w, lowest, highest, limit_w)
    assert lowest <= clock <= highest
    assert power_w(clock) <= limit_w or clock == lowest
    if clock < highest:
        assert power_w(min(highest, clock * 1.001)) >= limit_w * 0.99, "and not kept needlessly"


@settings(deadline=None)
@given(st.floats(20, 800), st.floats(1, 3))
def test_a_higher_limit_never_lowers_the_clock(limit_w, up):
    def power_w(sm_hz):
        return 30 + 2e-16 * sm_hz**2

    assert capped_clock(power_w, 1e8, 2e9, limit_w) <= capped_clock(power_w, 1e8, 2e9, limit_w * up)


def test_without_a_limit_the_clock_is_the_highest():
    assert capped_clock(lambda hz: 1e-6 * hz, 1e8, 2e9, math.inf) == 2e9


def test_limits_of_an_array_are_solved_one_by_one():
    limits = np.array([10.0, 100.0, 1e6])
    clock = capped_clock(lambda hz: 1e-7 * hz, 1e8, 2e9, limits)
    assert clock == pytest.approx([1e8, 1e9, 2e9])


def test_warming_is_exact_and_ends_at_the_sustainable_power():
    thermal = Thermal(ambient_c=30, kelvin_per_watt=0.2, time_constant_s=10, limit_c=90)
    assert thermal.sustainable_w == pytest.approx(300)
    assert thermal.after(30, 300, 1e6) == pytest.approx(90)
    half = thermal.after(thermal.after(30, 200, 3), 200, 4)
    assert half == pytest.approx(thermal.after(30, 200, 7)), "steps add up"
    assert thermal.after(50, 100, 0.0) == 50
