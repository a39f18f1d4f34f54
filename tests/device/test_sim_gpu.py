"""The simulated GPU: what is asked for, what is in force and what sensors say are three things."""

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device.faulty_gpu import Fault, FaultyGpu, Trouble

from kilter.core.errors import DeviceLost, NotPermitted, NotSupported
from kilter.core.label import Label
from kilter.core.setting import Setting, Throttle
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.core.units import MHZ
from kilter.device.sim.cards import names
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.noise import QUIET, Noise
from kilter.device.sim.profile import load_profile

V100, H200 = load_profile("v100"), load_profile("h200")


def operation(kind=Kind.FORWARD, *, seconds=0.01, flops=None, moved=None, kernels=1):
    return Operation(
        name="op",
        kind=kind,
        start_s=0.0,
        duration_s=seconds,
        flops=flops,
        bytes_moved=moved,
        kernels=kernels,
    )


def trace(*operations, timeline="host"):
    return IterationTrace(
        iteration_s=sum(op.duration_s for op in operations),
        operations=operations,
        timeline=timeline,
        device="test",
        label=Label.MEASURED,
    )


MATMUL = trace(operation(flops=2 * 8192**3, moved=3 * 2 * 8192**2))
COPY = trace(operation(moved=8e9))
MIXED = trace(
    operation(flops=4e11, moved=2e9),
    operation(Kind.BACKWARD, flops=8e11, moved=6e9),
    operation(Kind.DATA_WAIT, seconds=0.005),
)


def quiet(profile=V100, **options):
    return FaultyGpu(profile, noise=QUIET, **options)


def settled(gpu, setting, work):
    """Ask for a setting and run until it acts."""
    gpu.set(setting)
    while gpu.in_force != setting:
        gpu.run(work)
    return gpu


def measure(gpu, work, iterations=50):
    """(mean time, mean energy) of an iteration, the true ones."""
    begin_s, begin_j = gpu.now_s, gpu.energy_j
    for _ in range(iterations):
        gpu.run(work)
    return (gpu.now_s - begin_s) / iterations, (gpu.energy_j - begin_j) / iterations


# Work -----------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    def run(seed):
        gpu = SimGpu(V100, seed=seed)
        work = gpu.work(MIXED)
        gpu.set(Setting(sm_clock_hz=1200 * MHZ))
        return [gpu.run(work) for _ in range(300)], gpu.sample(energy=True)

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_an_iteration_moves_the_clock_by_its_time():
    gpu = SimGpu(V100)
    work = gpu.work(MIXED)
    times = [gpu.run(work) for _ in range(20)]
    assert gpu.now_s == pytest.approx(sum(times))
    assert gpu.energy_j > 0


@pytest.mark.parametrize("name", names())
def test_every_lower_clock_is_slower_and_draws_less(name):
    profile = load_profile(name)
    gpu = quiet(profile)
    work = gpu.work(MIXED)
    last_s, last_w = math.inf, 0.0
    for sm_hz in gpu.supported().sm_clocks_hz[::12]:
        settled(gpu, Setting(sm_clock_hz=sm_hz), work)
        time_s, energy_j = measure(gpu, work)
        assert time_s < last_s
        assert energy_j / time_s > last_w * 0.999
        last_s, last_w = time_s, energy_j / time_s


@settings(max_examples=25, deadline=None)
@given(st.floats(1e11, 1e13), st.floats(1e7, 1e11), st.sampled_from(names()), st.integers(0, 5))
def test_a_lower_limit_never_speeds_up_and_is_kept(flops, moved, name, step):
    profile = load_profile(name)
    gpu = quiet(profile)
    work = gpu.work(trace(operation(flops=flops, moved=moved)))
    limit_w = gpu.supported().power_limits_w[step]
    free_s, _ = measure(gpu, work)
    settled(gpu, Setting(power_limit_w=limit_w), work)
    enough = math.ceil(3 * profile.sensor.period_s / free_s)
    time_s, energy_j = measure(gpu, work, enough)
    assert time_s >= free_s * (1 - 1e-6)
    assert energy_j > 0
    at_floor = gpu.sample().sm_clock_hz == profile.knobs.sm_lowest_hz
    assert energy_j / time_s <= limit_w * (1 + 1e-6) or at_floor


