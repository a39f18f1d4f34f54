"""Pauses of a governed job, on simulated cards in virtual time: conductors, leases and actuators
are the real ones, and each rank reads its own sensors."""

import math
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.device.faulty_gpu import Fault, FaultyGpu, Trouble

from kilter.app.simulated_training import training_job
from kilter.clocks.block_messages import RankResult
from kilter.clocks.conductor import PAUSED, STALLED, Conductor, GovernorProgram
from kilter.clocks.pausing import PauseAccount, PausingActuator
from kilter.clocks.plan.pauses import SAVED_UP, PausePlan, pause_plan
from kilter.core.errors import DeviceError
from kilter.core.events import Block, Refused
from kilter.core.messages import LocalMessages
from kilter.core.plan import Goal
from kilter.core.setting import DeviceInfo, Sample, Setting
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.noise import Noise
from kilter.device.sim.profile import load_profile
from kilter.lease.lease import Lease
from kilter.observe.end_times import Iteration
from kilter.observe.sensor_record import SensorRecord

LOW_HZ = 345e6
NOISE = Noise(white=0.01, power=0.01)


class Rank:
    """One rank's card, which stays awake when it is idle, and its part of the job."""

    def __init__(self, card, seed, faults):
        _, self.job = training_job(card, "gpt", compute_s=0.35, wait_s=0.05)
        profile = replace(load_profile(card), sleep_after_s=math.inf)
        self.gpu = self.job._gpu = FaultyGpu(profile, seed=seed, noise=NOISE, faults=faults)
        self.index, self.began_s, self.lived = -1, 0.0, True
        sensors = SimpleNamespace(record=SensorRecord(), why_ended=None, cost_s=0.0)
        self.sensors = sensors
        sensors.record.period_s = profile.sensor.period_s
        marks = SimpleNamespace(usual_s=0.4)
        info = self.gpu.info()
        self.actuator = PausingActuator(sensors, info, marks, clock=lambda: self.gpu.now_s)
        self.lease = Lease(self.gpu).__enter__()
        self.events = []
        self.gpu.at_each_tick(self._tick)

    def _tick(self):
        if not self.lived:
            return
        self.sensors.record.add(self.gpu.sample(energy=True), on_tick=True)
        if self.conductor.refused is None:
            try:
                self.actuator.look(self.index)
            except DeviceError as error:
                self.conductor.refuse(str(error))
                self.lease.restore()

    @property
    def clock_hz(self):
        return self.gpu.in_force.sm_clock_hz


class Job:
    """Ranks that wait for each other at the end of each iteration, on idle cards."""

    def __init__(self, ranks=1, *, card="h200", bound=0.05, lowers=True, faults=()):
        self.ranks = [Rank(card, seed, faults if seed == 0 else ()) for seed in range(ranks)]
        messages, first = LocalMessages(), self.ranks[0]
        info = first.gpu.info()
        plan = pause_plan(
            first.gpu.supported(),
            sensor_period_s=info.sensor_period_s,
            switch_latency_s=info.switch_latency_s,
        )
        for rank in self.ranks:
            rank.actuator.govern(rank.lease, plan if lowers else None)
        goal = Goal(max_slowdown=bound)
        self.program = GovernorProgram(
            goal, Setting(), first.gpu.supported(), first.actuator, seed=0
        )
        account = PauseAccount(plan, bound, lambda: self.program.choice.time_ratio)
        for number, rank in enumerate(self.ranks):
            rank.conductor = Conductor(
                rank.actuator,
                messages,
                found=Setting(),
                rank=number,
                world_size=ranks,
                sensor_period_s=info.sensor_period_s,
                orders=self.program.orders() if number == 0 else None,
                record=rank.events.append,
                clock=lambda rank=rank: rank.gpu.now_s,
                pauses=rank.actuator,
                pauses_left_s=account.left_s if number == 0 else None,
            )

    @property
    def now_s(self):
        return max(rank.gpu.now_s for rank in self.ranks)

    def iterate(self, count=1):
        for _ in range(count):
            for rank in self.ranks:
                rank.job.iterate()
            self._meet()
            for rank in self.ranks:
                rank.index += 1
                now_s = rank.gpu.now_s
                ended = Iteration(rank.index, now_s, now_s - rank.began_s)
                rank.began_s = now_s
                rank.conductor.iteration(ended)

    def run_until(self, seconds):
        while self.now_s < seconds:
            self.iterate()

    def pause(self, seconds, *, of=None):
        """All ranks, or only some: the others work until the next end of an iteration."""
        for rank in self.ranks if of is None else of:
            rank.gpu.idle(seconds)

    def _meet(self):
        end_s = self.now_s
        for rank in self.ranks:
            if rank.gpu.now_s < end_s:
                rank.gpu.idle(end_s - rank.gpu.now_s)

    @property
    def blocks(self):
        return [event for event in self.ranks[0].events if isinstance(event, Block)]


