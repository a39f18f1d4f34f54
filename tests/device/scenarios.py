"""A job on a simulated GPU: one traced iteration repeated, by the script of a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tests.device.faulty_gpu import Fault, FaultyGpu, Trouble

from kilter.core.setting import Setting
from kilter.core.trace import IterationTrace, Kind
from kilter.device.sim.gpu import STEADY, SimGpu
from kilter.device.sim.noise import Noise
from kilter.device.sim.profile import Profile
from kilter.device.sim.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPhase:
    """A stretch of a job with its own amount of work per iteration."""

    iterations: int
    flops_factor: float = 1.0
    bytes_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens to a job: how its work changes, how noisy it is, what goes wrong and when."""

    what: str
    phases: tuple[JobPhase, ...] = (JobPhase(iterations=1),)
    """Repeated for ever."""
    growth: float = 0.0
    """More work per iteration, as a fraction per thousand iterations."""
    skip_every: int = 0
    """Every so many iterations the optimizer's step is skipped; 0 = never."""
    noise: Noise = STEADY
    faults: tuple[Fault, ...] = ()

    def gpu(self, profile: Profile, *, seed: int = 0) -> SimGpu:
        """A device with this scenario's noise and faults."""
        return FaultyGpu(profile, seed=seed, noise=self.noise, faults=self.faults)


def scenarios(
    *, profile: Profile, begin_s: float, end_s: float, found: Setting
) -> Mapping[str, Scenario]:
    """One of each kind, with troubles between two moments of virtual time.

    `found` is the setting whose restore is refused, and `profile` gives the sizes of limits.
    """
    knobs = profile.knobs
    middle_hz = (knobs.sm_lowest_hz + knobs.sm_highest_hz) / 2
    grid = knobs.supported().sm_clocks_hz
    other_hz = min(grid, key=lambda hz: abs(hz - middle_hz))

    def trouble(
        what: str, kind: Trouble, *, value: float = 0.0, setting: Setting | None = None
    ) -> Scenario:
        fault = Fault(trouble=kind, begin_s=begin_s, end_s=end_s, value=value, setting=setting)
        return Scenario(what=what, faults=(fault,))

    near_limit_c = profile.thermal.limit_c - 10.0
    return MappingProxyType(
        {
            "steady": Scenario(what="nothing happens"),
            "two_phases": Scenario(
                what="400 iterations of training, 100 of lighter evaluation, again and again",
                phases=(
                    JobPhase(iterations=400),
                    JobPhase(iterations=100, flops_factor=0.4, bytes_factor=0.7),
                ),
            ),
            "slow_drift": Scenario(what="1 % more work every thousand iterations", growth=0.01),
            "skipped_steps": Scenario(what="every 7th optimizer step is skipped", skip_every=7),
            "noisy": Scenario(
                what="white noise, drift and outliers of a busy machine",
                noise=Noise(white=0.01, drift=0.01, outlier_probability=0.02, power=0.01),
            ),
            "neighbour": trouble(
                "another job makes iterations 15 % longer", Trouble.NEIGHBOUR, value=0.15
            ),
            "thermal": trouble("the cooling air heats up", Trouble.HOT_ROOM, value=near_limit_c),
            "admin_lowers_cap": trouble(
                "the power limit is lowered from outside",
                Trouble.OTHER_TOOL,
                setting=Setting(power_limit_w=knobs.supported().power_limits_w[0]),
            ),
            "other_tool": trouble(
                "somebody else locks the clock",
                Trouble.OTHER_TOOL,
                setting=Setting(sm_clock_hz=other_hz),
            ),
            "set_refused": trouble("the setter is refused", Trouble.SET_REFUSED),
            "restore_refused": trouble(
                "only going back is refused", Trouble.SET_REFUSED, setting=found
            ),
            "set_ignored": trouble("the setter lies", Trouble.SET_IGNORED),
            "set_clipped": trouble(
                "low clocks are not obeyed", Trouble.SET_CLIPPED, value=other_hz
            ),
            "lost": trouble("the device falls off the bus", Trouble.LOST),
            "counter_stuck": trouble("the energy counter stands still", Trouble.COUNTER_STUCK),
            "counter_of_module": trouble(
                "the energy counter also counts a processor",
                Trouble.COUNTER_OF_MODULE,
                value=150.0,
            ),
            "sensors_late": trouble("sensors lag by a second", Trouble.SENSORS_LATE, value=1.0),
        }
    )


class SimJob:
    """A job whose every iteration is simulated. Virtual time is the device's."""

    def __init__(
        self, gpu: SimGpu, trace: IterationTrace, scenario: Scenario | None = None
    ) -> None:
        self.gpu = gpu
        self.iterations = 0
        self._scenario = scenario or Scenario(what="nothing happens")
        self._trace = trace
        self._works: dict[tuple[float, float, bool], Work] = {}

    def iterate(self) -> float:
        """Run the next iteration; its time in (virtual) seconds. Raises `DeviceLost`."""
        scenario = self._scenario
        phase = self._phase()
        grown = round(1 + scenario.growth * self.iterations / 1000, 4)
        skips = scenario.skip_every > 0 and (self.iterations + 1) % scenario.skip_every == 0
        key = (phase.flops_factor * grown, phase.bytes_factor * grown, skips)
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = self._work(*key)
        seconds = self.gpu.run(work)
        self.iterations += 1
        return seconds

    def _work(self, flops_factor: float, bytes_factor: float, skips: bool) -> Work:
        trace = self._trace
        if skips:
            kept = tuple(op for op in trace.operations if op.kind is not Kind.OPTIMIZER)
            trace = replace(trace, operations=kept)
        return self.gpu.work(trace).scaled(flops_factor, bytes_factor)

    def _phase(self) -> JobPhase:
        place = self.iterations % sum(phase.iterations for phase in self._scenario.phases)
        for phase in self._scenario.phases:
            place -= phase.iterations
            if place < 0:
                return phase
        raise AssertionError("the place is inside the cycle")
