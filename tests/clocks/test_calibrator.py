"""The calibrator: switches are seen by their effect, held against the simulator's truth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.clocks.calibrator import KernelBench, SimulatedKernels, calibrate
from kilter.clocks.plan.switching import effect_s
from kilter.core.label import Label
from kilter.core.setting import Sample, Setting, Throttle
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.profile import load_profile
from kilter.observe.gpu_kernels import AHEAD, SpinKernels

KERNEL = Operation(name="matmul", kind=Kind.FORWARD, start_s=0.0, duration_s=1e-3, flops=5e11)
TRACE = IterationTrace(
    iteration_s=1e-3, operations=(KERNEL,), timeline="gpu", device="test", label=Label.MEASURED
)


def kernels(before: int, after: int, ratio: float, noise: float) -> list[tuple[float, float]]:
    chance = random.Random(0)
    found, t_s = [], 0.0
    for i in range(before + after):
        length_s = (1.0 if i < before else ratio) * 1e-3 * (1.0 + chance.gauss(0.0, noise))
        found.append((t_s, t_s + length_s))
        t_s += length_s
    return found


@given(
    before=st.integers(10, 60),
    after=st.integers(10, 60),
    ratio=st.floats(0.3, 3.0).filter(lambda r: abs(r - 1.0) > 0.15),
    noise=st.floats(0.0, 0.01),
)
def test_the_change_is_found_at_its_kernel(
    before: int, after: int, ratio: float, noise: float
) -> None:
    found = kernels(before, after, ratio, noise)
    commanded_s = found[5][0]
    assert effect_s(found, commanded_s) == pytest.approx(found[before][0] - commanded_s)


@given(noise=st.floats(0.0, 0.05), count=st.integers(0, 80))
def test_no_change_is_no_switch(noise: float, count: int) -> None:
    assert effect_s(kernels(count, 0, 1.0, noise), 0.0) is None


def test_the_simulators_switches_are_measured_as_they_are() -> None:
    gpu = SimGpu(load_profile("h200"), seed=3)
    truth: dict[Setting, list[float]] = {}

    def set_(setting: Setting) -> None:
        gpu.set(setting)
        truth.setdefault(setting, []).append(gpu._pending[-1][0] - gpu.now_s)

    bench = KernelBench(gpu.info, SimulatedKernels(gpu, TRACE), set_, gpu.sample)
    clocks = [hz * 1e6 for hz in (795.0, 345.0)]
    found = calibrate(bench, clocks, repetitions=20)
    assert found.label is Label.SIMULATED
    assert gpu.settings() == Setting()
    assert [(s.sm_clock_hz, s.down, s.n) for s in found.switches] == [
        (hz, down, 20) for hz in clocks for down in (True, False)
    ]
    kernel_s = 5e-3  # the longest kernel: a switch is seen at the next one
    for switch in found.switches:
        if switch.down:
            true = sorted(truth[Setting(sm_clock_hz=switch.sm_clock_hz)])
            assert abs(switch.p50_s - true[9]) <= kernel_s
            assert abs(switch.p95_s - true[18]) <= kernel_s
    for down in (True, False):
        latency = found.latency(down=down)
        assert latency is not None
        widest = max(s.p95_s for s in found.switches if s.down is down)
        assert latency.quantile(0.95) == pytest.approx(widest)


def test_clocks_that_do_not_differ_are_not_made_up() -> None:
    gpu = SimGpu(load_profile("h200"), seed=3)
    bench = KernelBench(gpu.info, SimulatedKernels(gpu, TRACE), gpu.set, gpu.sample)
    assert gpu.supported().sm_clocks_hz
    found = calibrate(bench, [gpu.supported().sm_clocks_hz[-1]], repetitions=3)
    assert found.switches == ()
    assert found.latency(down=True) is None


class Gpu:
    """A host and a GPU whose clocks drift apart. The GPU works through its stream, and a set takes
    a while to return and another while to act."""

    CALL_S, LAUNCH_S, DRIFT, LONGEST_S = 0.012, 5e-6, 1e-4, 0.04
    CONSTANT_S = 3.5e-6
    """Of every kernel at every clock, as an H200 has it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._launched: list[tuple[float, int]] = []
        self._ends = [self.now_s]
        self._changes = [(0.0, 1.98e9)]
        self._random = random.Random(0)
        self.latencies: dict[bool, list[float]] = {True: [], False: []}

    def spin(self, cycles: int) -> None:
        self.now_s += self.LAUNCH_S
        self._launched.append((self.now_s, cycles))

    def mark(self) -> GpuMark:
        return GpuMark(self, len(self._launched))

    def end_s(self, count: int) -> float:
        """Of the first kernels, so many; later changes of the clock do not matter to them."""
        while len(self._ends) <= count:
            launched_s, cycles = self._launched[len(self._ends) - 1]
            begin_s = max(launched_s, self._ends[-1])
            hz = next(hz for at_s, hz in reversed(self._changes) if at_s <= begin_s)
            self._ends.append(begin_s + cycles / hz + self.CONSTANT_S)
        return self._ends[count]

    def set(self, setting: Setting) -> None:
        down = setting.sm_clock_hz is not None
        latency_s = self._random.uniform(0.005, self.LONGEST_S)
        self.latencies[down].append(latency_s)
        self._changes.append((self.now_s + latency_s, setting.sm_clock_hz or 1.98e9))
        self.now_s += self.CALL_S


class GpuMark:
    def __init__(self, gpu: Gpu, count: int) -> None:
        self._gpu, self._count = gpu, count

    @property
    def _at_s(self) -> float:
        return self._gpu.end_s(self._count)

    def synchronize(self) -> None:
        self._gpu.now_s = max(self._gpu.now_s, self._at_s)

    def elapsed_time(self, later: GpuMark) -> float:
        """In ms, as an event's of CUDA."""
        return round((later._at_s - self._at_s) * (1.0 + Gpu.DRIFT) * 1e3, 4)


def test_a_gpus_switches_are_measured_while_the_host_is_in_the_drivers_call() -> None:
    gpu = Gpu()
    info = SimGpu(load_profile("h200")).info()
    kernels = SpinKernels(gpu.spin, gpu.mark, lambda: gpu.now_s)
    capped = Sample(t_s=0.0, throttle=(Throttle.POWER_CAP,))
    bench = KernelBench(lambda: info, kernels, gpu.set, lambda: capped)
    found = calibrate(bench, [0.795e9], repetitions=20)
    # What is launched ahead outlasts the call, so a switch inside it is seen where it happens.
    assert AHEAD * 1e5 / 1.98e9 > Gpu.CALL_S
    for switch in found.switches:
        true = sorted(gpu.latencies[switch.down])
        kernel_s = 1e5 / (1.98e9 if switch.down else 0.795e9)
        assert switch.n == 20
        assert abs(switch.p50_s - true[9]) <= 2 * kernel_s
        assert abs(switch.p95_s - true[18]) <= 2 * kernel_s
        assert switch.call is not None
        assert switch.call.p50_s == pytest.approx(Gpu.CALL_S)
        assert switch.reasons == ("power_cap",)
        own = found.latency(down=switch.down, sm_clock_hz=0.795e9)
        assert own is not None
        assert own.median_s == switch.p50_s
        assert own.quantile(0.95) == pytest.approx(switch.p95_s)