def held(job):
    """Until a setting is held."""
    while job.ranks[0].conductor.phase is None or job.ranks[0].conductor.phase.value != "hold":
        job.iterate()
    assert job.program.choice.setting != Setting()
    job.run_until(job.now_s + 60.0)


def test_a_long_pause_is_spent_at_the_lowest_clock_and_the_held_setting_comes_back():
    job = Job()
    held(job)
    (rank,) = job.ranks
    before = rank.gpu.in_force
    job.pause(30.0)
    assert rank.clock_hz == LOW_HZ
    job.iterate()
    job.run_until(job.now_s + 30.0)
    assert rank.gpu.in_force in (before, Setting()), "held, or the baseline beside it"
    watch = rank.actuator.watch
    assert len(watch.returns_s) == 1
    assert watch.returns_s[0] < 0.4
    assert not [event for event in rank.events if isinstance(event, Refused)]
    # no block is judged by what the return has cost
    paused = [block for block in job.blocks if not block.clean]
    assert {block.why_not for block in paused} <= {PAUSED, STALLED}
    held_s = [b.iteration_s for b in job.blocks if b.phase == "hold" and b.arm == "candidate"]
    assert max(held_s[:-1]) < 1.05 * min(held_s)
    rank.lease.restore()
    assert rank.gpu.settings() == Setting()


def test_a_pause_in_a_search_does_not_end_it():
    job = Job()
    job.run_until(60.0)
    for _ in range(3):
        job.pause(20.0)
        assert job.ranks[0].clock_hz == LOW_HZ
        job.run_until(job.now_s + 20.0)
    held(job)
    assert len(job.ranks[0].actuator.watch.returns_s) == 3


def test_pauses_lose_no_more_than_the_contract_leaves():
    """Whatever the job could have done at the clock that it had: against one that lowers none."""
    ends = {}
    for lowers in (False, True):
        job = Job(bound=0.02, lowers=lowers)
        held(job)
        begin_s, begun = job.now_s, job.ranks[0].index
        for _ in range(40):
            job.pause(8.0)
            job.iterate(3)
        ends[lowers] = job.now_s - begin_s
        assert job.ranks[0].index == begun + 120
        returns = job.ranks[0].actuator.watch.returns_s if lowers else []
    assert returns
    assert sum(returns) <= 0.02 * ends[True]
    assert ends[True] <= 1.02 * ends[False]


def test_an_end_in_a_pause_puts_the_clock_back():
    job = Job()
    job.run_until(60.0)
    job.pause(20.0)
    (rank,) = job.ranks
    assert rank.clock_hz == LOW_HZ
    rank.lease.restore()
    assert rank.gpu.settings() == Setting()


def test_an_order_in_a_pause_is_obeyed_after_it():
    job = Job()
    job.run_until(60.0)
    job.pause(20.0)
    (rank,) = job.ranks
    rank.actuator.apply(ordered := Setting(sm_clock_hz=1500e6))
    assert rank.clock_hz == LOW_HZ
    assert not rank.actuator.settled()
    rank.actuator.apply(ordered := Setting(sm_clock_hz=1005e6))
    rank.job.iterate()
    assert rank.gpu.settings() == ordered
    rank.job.iterate()
    assert rank.actuator.settled(), "it is back at what was asked for, not at the clock before"


def test_sensors_that_fall_silent_in_a_pause_bring_the_clock_back():
    job = Job()
    job.run_until(60.0)
    job.pause(20.0)
    (rank,) = job.ranks
    assert rank.clock_hz == LOW_HZ
    rank.lived = False  # no reading comes any more
    rank.gpu.idle(5.0)
    rank.actuator.look(rank.index)
    assert rank.gpu.settings().sm_clock_hz != LOW_HZ


def test_an_iteration_that_ends_is_work_even_if_the_sensors_see_none():
    """Kernels too short for the sensors: without this, a running job would be slowed down."""
    sensors = SimpleNamespace(record=SensorRecord(), why_ended=None, cost_s=0.0)
    gpu, marks = SimGpu(load_profile("h200")), SimpleNamespace(usual_s=0.1)
    actuator = PausingActuator(sensors, gpu.info(), marks, clock=lambda: now_s)
    plan = PausePlan(sm_clock_hz=LOW_HZ, after_s=5.0, return_s=0.4)
    actuator.govern(Lease(gpu).__enter__(), plan)
    actuator.allow(1e9)

    def read(index):
        sample = Sample(t_s=now_s, sm_utilisation=0.0, sm_clock_hz=1.98e9)
        sensors.record.add(sample, on_tick=True)
        actuator.look(index)

    for i in range(1000):
        now_s = 0.1 * i
        read(i)
        assert not actuator.watch.lowered
    while not actuator.watch.lowered:  # without iterations the same readings are a pause
        now_s += 0.1
        read(999)
    assert 104.5 < now_s < 105.5