def test_a_bf16_matmul_on_an_h200_falls_to_1500_mhz_by_itself():
    gpu = quiet(H200)
    work = gpu.work(MATMUL)
    for _ in range(20_000):
        time_s = gpu.run(work)
    sample = gpu.sample()
    assert sample.sm_clock_hz == pytest.approx(1500 * MHZ, rel=0.02)
    assert time_s == pytest.approx(1.6455e-3, rel=0.02)
    assert sample.throttle == (Throttle.POWER_CAP,)


def test_a_lock_below_the_capped_clock_is_obeyed_exactly():
    gpu = quiet(H200)
    work = gpu.work(MATMUL)
    settled(gpu, Setting(sm_clock_hz=1200 * MHZ), work)
    measure(gpu, work, 200)
    assert gpu.sample().sm_clock_hz == 1200 * MHZ
    assert gpu.sample().throttle == (Throttle.CLOCK_SETTING,)


def test_waiting_keeps_its_time_at_any_clock_and_draws_less_at_a_low_one():
    gpu = quiet(H200)
    work = gpu.work(trace(operation(Kind.DATA_WAIT, seconds=0.06)))
    high_s, high_j = measure(gpu, work)
    settled(gpu, Setting(sm_clock_hz=345 * MHZ), work)
    low_s, low_j = measure(gpu, work)
    assert high_s == pytest.approx(0.06)
    assert low_s == pytest.approx(0.06)
    assert high_j / high_s == pytest.approx(120, rel=0.08), "measured: 120 W awake and waiting"
    assert low_j < high_j


def test_small_kernels_are_bound_by_their_launches():
    gpu = quiet(H200)
    work = gpu.work(trace(operation(flops=200.0, moved=9600.0, kernels=200)))
    assert gpu.run(work) == pytest.approx(1.306e-3, rel=0.01)
    settled(gpu, Setting(sm_clock_hz=990 * MHZ), work)
    assert gpu.run(work) == pytest.approx(1.306e-3, rel=0.01)


def test_a_trace_from_a_gpu_takes_its_measured_time_at_default_clocks():
    gpu = quiet(H200)
    known = operation(seconds=0.004, flops=1e9, moved=1e10)
    unknown = operation(seconds=0.003)
    pause = operation(Kind.GAP, seconds=0.002)
    work = gpu.work(trace(known, unknown, pause, timeline="gpu"))
    assert gpu.run(work) == pytest.approx(0.009)
    settled(gpu, Setting(sm_clock_hz=990 * MHZ), work)
    slow_s = gpu.run(gpu.work(trace(unknown, timeline="gpu")))
    assert slow_s == pytest.approx(0.006), "unknown work follows the clock: no saving by ignorance"


def test_a_lower_memory_clock_slows_copies_and_leaves_arithmetic():
    gpu = quiet(H200)
    copy, arithmetic = gpu.work(COPY), gpu.work(trace(operation(flops=1e11, moved=1e6)))
    before = gpu.run(copy), gpu.run(arithmetic)
    settled(gpu, Setting(memory_clock_hz=2201 * MHZ), copy)
    assert gpu.run(copy) > 1.3 * before[0]
    assert gpu.run(arithmetic) == pytest.approx(before[1], rel=0.01)


def test_work_without_any_operation_is_refused():
    with pytest.raises(ValueError, match="without any work"):
        quiet().work(trace())


# Switching ------------------------------------------------------------------------------------


def test_the_old_clock_rules_until_the_switch_has_acted():
    gpu = quiet()
    work = gpu.work(trace(operation(flops=1e9, moved=1e6)))
    fast_s = gpu.run(work)
    asked_at_s = gpu.now_s
    gpu.set(Setting(sm_clock_hz=757.5 * MHZ))
    assert gpu.settings() == Setting(sm_clock_hz=757.5 * MHZ)
    assert gpu.in_force == Setting()
    assert gpu.run(work) == pytest.approx(fast_s)
    while gpu.in_force == Setting():
        gpu.run(work)
    assert gpu.now_s - asked_at_s < 3 * V100.switch.p95_s
    assert gpu.run(work) > 1.5 * fast_s


