"""The whole loop on a simulated card: it saves, keeps its contract, and restores."""

import statistics
from collections import Counter

import pytest

from kilter.clocks.rehearsal import Rehearsal, compare
from kilter.core.events import Block, Decided, Sampled
from kilter.core.label import Label
from kilter.core.plan import Goal
from kilter.core.setting import Setting
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.device.sim.cards import names
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.noise import Noise
from kilter.device.sim.profile import load_profile


def trace(flops, bytes_moved, wait_s=0.0, layers=20):
    operations, now = [], 0.0
    for i in range(layers):
        operations.append(
            Operation(
                name=f"layer{i}",
                kind=Kind.FORWARD,
                start_s=now,
                duration_s=1e-3,
                flops=flops / layers,
                bytes_moved=bytes_moved / layers,
                kernels=3,
            )
        )
        now += 1e-3
    if wait_s:
        operations.append(
            Operation(name="loader", kind=Kind.DATA_WAIT, start_s=now, duration_s=wait_s)
        )
        now += wait_s
    return IterationTrace(
        iteration_s=now,
        operations=tuple(operations),
        timeline="gpu",
        device="test",
        label=Label.MEASURED,
    )


MEMORY_BOUND = trace(flops=2e10, bytes_moved=3e10)
COMPUTE_BOUND = trace(flops=4e11, bytes_moved=5e8)
STARVED = trace(flops=2e10, bytes_moved=2e9, wait_s=0.05)


def rehearse(work, *, profile="v100", bound=0.02, seed=0, noise=None):
    events = []
    noises = {} if noise is None else {"noise": noise}
    gpu = SimGpu(load_profile(profile), seed=seed, **noises)
    rehearsal = Rehearsal(
        gpu,
        work,
        Goal(max_slowdown=bound),
        apply=gpu.set,
        record=events.append,
        clock=lambda: gpu.now_s,
        seed=seed,
    )
    assert rehearsal.finish(seconds=60)
    return rehearsal.program.choice, events


def true_ratios(work, setting, profile="v100"):
    """(time, energy) of a setting over the default, without noise and sensors."""
    results = []
    for wanted in (Setting(), setting):
        gpu = SimGpu(load_profile(profile), noise=Noise())
        found = gpu.settings()
        gpu.set(wanted if wanted != Setting() else found)
        iteration = gpu.work(work)
        gpu.idle(5)
        for _ in range(2000):
            gpu.run(iteration)
        energy, now = gpu.energy_j, gpu.now_s
        for _ in range(2000):
            gpu.run(iteration)
        results.append((gpu.now_s - now, gpu.energy_j - energy))
    (t0, e0), (t1, e1) = results
    return t1 / t0, e1 / e0


@pytest.mark.parametrize("work", [MEMORY_BOUND, STARVED], ids=["memory", "starved"])
@pytest.mark.parametrize("profile", names())
def test_a_job_with_slack_saves_within_its_contract(work, profile):
    choice, _ = rehearse(work, profile=profile)
    time, energy = true_ratios(work, choice.setting, profile)
    assert time <= 1.02
    assert energy < 0.95
    assert choice.energy_ratio == pytest.approx(energy, abs=0.02)
    assert choice.time_ratio == pytest.approx(time, abs=0.01)


def test_a_compute_bound_job_keeps_its_contract_too():
    for seed in range(4):
        choice, _ = rehearse(COMPUTE_BOUND, seed=seed)
        time, energy = true_ratios(COMPUTE_BOUND, choice.setting)
        assert time <= 1.02
        assert energy <= 1.0


def test_events_tell_the_whole_story():
    choice, events = rehearse(MEMORY_BOUND)
    blocks = [e for e in events if isinstance(e, Block)]
    phases = Counter(b.phase for b in blocks)
    assert phases["warm"] >= 1
    assert phases["probe"] >= 2
    assert phases["confirm"] >= 10
    assert phases["hold"] >= 100
    assert all(b.rehearsed for b in blocks)
    held = [b for b in blocks if b.phase == "hold" and b.arm == "candidate"]
    assert {b.setting for b in held} == {choice.setting}
    pairs = Counter(b.pair for b in blocks if b.pair is not None and b.clean)
    assert set(list(pairs.values())[:-1]) == {2}, "every pair has both arms (but maybe the last)"
    assert any(isinstance(e, Decided) and e.setting == choice.setting for e in events)
    powers = [e.power_w for e in events if isinstance(e, Sampled)]
    assert statistics.pstdev(powers) > 0


def test_energy_of_a_block_is_power_times_time():
    _, events = rehearse(MEMORY_BOUND, noise=Noise())
    for block in (e for e in events if isinstance(e, Block)):
        span = block.device_end_s - block.device_begin_s
        assert span == pytest.approx(block.iterations * block.iteration_s, rel=0.02)
        assert 30 < block.energy_j * block.iterations / span < 400


def test_compare_agrees_with_the_truth():
    setting = Setting(sm_clock_hz=1.08e9)
    gpu = SimGpu(load_profile("v100"), seed=5)
    pairs = compare(gpu, MEMORY_BOUND, setting, pairs=12)
    time, energy = true_ratios(MEMORY_BOUND, setting)
    assert statistics.fmean(c.iteration_s / b.iteration_s for b, c in pairs) == pytest.approx(
        time, abs=0.01
    )
    assert statistics.fmean(c.energy_j / b.energy_j for b, c in pairs) == pytest.approx(
        energy, abs=0.02
    )
    assert gpu.settings() == Setting()