def test_a_card_that_refuses_the_low_clock_ends_the_setting_at_the_default():
    """Whatever memory clock is in force when the pause comes."""
    memory_hz = (None, *SimGpu(load_profile("h200")).supported().memory_clocks_hz)
    low = [Setting(sm_clock_hz=LOW_HZ, memory_clock_hz=hz) for hz in memory_hz]
    job = Job(faults=tuple(Fault(trouble=Trouble.SET_REFUSED, setting=each) for each in low))
    job.run_until(60.0)
    job.pause(20.0)
    (rank,) = job.ranks
    assert rank.gpu.settings() == Setting()
    assert rank.conductor.refused is not None
    job.run_until(job.now_s + 30.0)
    assert job.program.choice.setting == Setting()
    assert not rank.actuator.watch.works
    assert rank.actuator.settled(), "iterations are still counted"


def test_each_rank_lowers_its_own_card_and_the_slowest_return_is_paid():
    job = Job(3)
    job.run_until(60.0)
    job.pause(20.0)
    assert [rank.clock_hz for rank in job.ranks] == [LOW_HZ] * 3
    job.run_until(job.now_s + 20.0)
    one = job.ranks[1]
    job.pause(20.0, of=[one])  # the others compute, and then wait on idle cards
    assert one.clock_hz == LOW_HZ
    job.run_until(job.now_s + 20.0)
    returns = [sum(rank.actuator.watch.returns_s) for rank in job.ranks]
    assert all(returns)
    grants = {round(rank.actuator.watch.budget.left_s, 3) for rank in job.ranks}
    assert len(grants) == 1, "all have been told the same"
    assert all(rank.lease.setting == job.ranks[0].lease.setting for rank in job.ranks)


def test_ranks_that_pause_in_turn_pay_from_one_account():
    account = PauseAccount(
        PausePlan(sm_clock_hz=LOW_HZ, after_s=5.0, return_s=0.4), 0.05, lambda: 1.02
    )
    assert account.left_s(0.0, {}) == 0.0
    assert account.left_s(100.0, {}) == pytest.approx(3.0)
    assert account.left_s(100.0, {7: 0.4, 9: 0.3}) == pytest.approx(2.3)
    assert account.left_s(100.0, {11: 5.0}) == 0.0
    assert account.left_s(110.0, {}) == 0.0, "what was lost too much is earned back first"


@given(
    st.lists(
        st.tuples(st.floats(0.1, 60.0), st.dictionaries(st.integers(0, 9), st.floats(0.0, 1.0))),
        max_size=30,
    ),
    st.floats(1.0, 1.1),
)
def test_no_more_is_granted_than_the_contract_leaves(blocks, time_ratio):
    """Whatever ranks lose in whichever iterations, an iteration counts with its slowest rank."""
    plan = PausePlan(sm_clock_hz=LOW_HZ, after_s=5.0, return_s=0.4)
    account, now_s, lost_s = PauseAccount(plan, 0.05, lambda: time_ratio), 0.0, 0.0
    account.left_s(now_s, {})
    for seconds, by_iteration in blocks:
        now_s += seconds
        one, other = (
            RankResult(iteration_s=1.0, energy_j=None, why_not=None, refused=None, lost=lost)
            for lost in (by_iteration, {i: s / 2 for i, s in by_iteration.items()})
        )
        told = msgspec.json.decode(msgspec.json.encode(other), type=RankResult).with_(one)
        assert told.lost == by_iteration
        lost_s += sum(by_iteration.values())
        left_s = account.left_s(now_s, told.lost)
        assert 0.0 <= left_s <= SAVED_UP * plan.return_s
        assert left_s <= max(0.0, 1.05 - time_ratio) * now_s - lost_s + 1e-9 or left_s == 0.0


def test_a_dry_run_and_a_card_without_clocks_lower_nothing():
    info = DeviceInfo(name="x", uuid="x", backend="x", label="simulated", can_set=False)
    sensors = SimpleNamespace(record=SensorRecord(), why_ended=None, cost_s=0.0)
    actuator = PausingActuator(sensors, info, SimpleNamespace(usual_s=None))
    actuator.look(3)
    actuator.allow(1.0)
    assert actuator.settled()
    assert not actuator.touched(0.0, 1.0)
