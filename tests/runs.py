"""Synthetic run directories, for tests of whatever reads one (the report, `top`).

The files are of the kind that a session writes; the job behind them is a formula with a known true
saving and slowdown, so that a reader's estimates and intervals can be checked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kilter.core import codec
from kilter.core.events import AnyEvent, Block, Decided, Failed, Refused, Sampled, Started, Stopped
from kilter.core.label import Label
from kilter.core.plan import Effect, Goal, Plan, SetClocks
from kilter.core.setting import DeviceInfo, Setting
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.core.units import MHZ

TOP_HZ = 1530 * MHZ
PROBED_MHZ = (1380, 1245, 1080, 960)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenJob:
    """A made-up job: `clock_share` of its time follows the SM clock, the rest does not."""

    iteration_s: float = 0.084
    power_w: float = 252.0
    clock_share: float = 0.05
    noise: float = 0.004
    drift: float = 0.003
    throttled_share: float = 0.03

    def time_ratio(self, setting: Setting) -> float:
        f = (setting.sm_clock_hz or TOP_HZ) / TOP_HZ
        return 1.0 - self.clock_share + self.clock_share / f

    def energy_ratio(self, setting: Setting) -> float:
        f = (setting.sm_clock_hz or TOP_HZ) / TOP_HZ
        return self.time_ratio(setting) * (0.42 + 0.58 * math.pow(f, 2.3))


@dataclass(slots=True)
class RunWriter:
    """The events of one rank, from a job and a script of blocks."""

    job: WrittenJob = WrittenJob()
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    mode: str = "govern"
    max_slowdown: float | None = 0.02
    label: Label = Label.SIMULATED
    uuid: str = "SIM-V100-0"
    events: list[AnyEvent] = field(default_factory=list)
    t_s: float = 0.0
    number: int = 0
    pair: int = 0
    iterations: int = 0
    rehearsed: int = 0
    rehearsing: bool = False
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        # All ranks order their blocks alike; each has noise of its own.
        self._random = random.Random(self.seed)
        self._noise = random.Random(f"{self.seed} {self.rank}")

    _noise: random.Random = field(init=False)

    def start(self, reason: str = "the device is simulated and may be set") -> None:
        self.events.append(
            Started(
                t_s=0.0,
                kilter="0.1.0",
                wall_time="2026-01-01T12:00:00+00:00",
                command=("train.py", "--epochs", "3"),
                rank=self.rank,
                world_size=self.world_size,
                device=DeviceInfo(
                    name="Tesla V100-SXM2-16GB",
                    uuid=self.uuid,
                    backend="sim" if self.label is Label.SIMULATED else "nvml",
                    label=self.label,
                    can_set=self.mode == "govern",
                    has_energy_counter=True,
                    sensor_period_s=0.1,
                ),
                goal=Goal(max_slowdown=self.max_slowdown),
                found=Setting(),
                mode=self.mode,
                mode_reason=reason,
            )
        )

    def block(
        self,
        phase: str,
        setting: Setting,
        *,
        pair: int | None = None,
        arm: str = "candidate",
        iterations: int = 12,
    ) -> None:
        """One block, with the samples that a sensor gives meanwhile."""
        job, noise = self.job, self._noise
        drift = job.drift * math.sin(self.t_s / 40.0)
        time_s = job.iteration_s * job.time_ratio(setting)
        time_s *= 1.0 + drift + noise.gauss(0.0, job.noise)
        energy_j = job.iteration_s * job.power_w * job.energy_ratio(setting)
        energy_j *= 1.0 + drift + noise.gauss(0.0, 2.0 * job.noise)
        throttled = noise.random() < job.throttled_share
        if throttled:
            time_s *= 1.06
        begin_s, self.t_s = self.t_s, self.t_s + iterations * time_s
        for i in range(4):
            self.events.append(
                Sampled(
                    t_s=begin_s + (self.t_s - begin_s) * (i + 0.5) / 4,
                    device_t_s=begin_s + (self.t_s - begin_s) * (i + 0.5) / 4,
                    power_w=energy_j / time_s * (1.0 + noise.gauss(0.0, 0.01)),
                    sm_clock_hz=setting.sm_clock_hz or TOP_HZ,
                    memory_clock_hz=877 * MHZ,
                    sm_utilisation=0.97,
                    temperature_c=61.0,
                )
            )
        self.number += 1
        if self.rehearsing:
            self.rehearsed += iterations
        else:
            self.iterations += iterations
        self.events.append(
            Block(
                t_s=self.t_s,
                number=self.number,
                pair=pair,
                phase=phase,
                arm=arm,
                setting=setting,
                iterations=iterations,
                iteration_s=time_s,
                energy_j=energy_j,
                device_begin_s=begin_s,
                device_end_s=self.t_s,
                clean=not throttled,
                why_not="throttled" if throttled else None,
                rehearsed=self.rehearsing,
            )
        )

    def pairs(self, phase: str, setting: Setting, count: int) -> None:
        for _ in range(count):
            self.pair += 1
            arms = [("baseline", Setting()), ("candidate", setting)]
            self._random.shuffle(arms)
            for arm, value in arms:
                self.block(phase, value, pair=self.pair, arm=arm)

    def decide(self, state: str, setting: Setting, reason: str) -> None:
        self.events.append(
            Decided(
                t_s=self.t_s,
                state=state,
                setting=setting,
                reason=reason,
                time_ratio=self.job.time_ratio(setting),
                energy_ratio=self.job.energy_ratio(setting),
            )
        )

    def refuse(self, what: str, reason: str, code: str | None = None) -> None:
        self.events.append(Refused(t_s=self.t_s, what=what, reason=reason, code=code))

    def fail(self, where: str, error: str) -> None:
        self.events.append(Failed(t_s=self.t_s, where=where, error=error))

    def stop(
        self,
        outcome: str = "finished",
        *,
        restored: bool = True,
        energy_disagreement: float | None = None,
    ) -> None:
        self.events.append(
            Stopped(
                t_s=self.t_s,
                iterations=self.iterations,
                rehearsed_iterations=self.rehearsed,
                outcome=outcome,
                found=Setting(),
                after=Setting(),
                restored=restored,
                energy_method="counter",
                sampler_cost_s=0.031,
                hook_cost_s=5e-6 * self.iterations,
                label=self.label,
                energy_disagreement=energy_disagreement,
            )
        )


def governed(
    job: WrittenJob | None = None,
    *,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    label: Label = Label.SIMULATED,
    uuid: str = "SIM-V100-0",
    chosen_mhz: int = 1245,
    confirm_pairs: int = 14,
    hold_pairs: int = 6,
    rehearse_hold: bool = False,
) -> RunWriter:
    """A run that probes four clocks from the top down, confirms one, and holds it to the end."""
    run = RunWriter(
        job or WrittenJob(), seed=seed, rank=rank, world_size=world_size, label=label, uuid=uuid
    )
    chosen = Setting(sm_clock_hz=chosen_mhz * MHZ)
    run.start()
    for _ in range(4):
        run.block("warm", Setting(), arm="baseline")
    for mhz in PROBED_MHZ:
        setting = Setting(sm_clock_hz=mhz * MHZ)
        run.decide("probe", setting, f"probe {setting}: the next step down")
        run.pairs("probe", setting, 2)
    run.refuse(
        "memory clock",
        "this card takes one memory clock only; nothing to do",
    )
    run.decide("confirm", chosen, f"confirm {chosen}: the most promising of those probed")
    run.pairs("confirm", chosen, confirm_pairs)
    run.decide("hold", chosen, f"safe after {confirm_pairs} pairs")
    run.rehearsing = rehearse_hold
    for _ in range(hold_pairs):
        for _ in range(4):
            run.block("hold", chosen)
        run.pairs("hold", chosen, 1)
    return run


def lines(events: Iterable[AnyEvent]) -> Iterator[bytes]:
    """What a session writes: one JSON object per line."""
    for event in events:
        yield msgspec.json.encode(event) + b"\n"


def write(directory: Path, *recorders: RunWriter) -> Path:
    """Event files of all ranks. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for run in recorders:
        file = directory / f"events-rank{run.rank}.jsonl"
        file.write_bytes(b"".join(lines(run.events)))
    return directory


