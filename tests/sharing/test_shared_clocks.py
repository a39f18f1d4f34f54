"""The clocks of shared GPUs: every job's contract is kept, and the strictest decides."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.core.errors import NotPermitted
from kilter.core.setting import Setting
from kilter.device.null import NullDevice
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.profile import load_profile
from kilter.device.sim.work import Work
from kilter.session.shared_clocks import SharedClocks
from kilter.sharing.plan.contracts import ContractedJob, bounds, slowest, step_times, work_ratio

STEP_S = 0.1


class Job:
    """A job whose step takes `share` of its time on the SM clock."""

    def __init__(self, share, max_slowdown, step_s=STEP_S):
        self.share, self.max_slowdown, self.step_s = share, max_slowdown, step_s
        self.steps, self.ended_s, self.ratios, self.left_s = 0, 0.0, (5, 5), step_s

    def time_s(self, clock, top):
        return self.step_s * (1 - self.share + self.share * top / clock)

    def advance(self, now_s, dt_s, clock, top):
        self.left_s -= dt_s * self.step_s / self.time_s(clock, top)
        while self.left_s <= 0.0:
            self.steps += 1
            self.ended_s = now_s + self.left_s
            self.left_s += self.step_s


class Machine:
    """Two simulated GPUs on which jobs run, in virtual time."""

    def __init__(self, default=None, **jobs):
        self.gpus = [SimGpu(load_profile("v100"), index=i) for i in range(2)]
        self.top = self.gpus[0].profile.knobs.sm_highest_hz
        array = np.array([2e12])
        self.work = Work(
            flops=array,
            bytes_moved=array * 0 + 1e9,
            floor_s=array * 0,
            fixed_s=0.0,
            switched_flops=2e12,
            switched_bytes=1e9,
        )
        self.jobs, self.now_s = jobs, 0.0
        self.clocks = SharedClocks(self.gpus, default, 5.0)
        self.seen = []

    @property
    def clock(self):
        asked = self.gpus[0].in_force.sm_clock_hz
        return min(asked or self.top, self.top)

    def run(self, seconds):
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            dt_s = 0.25
            for gpu in self.gpus:
                until_s = self.now_s + dt_s
                while gpu.now_s < until_s:
                    gpu.run(self.work)
            self.now_s += dt_s
            for job in self.jobs.values():
                job.advance(self.now_s, dt_s, self.clock, self.top)
            self.clocks.tick(
                self.now_s,
                [
                    ContractedJob(n, j.ratios, j.max_slowdown, 0, j.steps, j.ended_s or None)
                    for n, j in self.jobs.items()
                ],
            )
            self.seen.append(self.clocks.setting)

    def slowdowns(self):
        return {n: j.time_s(self.clock, self.top) / j.step_s - 1 for n, j in self.jobs.items()}

    def settle(self):
        """Until a setting is held."""
        for _ in range(80):
            self.run(60)
            if "held" in self.clocks.said:
                return
        pytest.fail(f"never held: {self.clocks.said}")


def test_the_clock_is_one_that_every_contract_allows():
    machine = Machine(compute=Job(0.9, 0.10), memory=Job(0.15, 0.02))
    machine.settle()
    alone = machine.slowdowns()
    assert alone["compute"] <= 0.10
    assert alone["memory"] <= 0.02
    assert machine.clock < machine.top  # something was allowed, and taken
    assert all(gpu.settings() == machine.gpus[0].settings() for gpu in machine.gpus)

    # A job with a stricter contract comes: the clocks are as found at once, then as it allows.
    before = machine.clock
    machine.jobs["strict"] = Job(0.9, 0.01)
    machine.run(1)
    assert machine.clock == machine.top
    assert "have changed" in machine.clocks.said
    machine.settle()
    assert machine.slowdowns()["strict"] <= 0.01
    assert machine.clock > before

    # One without any contract comes: nothing is set while it is there.
    machine.jobs["guest"] = Job(0.5, None)
    machine.run(30)
    assert machine.clocks.setting is None
    assert "guest has no contract" in machine.clocks.said
    del machine.jobs["guest"]
    machine.jobs.clear()
    machine.run(1)
    assert machine.clocks.setting is None
    assert all(gpu.settings() == Setting() for gpu in machine.gpus)


def test_the_owners_contract_is_for_those_that_bring_none():
    machine = Machine(default=0.05, a=Job(0.5, None), b=Job(0.1, 0.20))
    machine.settle()
    assert machine.clock < machine.top
    assert machine.slowdowns()["a"] <= 0.05
    assert "that of a, 5.0 %" in machine.clocks.said
    machine.clocks.close()
    assert all(gpu.settings() == Setting() for gpu in machine.gpus)


def test_a_changed_ratio_or_a_job_that_stands_still_ends_the_comparison():
    machine = Machine(a=Job(0.5, 0.05), b=Job(0.5, 0.05))
    machine.run(20)
    machine.jobs["a"].ratios = (6, 4)
    machine.run(0.5)
    assert "have changed" in machine.clocks.said
    machine.run(20)
    machine.jobs["b"].advance = lambda *args: None
    machine.run(400)
    machine.jobs.pop("b")
    machine.settle()
    assert machine.slowdowns()["a"] <= 0.05


def test_gpus_that_may_not_be_set_are_left_alone_and_the_reason_is_said():
    clocks = SharedClocks([NullDevice("no rights here")] * 2, None, 1.0)
    for now_s in range(10):
        clocks.tick(float(now_s), [ContractedJob("a", (5, 5), 0.02, 0, now_s, float(now_s))])
    assert clocks.said.startswith("clocks stay as found: ")
    assert clocks.setting is None
    clocks.close()


def test_an_error_of_a_device_puts_back_what_was_found():
    machine = Machine(a=Job(0.5, 0.05))
    machine.run(60)
    assert machine.clocks.setting is not None

    def refuse(setting):
        raise NotPermitted("taken away")

    taken = machine.gpus[1].set
    machine.gpus[1].set = refuse
    machine.run(600)
    machine.gpus[1].set = taken
    assert "taken away" in machine.clocks.said
    assert machine.clocks.setting is None
    assert machine.gpus[0].settings() == Setting()


def test_nothing_is_said_while_nobody_has_a_contract():
    machine = Machine(a=Job(0.5, None))
    machine.run(30)
    assert machine.clocks.said == ""
    assert machine.seen == [None] * len(machine.seen)


times = st.floats(0.01, 10.0)


@given(st.lists(st.tuples(times, times, st.floats(0.0, 0.5)), min_size=1, max_size=6))
def test_the_strictest_bound_is_kept_exactly_when_every_contract_is(jobs):
    found = [ContractedJob(str(i), (10,), limit) for i, (_, _, limit) in enumerate(jobs)]
    allowed = bounds(found, None)
    baseline = {str(i): a for i, (a, _, _) in enumerate(jobs)}
    candidate = {str(i): b for i, (_, b, _) in enumerate(jobs)}
    kept = all(math.log(candidate[n] / baseline[n]) <= allowed[n] + 1e-12 for n in allowed)
    value = slowest(candidate, baseline, allowed)
    assert (value <= min(allowed.values()) + 1e-12) == kept
    assert slowest(baseline, baseline, allowed) <= 1e-12
    assert work_ratio(baseline, baseline) == pytest.approx(0.0)


def test_a_step_time_needs_steps_of_one_rank():
    a = ContractedJob("a", (5, 5), 0.1, 0, 10, 5.0)
    later = ContractedJob("a", (5, 5), 0.1, 0, 30, 9.0)
    assert step_times([a], [later], 20) == {"a": pytest.approx(0.2)}
    assert step_times([a], [later], 21) is None
    other = ContractedJob("a", (5, 5), 0.1, 1, 30, 9.0)
    assert step_times([a], [other], 5) is None
    assert step_times([a], [a], 0) is None