def test_an_iteration_across_a_switch_is_part_fast_part_slow():
    gpu = quiet()
    work = gpu.work(trace(operation(flops=2.8e13)))
    fast_s = gpu.run(work)
    gpu.set(Setting(sm_clock_hz=757.5 * MHZ))
    across_s = gpu.run(work)
    slow_s = gpu.run(work)
    assert fast_s < across_s < slow_s


def test_switching_delays_vary_around_the_profile_and_belong_to_the_target():
    gpu = quiet()

    def delay_s(setting):
        begin = gpu.now_s
        gpu.set(setting)
        while gpu.in_force != setting:
            gpu.idle(1e-4)
        return gpu.now_s - begin

    targets = [Setting(sm_clock_hz=hz) for hz in gpu.supported().sm_clocks_hz]
    delays = [delay_s(target) for target in targets]
    assert statistics.median(delays) == pytest.approx(V100.switch.median_s, rel=0.3)
    assert sum(delay > V100.switch.p95_s for delay in delays) < 0.15 * len(delays)


# Sensors --------------------------------------------------------------------------------------


def test_sensors_change_ten_times_a_second_on_an_h200():
    gpu = SimGpu(H200)
    work = gpu.work(trace(operation(Kind.GAP, seconds=0.001), operation(moved=4e9)))
    seen = []
    while gpu.now_s < 10:
        gpu.run(work)
        seen.append(gpu.sample(energy=True))
    assert len({sample.energy_j for sample in seen}) == pytest.approx(100, abs=2)
    assert len({sample.power_w for sample in seen}) == pytest.approx(100, abs=2)


def test_a_board_has_its_own_gain_and_keeps_it():
    def gain(seed):
        gpu = quiet(H200, seed=seed)
        work = gpu.work(COPY)
        time_s, energy_j = measure(gpu, work, 1000)
        return gpu.sample().power_w / (energy_j / time_s)

    gains = [gain(seed) for seed in range(12)]
    assert all(0.94 < value < 1.06 for value in gains)
    assert max(gains) - min(gains) > 0.03
    assert gain(3) == gain(3)


def test_the_counter_agrees_with_the_integral_of_power():
    gpu = quiet(H200, seed=4)
    work = gpu.work(MIXED)
    measure(gpu, work, 100)
    begin, integral_j = gpu.sample(energy=True), 0.0
    for _ in range(3000):
        seconds = gpu.run(work)
        integral_j += gpu.sample().power_w * seconds
    counted_j = gpu.sample(energy=True).energy_j - begin.energy_j
    assert counted_j == pytest.approx(integral_j, rel=0.01)


def test_the_power_window_looks_back():
    late = replace(H200, sensor=replace(H200.sensor, window_s=1.0))
    gpu = quiet(late)
    work = gpu.work(COPY)
    gpu.idle(60)
    asleep_w = gpu.sample().power_w
    while gpu.now_s < 60.5:
        gpu.run(work)
    half_way_w = gpu.sample().power_w
    while gpu.now_s < 63:
        gpu.run(work)
    full_w = gpu.sample().power_w
    assert asleep_w < half_way_w < full_w
    assert half_way_w == pytest.approx((asleep_w + full_w) / 2, rel=0.25)


def test_utilisation_is_the_share_of_time_with_a_kernel():
    gpu = quiet(H200)
    work = gpu.work(trace(operation(Kind.DATA_WAIT, seconds=0.002), operation(moved=8.59e9)))
    measure(gpu, work, 1000)
    assert gpu.sample().sm_utilisation == pytest.approx(0.5, abs=0.03)


def test_a_device_without_work_falls_asleep_and_wakes_for_work():
    gpu = quiet(H200)
    work = gpu.work(COPY)
    gpu.run(work)
    gpu.idle(2.0)
    awake_w = gpu.sample().power_w
    gpu.idle(10.0)
    asleep = gpu.sample()
    assert asleep.power_w < awake_w
    assert asleep.sm_clock_hz == 345 * MHZ
    assert asleep.throttle == (Throttle.IDLE,)
    measure(gpu, work, 200)
    assert gpu.sample().sm_clock_hz == 1980 * MHZ


def test_energy_is_not_read_unless_asked_for():
    gpu = quiet()
    assert gpu.sample().energy_j is None
    assert gpu.sample(energy=True).energy_j is not None


