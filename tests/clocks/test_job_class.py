"""The class of a job by its readings, and the first action of each class."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.clocks.plan.governor import BlockOutcome, Governor, Phase
from kilter.clocks.plan.job import FLOOR, STEP, space
from kilter.clocks.plan.job_class import (
    GPU_WAITS,
    Bound,
    JobReadings,
    first_settings,
    job_by_readings,
)
from kilter.core.plan import Goal
from kilter.core.setting import Sample, Setting, Supported, Throttle
from kilter.core.units import MHZ

GHZ = 1000 * MHZ
CARD = Supported(
    sm_clocks_hz=tuple(mhz * MHZ for mhz in range(345, 1981, 15)),
    memory_clocks_hz=(2.2 * GHZ, 3.2 * GHZ),
    power_limits_w=(400.0, 700.0),
)
SUSTAINED = Setting(sm_clock_hz=1.8 * GHZ, memory_clock_hz=3.2 * GHZ)


def readings(count=10, busy=1.0, throttle=()):
    return [Sample(t_s=0.1 * i, sm_utilisation=busy, throttle=throttle) for i in range(count)]


@pytest.mark.parametrize(
    ("samples", "name"),
    [
        (readings(), Bound.UNKNOWN),
        (readings(busy=0.4), Bound.IDLE),
        (readings(busy=0.75), Bound.UNKNOWN),
        (readings(throttle=(Throttle.POWER_CAP,)), Bound.THROTTLED),
        (readings(busy=0.4, throttle=(Throttle.THERMAL,)), Bound.THROTTLED),
        (readings(throttle=(Throttle.CLOCK_SETTING,)), Bound.UNKNOWN),
        (readings(count=3, busy=0.1), Bound.UNKNOWN),
        (readings(busy=None, throttle=None), Bound.UNKNOWN),
        ([], Bound.UNKNOWN),
    ],
)
def test_readings_tell_the_class(samples, name):
    assert job_by_readings(samples).name is name


def only_sm_clock(settings):
    """Hz of each, after a check that it is the only knob that is changed."""
    assert all(s == Setting(sm_clock_hz=s.sm_clock_hz) for s in settings)
    return [s.sm_clock_hz for s in settings]


@pytest.mark.parametrize("name", [Bound.IDLE, Bound.INPUT, Bound.COMMUNICATION])
def test_the_less_a_gpu_works_the_lower_its_first_clock(name):
    offered = space(Setting(), SUSTAINED, CARD)

    def first(busy):
        return only_sm_clock(first_settings(JobReadings(name=name, busy=busy), offered))[0]

    assert first(0.1) < first(0.5) < first(0.7) < SUSTAINED.sm_clock_hz
    assert first(0.1) == min(s.sm_clock_hz for s in offered.candidates if s.sm_clock_hz)


@pytest.mark.parametrize("name", sorted(set(Bound) - set(GPU_WAITS), key=str))
def test_other_classes_begin_with_what_promises_most(name):
    assert first_settings(JobReadings(name=name, busy=0.2), space(Setting(), SUSTAINED, CARD)) == ()


SETTINGS = st.builds(
    Setting,
    sm_clock_hz=st.none() | st.sampled_from(CARD.sm_clocks_hz),
    memory_clock_hz=st.none() | st.sampled_from(CARD.memory_clocks_hz),
    power_limit_w=st.none() | st.sampled_from(CARD.power_limits_w),
)
JOBS = st.builds(
    JobReadings,
    name=st.sampled_from(Bound),
    busy=st.floats(0.0, 1.0),
)


@given(SETTINGS, JOBS, st.sampled_from([CARD, Supported(), Supported(power_limits_w=(1.0, 2.0))]))
def test_a_first_setting_is_supported_below_what_was_found_and_always_the_same(found, job, card):
    offered = space(found, SUSTAINED, card)
    first = first_settings(job, offered)
    assert first == first_settings(job, offered)
    assert set(first) <= set(offered.candidates)
    top_hz = found.sm_clock_hz or SUSTAINED.sm_clock_hz
    for setting in first:
        assert setting == found.with_(sm_clock_hz=setting.sm_clock_hz)
        assert setting.sm_clock_hz in card.sm_clocks_hz
        assert FLOOR * top_hz <= setting.sm_clock_hz < top_hz
        # the busy part alone can become longer, by no more than in one step of a busy GPU
        assert job.busy * (top_hz / setting.sm_clock_hz - 1.0) <= 1.0 / STEP - 1.0 + 1e-6


def play(governor, times, blocks=400):
    """The settings that a search probes, in order; `times` is seconds by setting."""
    search, probed = governor.search(), []
    try:
        order = next(search)
        for _ in range(blocks):
            if order.phase is Phase.PROBE and not order.baseline:
                probed.append(order.setting)
            time_s = times(order.setting)
            order = search.send(BlockOutcome(iteration_s=time_s, energy_j=100.0 * time_s))
    except StopIteration:
        pass
    return list(dict.fromkeys(probed))


def test_the_first_action_is_probed_first_and_does_not_decide():
    offered = space(Setting(), SUSTAINED, CARD)
    first = first_settings(JobReadings(name=Bound.IDLE, busy=0.1), offered)
    governor = Governor(offered, Goal(max_slowdown=0.02), first=first)
    # the class is wrong: the GPU is busy, and follows its clock
    probed = play(governor, lambda s: 1.8 * GHZ / (s.sm_clock_hz or 1.8 * GHZ))
    assert probed[0] == first[0]
    assert governor.choice.setting == Setting()


def test_a_job_without_time_for_a_test_is_not_probed():
    offered = space(Setting(), SUSTAINED, CARD)
    first = first_settings(JobReadings(name=Bound.IDLE, busy=0.1), offered)
    governor = Governor(offered, Goal(max_slowdown=0.02), blocks=8, first=first)
    assert play(governor, lambda s: 1.0) == []
