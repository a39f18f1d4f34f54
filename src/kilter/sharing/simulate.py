"""Fair sharing on a simulated machine in virtual time: the same policies, the same fit.

Between two events (a job comes, a job ends, a period begins) step times follow the time model with
the true costs of the file. What the policy sees is fitted to noisy observations of these steps,
as on a real machine. Pure: virtual time only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from kilter.core.codec import check_numbers, read
from kilter.core.errors import FileError
from kilter.core.label import Label
from kilter.sharing.model import (
    Array,
    JobCost,
    Observation,
    TimePrediction,
    fit,
    jain,
    observe,
    predict,
)
from kilter.sharing.model import alone_s as alone_of
from kilter.sharing.plan.policies import SharingPolicy
from kilter.sharing.plan.snapshot import (
    TENTHS,
    Decision,
    JobMemory,
    Progress,
    Ratios,
    SharedGpu,
    SharedJob,
    Snapshot,
    even_ratios,
    first_ratios,
    shards,
)

PLACEMENT_SCHEMA = "kilter.sharing/1"
MOST_PERIODS = 100_000
"""A rehearsal has at most so many: each is a decision, and a stretch in the answer."""
_EPSILON_S = 1e-9


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    global_batch: int
    total_steps: int
    cost: JobCost
    arrival_s: float = 0.0
    ratios: Ratios | None = None
    """The ratio it begins with; the most even one that fits if absent."""
    alone_step_s: float | None = None
    """A step takes this with the machine to itself; if absent, it comes from `cost` at an even
    split."""
    memory: JobMemory | None = None
    min_samples: int = 1
    may_idle: bool = True


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rehearsal file: the GPUs, the jobs, and how they are watched."""

    schema: str
    gpus: int
    jobs: tuple[JobSpec, ...]
    gpu_memory_bytes: int | None = None
    period_s: float = 20.0
    noise: float = 0.0
    """Observed times have this relative standard deviation."""
    seed: int = 0
    source: str = ""
    """Where the costs come from."""
    label: str = Label.SIMULATED.value


class JobResult(msgspec.Struct, frozen=True):
    """What became of one job. `slowdown` counts from its arrival."""

    name: str
    arrival_s: float
    finish_s: float
    alone_s: float
    """The whole job takes this with the machine to itself."""
    alone_source: str
    slowdown: float
    rho: float
    """It is finish-time fairness: time over the time on 1/n of the machine (n: jobs of the
    file)."""
    samples: int


class TimeStretch(msgspec.Struct, frozen=True):
    """A time in which nothing changed."""

    begin_s: float
    end_s: float
    utilisation: tuple[float, ...]
    ratios: dict[str, Ratios]
    slowdowns: dict[str, float]
    """It is the step time over the run-alone step time of each job."""


class Made(msgspec.Struct, frozen=True):
    """A decision and when it was made."""

    t_s: float
    decision: Decision


class SharedOutcome(msgspec.Struct, frozen=True):
    """A rehearsal from the first arrival to the last end."""

    jobs: tuple[JobResult, ...]
    stretches: tuple[TimeStretch, ...]
    decisions: tuple[Made, ...]

    @property
    def slowdowns(self) -> list[float]:
        return [job.slowdown for job in self.jobs]

    @property
    def makespan_s(self) -> float:
        if not self.jobs:
            return 0.0
        return max(j.finish_s for j in self.jobs) - min(j.arrival_s for j in self.jobs)

    @property
    def jain(self) -> float | None:
        return jain(self.slowdowns)

    @property
    def samples_per_s(self) -> float:
        return sum(job.samples for job in self.jobs) / max(self.makespan_s, _EPSILON_S)

    @property
    def utilisation(self) -> float:
        """Mean over the GPUs and over the time in which at least two jobs were there (if there
        never were two: over the time with one)."""
        shared = [s for s in self.stretches if len(s.ratios) > 1] or [
            s for s in self.stretches if s.ratios
        ]
        whole = sum(s.end_s - s.begin_s for s in shared)
        if whole <= 0.0:
            return 0.0
        return sum((s.end_s - s.begin_s) * float(np.mean(s.utilisation)) for s in shared) / whole


def load(path: Path) -> Machine:
    """Read a rehearsal file; `FileError` with one line that says what is wrong."""
    try:
        found = msgspec.json.decode(read(path))
        check_numbers(found, str(path))
        machine = msgspec.convert(found, Machine)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not a rehearsal of sharing ({error})") from error
    if (flaw := _flaw(machine)) is not None:
        raise FileError(f"{path}: {flaw}")
    return machine


