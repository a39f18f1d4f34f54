"""The calibrator: switches are seen by their effect, held against the simulator's truth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.clocks.calibrator import SimulatedBench, calibrate
from kilter.clocks.plan.switching import effect_s
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.profile import load_profile

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
        truth.setdefault(setting, []).append(gpu._pending[-1].acts_at_s - gpu.now_s)

    bench = SimulatedBench(gpu, TRACE, set_)
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
    bench = SimulatedBench(gpu, TRACE, gpu.set)
    assert gpu.supported().sm_clocks_hz
    found = calibrate(bench, [gpu.supported().sm_clocks_hz[-1]], repetitions=3)
    assert found.switches == ()
    assert found.latency(down=True) is None