def plan_of(setting: Setting, job: WrittenJob) -> Plan:
    """What a planner would have written for this job."""
    effect = Effect(time_ratio=job.time_ratio(setting), energy_ratio=job.energy_ratio(setting))
    return Plan(
        planner="job_clocks",
        actions=(SetClocks(setting=setting, effect=effect, reason="confirmed"),),
        effect=effect,
        reason="one clock for the whole job",
        label=Label.SIMULATED,
    )


def write_plan(directory: Path, setting: Setting, job: WrittenJob) -> None:
    codec.save(directory / "plan.json", plan_of(setting, job))


def write_trace(directory: Path, iteration_s: float = 0.084, *, name: str = "layer") -> None:
    """A small convnet's iteration: twelve layers, forward and backward, and an optimizer step."""
    layers = [
        (f"layer{1 + i // 3}.{i % 3}.conv", 3.0 + i % 4, 1e9 * 2.0 ** (i % 5)) for i in range(12)
    ]
    parts: list[tuple[str, Kind, float, float | None, float | None]] = [
        ("data", Kind.DATA_WAIT, 2.0, None, None),
        *((layer, Kind.FORWARD, w, work, 6e7 * w) for layer, w, work in layers),
        *((layer, Kind.BACKWARD, 1.9 * w, 2 * work, 1.3e8 * w) for layer, w, work in layers[::-1]),
        ("SGD", Kind.OPTIMIZER, 5.0, 5e7, 4e8),
    ]
    unit_s = 0.97 * iteration_s / sum(part[2] for part in parts)
    operations, t_s = [], 0.0
    for part, kind, weight, work, bytes_moved in parts:
        operations.append(
            Operation(
                name=part,
                kind=kind,
                start_s=t_s,
                duration_s=weight * unit_s,
                flops=work,
                bytes_moved=bytes_moved,
            )
        )
        t_s += weight * unit_s
    codec.save(
        directory / "trace.json",
        IterationTrace(
            iteration_s=iteration_s,
            operations=tuple(operations),
            timeline="gpu",
            device="Tesla V100-SXM2-16GB",
            label=Label.SIMULATED,
            iterations=5,
        ),
    )