def _flaw(machine: Machine) -> str | None:
    """What is wrong with a file whose types are right."""
    if machine.schema != PLACEMENT_SCHEMA:
        return f"schema is {machine.schema!r}, expected {PLACEMENT_SCHEMA!r}"
    if not 1 <= machine.gpus <= 16:
        return f"gpus is {machine.gpus}, expected 1 to 16"
    if not machine.jobs:
        return "there are no jobs"
    if not 0.0 < machine.period_s < math.inf or not 0.0 <= machine.noise < 1.0:
        return "period_s has to be above 0, and noise from 0 to below 1"
    if machine.period_s * MOST_PERIODS < _longest_s(machine):
        return f"the jobs would run for more than {MOST_PERIODS} periods of {machine.period_s:g} s"
    names = [job.name for job in machine.jobs]
    if len(set(names)) < len(names):
        return "two jobs have the same name"
    return next((flaw for job in machine.jobs if (flaw := _job_flaw(machine, job))), None)


def _longest_s(machine: Machine) -> float:
    """How long all jobs would take one after the other, and on one GPU."""
    return math.fsum(
        job.arrival_s + float(job.total_steps) * float(job.global_batch) * job.cost.sample_s
        for job in machine.jobs
    )


def _job_flaw(machine: Machine, job: JobSpec) -> str | None:
    if not job.name or not job.name.isprintable():
        return f"a job's name is {job.name!r}: it has to be text that can be printed"
    times = [getattr(job.cost, name) for name in job.cost.__struct_fields__]
    if not all(math.isfinite(t) and t >= 0.0 for t in times) or job.cost.sample_s <= 0.0:
        return f"job {job.name!r}: every cost has to be finite and at least 0, sample_s above 0"
    if job.global_batch < 1 or job.total_steps < 1 or job.min_samples < 1:
        return f"job {job.name!r}: global_batch, total_steps and min_samples have to be at least 1"
    if not (math.isfinite(job.arrival_s) and job.arrival_s >= 0.0):
        return f"job {job.name!r}: arrival_s has to be at least 0"
    if job.alone_step_s is not None and not 0.0 < job.alone_step_s < math.inf:
        return f"job {job.name!r}: alone_step_s has to be above 0"
    given = job.ratios
    if given is not None and (len(given) != machine.gpus or sum(given) != TENTHS or min(given) < 0):
        return (
            f"job {job.name!r}: ratios have to be {machine.gpus} numbers of at least 0 that sum "
            f"to {TENTHS}"
        )
    if given is not None and not job.may_idle and min(given) == 0:
        return f"job {job.name!r}: a ratio of 0 needs may_idle true"
    return None


class _Running(msgspec.Struct):
    """A job while it is on the simulated machine."""

    spec: JobSpec
    alone_step_s: float
    alone_source: str
    ratios: Ratios | None = None
    steps: float = 0.0
    step_s: float = 0.0
    moved_s: float | None = None
    presence: tuple[float, ...] = ()
    busy: tuple[float, ...] = ()
    observations: dict[Ratios, Observation] = {}

    @property
    def steps_left(self) -> float:
        return self.spec.total_steps - self.steps


def simulate(machine: Machine, policy: SharingPolicy) -> SharedOutcome:
    return _Simulation(machine, policy).run()