# Noise ----------------------------------------------------------------------------------------


def test_noise_has_the_size_that_was_asked_for():
    work_of = trace(operation(flops=1e10))
    gpu = SimGpu(V100, noise=Noise(white=0.01))
    work = gpu.work(work_of)
    times = [gpu.run(work) for _ in range(4000)]
    true_s = quiet().run(work)
    assert statistics.mean(times) == pytest.approx(true_s, rel=0.001)
    assert statistics.stdev(times) / true_s == pytest.approx(0.01, rel=0.1)


def test_drift_stays_from_one_iteration_to_the_next_and_white_noise_does_not():
    def correlation(noise):
        gpu = SimGpu(V100, noise=noise)
        work = gpu.work(trace(operation(flops=1e10)))
        times = [gpu.run(work) for _ in range(4000)]
        return statistics.correlation(times[1:], times[:-1])

    assert correlation(Noise(drift=0.01)) == pytest.approx(0.9, abs=0.05)
    assert correlation(Noise(white=0.01)) == pytest.approx(0.0, abs=0.05)


def test_outliers_only_slow_down():
    gpu = SimGpu(V100, noise=Noise(outlier_probability=0.02, outlier_mean=0.1))
    work = gpu.work(trace(operation(flops=1e10)))
    times = [gpu.run(work) for _ in range(5000)]
    true_s = quiet().run(work)
    slow = [t for t in times if t > true_s * 1.0001]
    assert min(times) == pytest.approx(true_s)
    assert len(slow) / len(times) == pytest.approx(0.02, abs=0.006)
    assert statistics.mean(slow) / true_s - 1 == pytest.approx(0.1, rel=0.3)


# Troubles -------------------------------------------------------------------------------------

LOW = Setting(sm_clock_hz=757.5 * MHZ)


def test_a_refused_set_changes_nothing_and_later_ones_work():
    gpu = quiet(faults=[Fault(trouble=Trouble.SET_REFUSED, end_s=1.0)])
    with pytest.raises(NotPermitted, match="scripted"):
        gpu.set(LOW)
    assert gpu.settings() == Setting()
    gpu.idle(1.0)
    gpu.set(LOW)
    assert gpu.settings() == LOW


def test_a_refused_restore_refuses_only_the_way_back():
    gpu = quiet(faults=[Fault(trouble=Trouble.SET_REFUSED, setting=Setting())])
    gpu.set(LOW)
    with pytest.raises(NotPermitted):
        gpu.reset()
    assert gpu.settings() == LOW


def test_an_ignored_set_is_reported_but_not_obeyed():
    gpu = quiet(faults=[Fault(trouble=Trouble.SET_IGNORED)])
    work = gpu.work(MIXED)
    before_s = gpu.run(work)
    gpu.set(LOW)
    measure(gpu, work)
    assert gpu.settings() == LOW
    assert gpu.run(work) == pytest.approx(before_s, rel=1e-3)
    assert gpu.sample().sm_clock_hz == 1530 * MHZ


def test_a_clipped_set_is_obeyed_down_to_the_clip():
    gpu = quiet(faults=[Fault(trouble=Trouble.SET_CLIPPED, value=1200 * MHZ)])
    work = gpu.work(MIXED)
    settled(gpu, LOW, work)
    measure(gpu, work)
    assert gpu.sample().sm_clock_hz == 1200 * MHZ


def test_a_lost_device_answers_nothing_more_even_inside_an_iteration():
    gpu = quiet(faults=[Fault(trouble=Trouble.LOST, begin_s=0.05)])
    work = gpu.work(trace(operation(flops=2.8e13)))
    with pytest.raises(DeviceLost):
        gpu.run(work)
    assert gpu.now_s == pytest.approx(0.05)
    for call in (gpu.info, gpu.sample, gpu.supported, gpu.settings, gpu.reset):
        with pytest.raises(DeviceLost):
            call()


def test_a_stuck_counter_stands_still_and_moves_on_afterwards():
    gpu = quiet(H200, faults=[Fault(trouble=Trouble.COUNTER_STUCK, begin_s=2.0, end_s=20.0)])

    def counter(at_s):
        gpu.idle(at_s - gpu.now_s)
        return gpu.sample(energy=True).energy_j

    readings = [counter(at_s) for at_s in (1.0, 2.5, 10.0, 19.0, 21.0)]
    assert readings[0] == readings[1] == readings[2] == readings[3] < readings[4]


