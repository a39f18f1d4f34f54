"""The whole loop through everything that happens to jobs and cards: one description, one test each.

Whatever happens, all iterations run, no error reaches the job, the choice keeps the contract or is
the default, the settings are as found afterwards (or somebody else's newer ones), and why nothing
more is set is on record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from tests.device.faulty_gpu import Fault, FaultyGpu, Trouble
from tests.device.scenarios import Scenario, SimJob, scenarios

from kilter.clocks.conductor import Conductor, GovernorProgram
from kilter.clocks.plan.governor import Choice
from kilter.clocks.rehearsal import Rehearsal, SimulatedActuator
from kilter.core.errors import DeviceLost, NotPermitted
from kilter.core.events import AnyEvent, Block, Refused
from kilter.core.label import Label
from kilter.core.messages import LocalMessages
from kilter.core.plan import Goal
from kilter.core.setting import DeviceInfo, Setting
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.noise import QUIET
from kilter.device.sim.profile import load_profile
from kilter.lease.journal import RestoreOutcome
from kilter.lease.lease import Lease
from kilter.observe.end_times import Iteration

V100 = load_profile("v100")
BOUND = 0.02
BEGIN_S, END_S = 25.0, 120.0
"""Of the troubles: the search is on at 25 s, and over long before 120 s."""
LENGTH_S = 300.0
DEFAULT = Setting()

TRACE = IterationTrace(
    iteration_s=0.04,
    operations=tuple(
        Operation(
            name=f"{kind.value} {i}",
            kind=kind,
            start_s=0.004 * i,
            duration_s=0.004,
            flops=2e9,
            bytes_moved=3e9,
            kernels=3,
        )
        for i, kind in enumerate([Kind.FORWARD] * 4 + [Kind.BACKWARD] * 5 + [Kind.OPTIMIZER])
    ),
    timeline="gpu",
    device="test",
    label=Label.MEASURED,
)
"""Waits for memory: there is a quarter of the energy to be saved."""

SCRIPTS = scenarios(profile=V100, begin_s=BEGIN_S, end_s=END_S, found=DEFAULT)


@dataclass
class Told:
    """A run, after its end."""

    gpu: SimGpu
    iterations: int
    choice: Choice
    events: list[AnyEvent]
    outcome: RestoreOutcome
    after: Setting
    error: Exception | None = None

    @property
    def blocks(self) -> list[Block]:
        return [event for event in self.events if isinstance(event, Block)]

    @property
    def refusals(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, Refused)]


def play(scenario: Scenario, *, seed: int = 0, length_s: float = LENGTH_S) -> Told:
    """The job of a scenario under the loop, until some virtual time or its own death."""
    return run(scenario.gpu(V100, seed=seed), scenario, length_s)


def run(gpu: SimGpu, scenario: Scenario, length_s: float = LENGTH_S) -> Told:
    events: list[AnyEvent] = []
    job = SimJob(gpu, TRACE, scenario)
    error: Exception | None = None
    with Lease(gpu) as lease:
        rehearsal = Rehearsal(
            gpu,
            job.iterate,
            Goal(max_slowdown=BOUND),
            apply=lease.set,
            verify=lease.verify,
            record=events.append,
            clock=lambda: gpu.now_s,
        )
        try:
            while gpu.now_s < length_s:
                rehearsal.iterate()
        except DeviceLost as lost:
            error = lost
        outcome = lease.restore()
    try:
        gpu.idle(1.0)  # a last set needs time to act
    except DeviceLost as lost:
        error = lost
    assert rehearsal.iterations == job.iterations
    return Told(gpu, job.iterations, rehearsal.program.choice, events, outcome, gpu.in_force, error)


def true_slowdown(setting: Setting) -> float:
    """Without noise and trouble."""
    seconds = []
    for wanted in (DEFAULT, setting):
        gpu = SimGpu(V100, noise=QUIET)
        gpu.set(wanted)
        gpu.idle(1.0)
        job = SimJob(gpu, TRACE)
        seconds.append(sum(job.iterate() for _ in range(50)))
    return seconds[1] / seconds[0] - 1.0


def unharmed(told: Told) -> None:
    assert told.error is None
    assert told.iterations > 0.5 * LENGTH_S / 0.05
    assert told.choice.setting == DEFAULT or true_slowdown(told.choice.setting) <= BOUND
    assert told.choice.reason


def as_found(told: Told) -> None:
    assert told.outcome.restored
    assert told.after == told.gpu.settings() == DEFAULT


@pytest.mark.parametrize(
    "name", ["steady", "noisy", "slow_drift", "skipped_steps", "counter_stuck", "counter_of_module"]
)
def test_what_only_disturbs_does_not_keep_it_from_saving(name: str) -> None:
    told = play(SCRIPTS[name], length_s=2 * LENGTH_S)
    unharmed(told)
    as_found(told)
    assert told.refusals == []
    # a job that has grown by a tenth is searched again
    assert told.choice.energy_ratio < 0.95 or told.blocks[-1].phase != "hold"
    held = [block for block in told.blocks if block.phase == "hold" and block.arm == "candidate"]
    assert held


@pytest.mark.parametrize("name", ["two_phases", "neighbour", "thermal", "sensors_late"])
def test_what_changes_the_job_costs_at_most_the_saving(name: str) -> None:
    told = play(SCRIPTS[name])
    unharmed(told)
    as_found(told)
    assert told.refusals == []


def test_a_power_cap_of_the_administrator_is_left_alone() -> None:
    told = play(SCRIPTS["admin_lowers_cap"])
    unharmed(told)
    assert told.choice.setting == DEFAULT
    assert told.gpu.settings().power_limit_w == V100.knobs.supported().power_limits_w[0]
    assert any("somebody else" in reason for reason in told.refusals)


def test_another_tool_s_clock_is_noticed_or_harmless() -> None:
    """Nobody can ask a card what clock is locked: a lower clock than ours looks like heat."""
    told = play(SCRIPTS["other_tool"])
    unharmed(told)
    assert told.outcome.reason


@pytest.mark.parametrize("begin_s", [0.0, BEGIN_S, 100.0], ids=["start", "search", "hold"])
def test_a_refused_setter_ends_the_setting(begin_s: float) -> None:
    fault = Fault(trouble=Trouble.SET_REFUSED, begin_s=begin_s, end_s=LENGTH_S - 10.0)
    told = play(Scenario(what="refused", faults=(fault,)))
    unharmed(told)
    assert told.choice.setting == DEFAULT
    assert any("refused (scripted)" in reason for reason in told.refusals)
    assert len(told.refusals) == 1
    refused_at = next(i for i, e in enumerate(told.events) if isinstance(e, Refused))
    later = [e for e in told.events[refused_at:] if isinstance(e, Block)]
    assert len(later) > 10, "it goes on looking"
    assert {block.arm for block in later[1:]} == {"baseline"}
    assert not later[0].clean
    if begin_s == 0.0:
        as_found(told)


def test_a_refused_restore_is_told() -> None:
    told = play(SCRIPTS["restore_refused"])
    unharmed(told)
    assert told.choice.setting == DEFAULT
    assert not told.outcome.restored
    assert "refused" in told.outcome.reason
    assert told.refusals


def test_a_lost_device_ends_the_job_and_not_in_our_words() -> None:
    told = play(SCRIPTS["lost"])
    assert isinstance(told.error, DeviceLost)
    assert told.gpu.now_s == pytest.approx(BEGIN_S)
    assert not told.outcome.restored
    assert "fell off the bus" in told.outcome.reason


@pytest.mark.parametrize("trouble", [Trouble.SET_IGNORED, Trouble.SET_CLIPPED])
def test_a_setter_that_lies_is_found_out(trouble: Trouble) -> None:
    fault = Fault(trouble=trouble, value=V100.knobs.sm_highest_hz)
    told = play(Scenario(what="accepted, not obeyed", faults=(fault,)))
    unharmed(told)
    as_found(told)
    assert told.choice.setting == DEFAULT
    assert any("accepted" in reason for reason in told.refusals)


def test_a_job_that_ends_inside_a_trial_leaves_nothing() -> None:
    """At every moment of a pair."""
    for extra in range(0, 40, 3):
        told = play(SCRIPTS["steady"], length_s=BEGIN_S + extra / 10)
        assert told.blocks[-1].phase in ("probe", "confirm")
        as_found(told)


class MigGpu(SimGpu):
    """A card whose instances share one clock."""

    def info(self) -> DeviceInfo:
        return replace(super().info(), can_set=False, refusal="MIG is on")


def test_a_mig_device_gets_no_lease() -> None:
    gpu = MigGpu(V100)
    with pytest.raises(NotPermitted, match="MIG is on"), Lease(gpu):
        raise AssertionError
    assert gpu.settings() == DEFAULT


def test_eight_unequal_cards_are_judged_by_the_slowest_and_all_set_alike() -> None:
    """One process each; cards of one kind that differ by sensor, cooling and neighbours."""
    hot = Fault(trouble=Trouble.HOT_ROOM, value=V100.thermal.limit_c - 25.0)
    crowded = Fault(trouble=Trouble.NEIGHBOUR, value=0.05)
    gpus = [
        FaultyGpu(V100, seed=rank, index=rank, faults={2: (hot,), 5: (crowded,)}.get(rank, ()))
        for rank in range(8)
    ]
    events: list[AnyEvent] = []
    messages = LocalMessages()
    actuators = [SimulatedActuator(gpu, gpu.set) for gpu in gpus]
    program = GovernorProgram(
        Goal(max_slowdown=BOUND), DEFAULT, gpus[0].supported(), actuators[0], seed=0
    )
    conductors = [
        Conductor(
            actuators[rank],
            messages,
            found=DEFAULT,
            rank=rank,
            world_size=8,
            sensor_period_s=0.02,
            orders=program.orders() if rank == 0 else None,
            record=events.append,
            clock=lambda: gpus[0].now_s,
        )
        for rank in range(8)
    ]
    jobs = [SimJob(gpu, TRACE) for gpu in gpus]
    for index in range(4000):
        for gpu, job, hand, conductor in zip(gpus, jobs, actuators, conductors, strict=True):
            seconds = job.iterate()
            hand.tick()
            conductor.iteration(Iteration(index=index, end_s=gpu.now_s, duration_s=seconds))
    blocks = [event for event in events if isinstance(event, Block)]
    alone = SimJob(SimGpu(V100, noise=QUIET), TRACE).iterate()
    assert blocks[0].iteration_s == pytest.approx(1.05 * alone, rel=0.02)
    powers = [sample.power_w for sample in (gpu.sample() for gpu in gpus) if sample.power_w]
    assert blocks[-1].energy_j == pytest.approx(sum(powers) * alone, rel=0.1)
    assert blocks[-1].phase == "hold"
    assert program.choice.setting != DEFAULT
    assert true_slowdown(program.choice.setting) <= BOUND
    assert len({gpu.settings() for gpu in gpus}) == 1