class _Simulation:
    def __init__(self, machine: Machine, policy: SharingPolicy) -> None:
        self._machine, self._policy = machine, policy
        self._random = random.Random(machine.seed)
        self._gpu = SharedGpu(free_bytes=machine.gpu_memory_bytes)
        self._coming = sorted(machine.jobs, key=lambda job: job.arrival_s)
        self._jobs: list[_Running] = []
        self._now = self._coming[0].arrival_s
        self._next_period = self._now + machine.period_s
        self._utilisation: tuple[float, ...] = (0.0,) * machine.gpus
        self._results: list[JobResult] = []
        self._stretches: list[TimeStretch] = []
        self._decisions: list[Made] = []

    def run(self) -> SharedOutcome:
        while self._coming or self._jobs:
            while self._coming and self._coming[0].arrival_s <= self._now + _EPSILON_S:
                self._jobs.append(self._arrived(self._coming.pop(0)))
            self._admit()
            self._predict()
            self._advance(self._until())
            self._finish()
            if self._now >= self._next_period - _EPSILON_S:
                self._decide()
                self._next_period += self._machine.period_s
        return SharedOutcome(tuple(self._results), tuple(self._stretches), tuple(self._decisions))

    def _arrived(self, spec: JobSpec) -> _Running:
        if spec.alone_step_s is not None:
            return _Running(spec, spec.alone_step_s, "given", spec.ratios)
        job = SharedJob(spec.name, spec.global_batch, min_samples=spec.min_samples)
        even = even_ratios(Snapshot((self._gpu,) * self._machine.gpus, ()), job)
        alone = alone_of(spec.cost, shards(spec.global_batch, even))
        return _Running(spec, alone, "model", spec.ratios)

    def _admit(self) -> None:
        """Jobs without a ratio get one as soon as there is room for them."""
        for running in self._jobs:
            if running.ratios is None:
                snapshot = self._snapshot()
                job = next(j for j in snapshot.jobs if j.name == running.spec.name)
                running.ratios = first_ratios(snapshot, job)
        if self._jobs and all(running.ratios is None for running in self._jobs):
            names = ", ".join(running.spec.name for running in self._jobs)
            raise FileError(f"{names}: needs more memory than the empty machine has")

    def _placed(self) -> list[_Running]:
        return [running for running in self._jobs if running.ratios is not None]

    def _predict(self) -> None:
        placed = self._placed()
        found = _predicted(placed, self._machine.gpus)
        self._utilisation = tuple(found.utilisation.tolist())
        for i, running in enumerate(placed):
            running.step_s = float(found.step_s[i])
            running.presence = tuple(found.presence[i].tolist())
            samples = shards(running.spec.global_batch, running.ratios or ())
            cost = running.spec.cost
            running.busy = tuple(
                (cost.fixed_s + cost.sample_s * part) / running.step_s if part else 0.0
                for part in samples
            )

    def _until(self) -> float:
        """The next moment at which something changes."""
        ends = [self._now + r.steps_left * r.step_s for r in self._placed()]
        arrivals = [self._coming[0].arrival_s] if self._coming else []
        return max(min([*ends, *arrivals, self._next_period]), self._now)

    def _advance(self, until: float) -> None:
        placed = self._placed()
        if until > self._now:
            self._stretches.append(
                TimeStretch(
                    self._now,
                    until,
                    self._utilisation,
                    {r.spec.name: r.ratios or () for r in placed},
                    {r.spec.name: r.step_s / r.alone_step_s for r in placed},
                )
            )
        for running in placed:
            running.steps += (until - self._now) / running.step_s
        self._now = until

    def _finish(self) -> None:
        share = len(self._machine.jobs)
        for running in [r for r in self._placed() if r.steps_left * r.step_s <= 1e-6]:
            self._jobs.remove(running)
            spec = running.spec
            alone = spec.total_steps * running.alone_step_s
            time = self._now - spec.arrival_s
            self._results.append(
                JobResult(
                    name=spec.name,
                    arrival_s=spec.arrival_s,
                    finish_s=self._now,
                    alone_s=alone,
                    alone_source=running.alone_source,
                    slowdown=time / alone,
                    rho=time / (alone * share),
                    samples=spec.total_steps * spec.global_batch,
                )
            )

    def _decide(self) -> None:
        if not self._jobs:
            return
        self._predict()  # one may just have ended
        self._observe()
        by_name = {running.spec.name: running for running in self._jobs}
        for decision in self._policy(self._snapshot()):
            running = by_name[decision.job]
            running.ratios, running.moved_s = decision.after, self._now
            self._decisions.append(Made(self._now, decision))

    def _observe(self) -> None:
        placed = self._placed()
        presence = np.array([running.presence for running in placed])
        for i, running in enumerate(placed):
            assert running.ratios is not None
            samples = shards(running.spec.global_batch, running.ratios)
            others = presence.sum(axis=0) - presence[i]
            host = running.spec.cost.host_s
            times = [running.presence[g] * running.step_s + host if part else 0.0
                     for g, part in enumerate(samples)]  # fmt: skip
            comm = running.step_s - max(times)
            seen = [time * self._noise() for time in times]
            observation = Observation(
                samples, tuple(seen), max(seen) + comm * self._noise(), tuple(others.tolist())
            )
            observe(running.observations, running.ratios, observation)

    def _noise(self) -> float:
        return max(self._random.gauss(1.0, self._machine.noise), 0.1)

    def _snapshot(self) -> Snapshot:
        jobs = tuple(self._job(running) for running in self._jobs)
        return Snapshot(tuple(self._gpu_now(g) for g in range(self._machine.gpus)), jobs)

    def _gpu_now(self, g: int) -> SharedGpu:
        return SharedGpu(self._utilisation[g], self._gpu.free_bytes)

    def _job(self, running: _Running) -> SharedJob:
        spec = running.spec
        elapsed = self._now - spec.arrival_s
        job = SharedJob(
            name=spec.name,
            global_batch=spec.global_batch,
            ratios=running.ratios,
            cost=fit(list(running.observations.values())),
            alone_s=running.alone_step_s,
            progress=Progress(elapsed, running.steps, spec.total_steps),
            busy=running.busy,
            memory=spec.memory,
            min_samples=spec.min_samples,
            may_idle=spec.may_idle,
            periods_since_move=self._periods_since(running.moved_s),
        )
        if not running.step_s:
            return job
        return msgspec.structs.replace(job, slowdown=job.slowdown_at(running.step_s))

    def _periods_since(self, moved_s: float | None) -> int | None:
        if moved_s is None:
            return None
        return round((self._now - moved_s) / self._machine.period_s)


def _predicted(placed: Sequence[_Running], gpus: int) -> TimePrediction:
    if not placed:
        nothing: Array = np.zeros(0)
        return TimePrediction(nothing, np.zeros((0, gpus)), np.zeros(gpus))
    samples = [shards(r.spec.global_batch, r.ratios or ()) for r in placed]
    return predict([r.spec.cost for r in placed], np.array(samples))