def test_a_counter_of_the_whole_module_runs_ahead_of_the_power():
    module = Fault(trouble=Trouble.COUNTER_OF_MODULE, value=150.0)
    alone, both = quiet(H200, seed=5), quiet(H200, seed=5, faults=[module])
    for gpu in (alone, both):
        gpu.idle(100.0)
    assert alone.sample().power_w == both.sample().power_w
    extra_j = both.sample(energy=True).energy_j - alone.sample(energy=True).energy_j
    assert extra_j == pytest.approx(150 * 100, rel=0.01)


def test_late_sensors_show_the_past():
    gpu = quiet(H200, faults=[Fault(trouble=Trouble.SENSORS_LATE, begin_s=5.0, value=1.0)])
    work = gpu.work(COPY)
    gpu.idle(6.0)
    while gpu.now_s < 6.8:
        gpu.run(work)
    assert gpu.sample().sm_clock_hz == 345 * MHZ
    while gpu.now_s < 8:
        gpu.run(work)
    assert gpu.sample().sm_clock_hz == 1980 * MHZ


def test_another_tool_locks_the_clock_and_only_observation_shows_it():
    other = Fault(trouble=Trouble.OTHER_TOOL, begin_s=1.0, setting=LOW)
    gpu = quiet(faults=[other])
    work = gpu.work(MIXED)
    gpu.set(Setting(power_limit_w=200.0))
    while gpu.now_s < 2:
        gpu.run(work)
    assert gpu.settings() == Setting(power_limit_w=200.0)
    assert gpu.in_force == Setting(sm_clock_hz=757.5 * MHZ, power_limit_w=200.0)
    assert gpu.sample().sm_clock_hz == 757.5 * MHZ


def test_a_cap_lowered_by_the_admin_shows_in_the_settings_and_throttles():
    cap = Fault(trouble=Trouble.OTHER_TOOL, begin_s=1.0, setting=Setting(power_limit_w=300.0))
    gpu = quiet(H200, faults=[cap])
    work = gpu.work(MATMUL)
    while gpu.now_s < 2:
        gpu.run(work)
    assert gpu.settings() == Setting(power_limit_w=300.0)
    assert Throttle.POWER_CAP in gpu.sample().throttle
    assert gpu.sample().power_w < 315


def test_a_hot_room_throttles_at_the_thermal_limit_and_lets_go():
    hot = Fault(trouble=Trouble.HOT_ROOM, begin_s=10.0, end_s=400.0, value=70.0)
    gpu = quiet(faults=[hot])
    work = gpu.work(MATMUL)
    before_s = gpu.run(work)
    hottest, throttled_s = 0.0, 0.0
    while gpu.now_s < 400:
        seconds = gpu.run(work)
        hottest = max(hottest, gpu.sample().temperature_c)
        if gpu.sample().throttle == (Throttle.THERMAL,):
            throttled_s = max(throttled_s, seconds)
    assert hottest < V100.thermal.limit_c + 2
    assert throttled_s > before_s * 1.05
    while gpu.now_s < 800:
        after_s = gpu.run(work)
    assert after_s == pytest.approx(before_s)


def test_a_neighbour_makes_iterations_longer():
    gpu = quiet(faults=[Fault(trouble=Trouble.NEIGHBOUR, begin_s=1.0, end_s=2.0, value=0.2)])
    work = gpu.work(MIXED)
    alone_s = gpu.run(work)
    gpu.idle(1.2 - gpu.now_s)
    assert gpu.run(work) == pytest.approx(1.2 * alone_s)
    gpu.idle(1.0)
    assert gpu.run(work) == pytest.approx(alone_s)


# Settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        Setting(sm_clock_hz=1 * MHZ),
        Setting(sm_clock_hz=1530 * MHZ + 1),
        Setting(memory_clock_hz=877 * MHZ),
        Setting(power_limit_w=301.0),
    ],
)
def test_what_the_card_has_not_is_refused(setting):
    gpu = quiet()
    with pytest.raises(NotSupported):
        gpu.set(setting)
    assert gpu.settings() == Setting()
