"""A job governed from outside, on simulated cards in virtual time: what is seen, tried, undone."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.device.faulty_gpu import Fault, FaultyGpu, Trouble

from kilter.app.simulated_training import training_job
from kilter.core.events import Block, Decided, Refused, Started, Stopped, read_events
from kilter.core.plan import Goal
from kilter.core.setting import Setting
from kilter.device.sim.noise import Noise
from kilter.device.sim.phased_job import PhasedJob
from kilter.device.sim.profile import load_profile
from kilter.session.listener import SilentListener
from kilter.session.options import Options
from kilter.session.simulated_job import SimulatedSource
from kilter.session.watch import watch

NOISE = Noise(white=0.01, power=0.01)
HELD_S = 800.0
"""From here on the search on an H200 is over, and its setting is held."""


class Listener(SilentListener):
    def __init__(self):
        self.said = []

    def noticed(self, text):
        self.said.append(text)


class Scripted:
    """A job to which things happen: (virtual time, what happens then), in order."""

    def __init__(self, job, gpu, events):
        self._job, self._gpu, self._events = job, gpu, list(events)

    def iterate(self):
        while self._events and self._events[0][0] <= self._gpu.now_s:
            self._events.pop(0)[1]()
        self._job.iterate()


def watched(tmp_path, gpu, job, *, seconds, bound=0.05, events=(), **options):
    """(end, events, what was said) of a watch."""
    listener = Listener()
    source = SimulatedSource(gpu, Scripted(job, gpu, events), seconds=seconds)
    chosen = Options(
        goal=Goal(max_slowdown=bound), out=tmp_path / "run", command=("watch",), **options
    )
    end = watch(source, chosen, listener)
    return end, list(read_events(tmp_path / "run" / "events-rank0.jsonl")), listener.said


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def with_faults(card, *faults, workload="gpt"):
    """The training job on a card on which something goes wrong."""
    _, job = training_job(card, workload)
    gpu = FaultyGpu(load_profile(card), noise=NOISE, faults=faults)
    job._gpu = gpu
    return gpu, job


def test_it_saves_within_the_contract_and_restores(tmp_path):
    gpu, job = training_job("h200", "gpt", noise=NOISE)
    end, events, _ = watched(tmp_path, gpu, job, seconds=HELD_S)
    assert not end.failed
    last = of(Decided, events)[-1]
    assert last.state == "decided"
    assert last.setting != Setting()
    assert last.energy_ratio < 0.95
    assert last.time_ratio < 1.05
    assert gpu.settings() == Setting()
    stopped = events[-1]
    assert isinstance(stopped, Stopped)
    assert stopped.restored
    assert stopped.iterations == sum(block.iterations for block in of(Block, events))
    assert stopped.iterations <= job.iterations


def test_blocks_tell_the_time_and_energy_of_the_job(tmp_path):
    gpu, job = training_job("h200", "vgg16", noise=NOISE)
    times = []
    iterate = job.iterate
    job.iterate = lambda: times.append((gpu.now_s, iterate())) or times[-1][1]
    _, events, _ = watched(tmp_path, gpu, job, seconds=600.0)
    blocks = of(Block, events)
    assert len(blocks) > 10
    for block in blocks:
        # an edge may fall beside a mark by an iteration's fraction: whole ones inside are the truth
        inside = [s for t, s in times if block.device_begin_s - s < t < block.device_end_s]
        true_s = math.fsum(inside) / len(inside)
        assert block.iteration_s == pytest.approx(true_s, rel=0.02)
        assert len(inside) == pytest.approx(block.iterations, abs=1.1)


def test_a_dry_run_sets_nothing_and_says_what_it_would_try(tmp_path):
    gpu, job = training_job("h200", "gpt", noise=NOISE)
    end, events, said = watched(tmp_path, gpu, job, seconds=3600.0, dry_run=True)
    assert end.tries
    assert end.reason == ""
    assert gpu.now_s < 120.0
    assert gpu.settings() == Setting()
    assert not of(Block, events)
    assert of(Started, events)[0].mode == "shadow"
    assert any("would try first" in text and str(end.tries[0]) in text for text in said)


def test_iterations_below_the_resolution_are_left_alone(tmp_path):
    gpu, job = training_job("h200", "gpt", noise=NOISE, compute_s=0.03)  # 180 ms in all
    end, events, said = watched(tmp_path, gpu, job, seconds=200.0)
    assert end.rhythm is None
    assert end.verdict is not None
    assert "kilter run" in end.verdict
    assert said.count(end.verdict) == 1
    assert not of(Block, events)
    assert events[-1].unseen == end.verdict
    assert gpu.settings() == Setting()


@pytest.mark.parametrize(
    ("card", "compute_s"),
    [("h200", 0.089), ("h200", 0.109), ("h200", 0.111), ("rtx3080ti", 0.089), ("a100", 0.109)],
)
def test_the_alias_of_a_short_iteration_is_not_governed(tmp_path, card, compute_s):
    """Sampled every 100 ms these repeat every 0.4 to 2 s, in the reading of the one card as in its
    energy counter."""
    gpu, job = training_job(card, "gpt", noise=NOISE, compute_s=compute_s, wait_s=0.02)
    end, events, _ = watched(tmp_path, gpu, job, seconds=150.0)
    assert end.rhythm is None
    assert not of(Block, events)


def test_without_an_energy_counter_a_period_is_not_trusted(tmp_path):
    gpu, job = with_faults("h200", Fault(trouble=Trouble.COUNTER_STUCK))
    end, events, _ = watched(tmp_path, gpu, job, seconds=150.0)
    assert end.detection.code == "unresolvable"
    assert "energy counter" in end.detection.reason
    assert not of(Block, events)


@pytest.mark.parametrize(
    ("least", "most", "codes"),
    [(0.1, 3.0, ("aperiodic", "unstable")), (0.7, 1.3, ("uneven",))],
)
def test_a_job_without_an_even_period_is_left_alone(tmp_path, least, most, codes):
    gpu, job = training_job("h200", "gpt", noise=NOISE)
    chance, iterate, size = random.Random(0), job.iterate, [1.0]

    def unequal():
        new = chance.uniform(least, most)
        job.scale(new / size[0])
        size[0] = new
        return iterate()

    job.iterate = unequal
    end, events, said = watched(tmp_path, gpu, job, seconds=200.0, dry_run=most < 2.0)
    assert end.rhythm is None
    assert end.detection.code in codes
    assert "nothing is set" in end.verdict
    assert said.count(end.verdict) == 1
    assert gpu.now_s < 200.0 or most > 2.0  # a dry run ends with its verdict
    assert not of(Block, events)


def test_a_changed_iteration_brings_the_default_back_within_three_periods(tmp_path):
    gpu, job = training_job("h200", "gpt", noise=NOISE)
    changed, sets = [], []
    real_set = gpu.set
    gpu.set = lambda setting: sets.append((gpu.now_s, setting)) or real_set(setting)

    def larger_batch():
        changed.append(gpu.now_s)
        job.scale(1.8)

    end, events, said = watched(tmp_path, gpu, job, seconds=1200.0, events=[(HELD_S, larger_batch)])
    held = [setting for t, setting in sets if t < changed[0]][-1]
    assert held != Setting(), "a setting was held when the job changed"
    back_s = next(t for t, setting in sets if t > changed[0])
    assert next(setting for t, setting in sets if t > changed[0]) == Setting()
    assert back_s - changed[0] <= 3 * 1.95
    reopened = [d for d in of(Decided, events) if d.state == "reopened"]
    assert len(reopened) == 1
    assert any("opened again" in text for text in said)
    after = [block for block in of(Block, events) if block.device_begin_s > back_s]
    assert after
    assert after[-1].iteration_s == pytest.approx(1.95, rel=0.06)
    assert end.rhythm.pace.iteration_s == pytest.approx(1.95, rel=0.02)


def test_a_watch_that_ends_after_a_change_holds_the_default(tmp_path):
    gpu, job = training_job("h200", "gpt", noise=NOISE)
    _, events, _ = watched(
        tmp_path, gpu, job, seconds=HELD_S + 40.0, events=[(HELD_S, lambda: job.scale(1.8))]
    )
    held = [d for d in of(Decided, events) if d.state == "hold"]
    assert held[-1].setting != Setting()
    last = of(Decided, events)[-1]
    assert last.state == "reopened"
    assert last.setting == Setting()


def test_pauses_do_not_open_the_case_again_and_are_waited_for_at_the_default(tmp_path):
    gpu, job = training_job("h200", "gpt", noise=NOISE)
    at = []

    def rest():
        gpu.idle(30.0)
        at.append(gpu.in_force)
        gpu.idle(60.0)

    pauses = [(t, lambda: gpu.idle(4.0)) for t in (HELD_S, HELD_S + 100.0)]
    pauses.append((HELD_S + 150.0, rest))
    _, events, said = watched(tmp_path, gpu, job, seconds=HELD_S + 300.0, events=pauses)
    assert at == [Setting()], "this card lowers its clock by itself"
    assert not any("long pause" in text for text in said)
    assert not [d for d in of(Decided, events) if d.state == "reopened"], "it is the same job"
    last = of(Decided, events)[-1]
    assert (last.state, last.setting != Setting()) == ("decided", True)


def that_stays_awake(card, workload="gpt", faults=()):
    """The training job on a card that does not lower its clock by itself when it is idle."""
    _, job = training_job(card, workload)
    gpu = FaultyGpu(replace(load_profile(card), sleep_after_s=math.inf), noise=NOISE, faults=faults)
    job._gpu = gpu
    return gpu, job


def pauses(gpu, times, seconds=60.0):
    """(events, the clocks in force late in each pause)."""
    seen = []

    def rest():
        gpu.idle(seconds / 2)
        seen.append(gpu.in_force.sm_clock_hz)
        gpu.idle(seconds / 2)

    return [(t, rest) for t in times], seen


def test_long_pauses_are_spent_at_the_lowest_clock_and_the_hold_goes_on(tmp_path):
    gpu, job = that_stays_awake("h200")
    events, seen = pauses(gpu, (HELD_S, HELD_S + 100.0))
    end, events, said = watched(tmp_path, gpu, job, seconds=1050.0, events=events)
    assert seen == [gpu.supported().sm_clocks_hz[0]] * 2
    assert not end.failed
    decided = of(Decided, events)
    assert not [d for d in decided if d.state == "reopened"]
    assert decided[-1].state == "decided"
    assert decided[-1].setting != Setting()
    (told,) = [text for text in said if "long pauses" in text]
    assert "the idle GPU went to 345 MHz in 2 long pauses; coming back cost at most" in told
    assert not of(Refused, events)
    assert gpu.settings() == Setting()
    # blocks are not judged by what the return cost
    held = [b.iteration_s for b in of(Block, events) if b.arm == "candidate" and b.phase == "hold"]
    assert max(held) < 1.02 * min(held)


def test_a_watch_that_ends_in_a_pause_puts_the_clock_back(tmp_path):
    gpu, job = that_stays_awake("h200")
    events, seen = pauses(gpu, (150.0,), seconds=100.0)
    end, _, _ = watched(tmp_path, gpu, job, seconds=200.0, events=events)
    assert seen == [345e6]
    assert end.reason == "its time is over"
    assert gpu.settings() == Setting()


def test_a_gpu_that_refuses_the_low_clock_ends_the_watch_at_the_default(tmp_path):
    fault = Fault(trouble=Trouble.SET_REFUSED, setting=Setting(sm_clock_hz=345e6))
    gpu, job = that_stays_awake("h200", faults=(fault,))
    events, _ = pauses(gpu, (150.0,))
    end, events, _ = watched(tmp_path, gpu, job, seconds=300.0, events=events)
    assert end.failed
    assert of(Refused, events)
    assert gpu.settings() == Setting()
    assert 150.0 < gpu.now_s < 210.0
    assert of(Decided, events)[-1].setting == Setting()


def test_a_dry_run_lowers_no_clock_in_a_pause(tmp_path):
    gpu, job = that_stays_awake("h200")
    events, seen = pauses(gpu, (5.0,))
    watched(tmp_path, gpu, job, seconds=70.0, events=events, dry_run=True)
    assert seen == [None]


def test_a_slow_return_ends_the_lowering_and_is_said(tmp_path):
    gpu, job = that_stays_awake("h200")
    events, seen = pauses(gpu, (150.0, 350.0))

    def switches_take(median_s):
        gpu.profile = replace(gpu.profile, switch=replace(gpu.profile.switch, median_s=median_s))

    (at_s, rest), second = events
    first = (at_s, lambda: (rest(), switches_take(20.0)))
    events = [first, (at_s + 61.0, lambda: switches_take(0.03)), second]
    _, events, _ = watched(tmp_path, gpu, job, seconds=450.0, events=events)
    assert seen == [345e6, None]
    (refused,) = of(Refused, events)
    assert refused.what == "lowering the clock of the idle GPU"
    assert "more than the contract leaves" in refused.reason


@pytest.mark.parametrize(
    "fault",
    [
        Fault(trouble=Trouble.SET_REFUSED, begin_s=10.0),
        Fault(trouble=Trouble.SET_IGNORED, begin_s=10.0),
        Fault(trouble=Trouble.LOST, begin_s=200.0),
    ],
    ids=lambda fault: fault.trouble.value,
)
def test_a_device_that_does_not_obey_ends_the_watch(tmp_path, fault):
    gpu, job = with_faults("h200", fault)
    end, events, _ = watched(tmp_path, gpu, job, seconds=3600.0)
    assert end.failed
    assert gpu.now_s < 3600.0
    assert of(Refused, events)
    assert isinstance(events[-1], Stopped)
    assert of(Decided, events)[-1].setting == Setting()


def test_the_phases_of_a_job_add_up_to_its_iteration():
    _, job = training_job("v100", "resnet50", noise=Noise())
    assert isinstance(job, PhasedJob)
    assert job.iterate() == pytest.approx(1.15, rel=0.01)


def test_nothing_is_written_where_the_gpu_cannot_be_had(tmp_path):
    gpu, job = training_job("h200", "gpt", noise=NOISE)
    (tmp_path / "run").mkdir()
    Path(tmp_path / "run" / "events-rank0.jsonl").touch()
    with pytest.raises(Exception, match="holds a run already"):
        watched(tmp_path, gpu, job, seconds=10.0)
    assert gpu.now_s == 0.0
