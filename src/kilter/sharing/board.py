"""What the daemon knows of the jobs, and when it decides: the same policies as in a rehearsal.

Pure: the time is given by the caller (a clock that never goes back), reports come as values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from kilter.sharing.history import AloneTimes, job_key
from kilter.sharing.messages import JobStatus, JobSummary, RankStatus, RatioTarget
from kilter.sharing.model import JobCost, Observation, alone_s, fit, observe, spread
from kilter.sharing.plan.attribution import EnergyAccount
from kilter.sharing.plan.contracts import ContractedJob
from kilter.sharing.plan.policies import SharingPolicy
from kilter.sharing.plan.snapshot import (
    JobMemory,
    Progress,
    Ratios,
    SharedGpu,
    SharedJob,
    Snapshot,
    even_ratios,
    shards,
)
from kilter.sharing.probe import Probes
from kilter.sharing.simulate import Made, TimeStretch

GONE_AFTER_S = 10.0
"""Without a report for this time a job is taken for dead."""
STALLED_AFTER_S = 60.0
"""Without a new iteration for this time (and twenty steps) a job no longer counts."""
_STEPS_TO_OBSERVE = 3
_MOST_SPREAD = 0.3
"""A run-alone time that the time model knows worse than this is not told."""
_STEPS_ALONE = 30
"""A job alone on the machine has so many, for its run-alone time."""


class _Record(msgspec.Struct):
    """One job over time."""

    status: JobStatus
    heard_s: float
    advanced_s: float
    moved_s: float | None = None
    target: RatioTarget | None = None
    observations: dict[Ratios, Observation] = {}
    cost: JobCost | None = None
    """It explains the observations."""


class Board:
    """Jobs by slot, in order of arrival."""

    def __init__(
        self,
        gpus: Sequence[int],
        policy: SharingPolicy,
        period_s: float,
        history: AloneTimes | None = None,
    ) -> None:
        self.gpus, self._policy, self._period_s = tuple(gpus), policy, period_s
        self._records: dict[int, _Record] = {}
        self._gone: dict[int, int] = {}
        """It has the last report of each job that is forgotten: the report stays in the store."""
        self._alone_since: tuple[int, int] | None = None
        self._decided_s: float | None = None
        self._drawn_s: float | None = None
        self.history = dict(history or {})
        """It holds run-alone times of earlier runs, and what was seen in this one."""
        self.probes = Probes()
        self.energy = EnergyAccount(len(self.gpus))
        self.decisions: list[Made] = []
        self.stretches: list[TimeStretch] = []

    def report(self, slot: int, status: JobStatus, now_s: float) -> None:
        """A job's report; an old one again is no sign of life."""
        if any(gpu not in self.gpus for gpu in status.gpus):
            return
        record = self._records.get(slot)
        if record is None and status.number > self._gone.get(slot, 0):
            self._records[slot] = _Record(status, now_s, now_s)
        elif record is not None and status.number > record.status.number:
            if status.iteration != record.status.iteration:
                record.advanced_s = now_s
            record.status, record.heard_s = status, now_s

    def meter(self, now_s: float, counters_j: Sequence[float | None]) -> None:
        """The energy counter of each GPU now; None where there is none."""
        presence = {
            self._name(slot): self._shared_presence(record.status)
            for slot, record in self._records.items()
        }
        self.energy.read(now_s, counters_j, presence)

    def forget(self, slot: int) -> None:
        if (record := self._records.pop(slot, None)) is not None:
            self._gone[slot] = record.status.number

    def tick(self, now_s: float) -> dict[int, RatioTarget]:
        """Forget the dead, note how things stand, and, once a period, decide. Returns new targets
        by slot."""
        for slot, record in list(self._records.items()):
            if now_s - record.heard_s > GONE_AFTER_S:
                self.forget(slot)
        self._observe()
        self._learn_alone()
        self._draw(now_s)
        if self._decided_s is None:
            self._decided_s = now_s
        probing = self._probe(now_s)
        if probing or self.probes.running:
            self._decided_s = now_s
            return probing
        if now_s - self._decided_s < self._period_s:
            return {}
        self._decided_s = now_s
        return self._decide(now_s)

    def _probe(self, now_s: float) -> dict[int, RatioTarget]:
        """What a probe asks of the jobs."""
        statuses = {slot: record.status for slot, record in self._running(now_s).items()}
        even = {
            slot: tuple(self._even(s)[self.gpus.index(g)] for g in s.gpus)
            for slot, s in statuses.items()
        }
        wanted = self.probes.tick(now_s, statuses, even)
        return {
            slot: self._aim(slot, ratios, self.probes.notes[-1], now_s, pause_s)
            for slot, (ratios, pause_s) in wanted.items()
        }

    def _aim(
        self, slot: int, by_rank: Ratios, reason: str, now_s: float, pause_s: float = 0.0
    ) -> RatioTarget:
        record = self._records[slot]
        number = 1 if record.target is None else record.target.number + 1
        record.target = RatioTarget(number, by_rank, reason, pause_s)
        record.moved_s = now_s
        return record.target

    def _decide(self, now_s: float) -> dict[int, RatioTarget]:
        snapshot = self.snapshot(now_s)
        slots = {self._name(slot): slot for slot in self._records}
        targets = {}
        for decision in self._policy(snapshot):
            slot = slots[decision.job]
            gpus = self._records[slot].status.gpus
            by_rank = tuple(decision.after[self.gpus.index(g)] for g in gpus)
            targets[slot] = self._aim(slot, by_rank, str(decision.reason), now_s)
            self.decisions.append(Made(now_s, decision))
        return targets

    def _name(self, slot: int) -> str:
        """Two jobs may have one name."""
        return f"{self._records[slot].status.name}#{slot}"

    # How things stand.

    def _running(self, now_s: float) -> dict[int, _Record]:
        """Jobs that train: a stalled one is left out until it moves again."""
        return {
            slot: record
            for slot, record in self._records.items()
            if now_s - record.advanced_s <= max(STALLED_AFTER_S, 20 * _step_s(record.status))
        }

    def _by_gpu(self, status: JobStatus, values: Sequence[float]) -> list[float]:
        """Values by rank, as values by GPU of the machine."""
        spread = [0.0] * len(self.gpus)
        for gpu, value in zip(status.gpus, values, strict=True):
            spread[self.gpus.index(gpu)] += value
        return spread

    def _ratios(self, status: JobStatus) -> Ratios:
        """By GPU of the machine; what the script itself does is even."""
        if status.ratios is None:
            return self._even(status)
        return tuple(int(value) for value in self._by_gpu(status, status.ratios))

    def _ranks(self, status: JobStatus) -> tuple[int, ...]:
        return tuple(sorted(self.gpus.index(gpu) for gpu in status.gpus))

    def _presence(self, status: JobStatus) -> list[float]:
        """The fraction of time in which the job is on each GPU."""
        return self._by_gpu(
            status, [min(r.work_s / r.step_s, 1.0) if r.step_s > 0 else 0.0 for r in status.ranks]
        )

    def _shared_presence(self, status: JobStatus) -> list[float | None]:
        """As `_presence`; None on a GPU where the job has no process (a rank on a CPU has none)."""
        there = {
            gpu
            for gpu, rank in zip(status.gpus, status.ranks, strict=True)
            if rank.reserved_bytes is not None
        }
        return [
            part if gpu in there else None
            for gpu, part in zip(self.gpus, self._presence(status), strict=True)
        ]

    def _observe(self) -> None:
        """Note what the steps at the present ratios take, once they have settled."""
        presence = {
            slot: np.array(self._by_gpu(record.status, _held(record.status)))
            for slot, record in self._records.items()
        }
        whole = sum(presence.values(), np.zeros(len(self.gpus)))
        for slot, record in self._records.items():
            status = record.status
            if not _settled(status):
                continue
            samples = self._by_gpu(status, [rank.samples for rank in status.ranks])
            seen = Observation(
                tuple(int(value) for value in samples),
                tuple(self._by_gpu(status, [max(r.step_s - r.comm_s, 0.0) for r in status.ranks])),
                _step_s(status),
                tuple((whole - presence[slot]).tolist()),
            )
            observe(record.observations, self._ratios(status), seen)
            record.cost = fit(
                [*record.observations.values(), *self._alone(slot, record)], _on_gpus(status)
            )

    def _learn_alone(self) -> None:
        """The step time of a job with the machine to itself and an even split, once all the steps
        that it is the mean of were taken so."""
        if len(self._records) != 1:
            self._alone_since = None
            return
        ((slot, record),) = self._records.items()
        status = record.status
        if self._alone_since is None or self._alone_since[0] != slot:
            self._alone_since = slot, status.iteration
        steps = [rank.steps for rank in status.ranks]
        taken = status.iteration - self._alone_since[1]
        ranks = self._ranks(status)
        even = len(ranks) == len(self.gpus) and self._ratios(status) == self._even(status)
        if even and _settled(status) and min(steps) >= _STEPS_ALONE and max(steps) <= taken:
            key = self._key(status)
            self.history.pop(key, None)
            self.history[key] = _step_s(status)

    def _key(self, status: JobStatus) -> str:
        return job_key(status.name, status.facts.global_batch, len(status.gpus))

    def _even(self, status: JobStatus) -> Ratios:
        job = SharedJob("", status.facts.global_batch, ranks=self._ranks(status))
        return even_ratios(Snapshot((SharedGpu(),) * len(self.gpus), ()), job)

    def utilisation(self) -> tuple[float, ...]:
        """The busy fraction of each GPU as the jobs report their own work: others are not seen."""
        busy = np.zeros(len(self.gpus))
        for record in self._records.values():
            busy += self._presence(record.status)
        return tuple(np.minimum(busy, 1.0).tolist())

    def snapshot(self, now_s: float) -> Snapshot:
        """What the policy sees."""
        used = self.utilisation()
        gpus = tuple(
            SharedGpu(utilisation=used[g], free_bytes=self._free_bytes(gpu))
            for g, gpu in enumerate(self.gpus)
        )
        jobs = tuple(self._job(slot, r, now_s) for slot, r in self._running(now_s).items())
        return Snapshot(gpus, jobs)

    def _free_bytes(self, gpu: int) -> int | None:
        """What the jobs may use together: what nobody holds, and what they hold themselves. What
        another program has taken is not in it."""
        free, held = None, 0
        for record in self._records.values():
            for own, rank in zip(record.status.gpus, record.status.ranks, strict=True):
                if own == gpu and rank.free_bytes is not None:
                    free = rank.free_bytes if free is None else min(free, rank.free_bytes)
                    held += rank.reserved_bytes or 0
        return None if free is None else free + held

    def _job(self, slot: int, record: _Record, now_s: float) -> SharedJob:
        status, facts = record.status, record.status.facts
        cost, alone, _ = self._cost(slot, record)
        job = SharedJob(
            name=self._name(slot),
            global_batch=facts.global_batch,
            ratios=self._ratios(status),
            ranks=self._ranks(status),
            cost=cost,
            alone_s=alone,
            progress=Progress(status.elapsed_s, status.iteration, facts.total_steps),
            busy=tuple(self._presence(status)),
            memory=_memory(status.ranks),
            min_samples=facts.min_samples,
            may_idle=facts.may_idle,
            periods_since_move=None
            if record.moved_s is None
            else int((now_s - record.moved_s) / self._period_s + 0.5),
        )
        step_s = _step_s(status)
        if alone is None or not step_s:
            return job
        return msgspec.structs.replace(job, slowdown=job.slowdown_at(step_s))

    def _alone(self, slot: int, record: _Record) -> Iterator[Observation]:
        """A known run-alone time, for the fit: of what the host does, nothing is seen beside others
        that keep the GPUs busy."""
        _, known_s, source = self._cost(slot, record)
        if known_s is not None and source != "model":
            samples = shards(record.status.facts.global_batch, self._even(record.status))
            times = tuple(known_s if part else 0.0 for part in samples)
            yield Observation(samples, times, known_s, (0.0,) * len(samples))

    def _cost(self, slot: int, record: _Record) -> tuple[JobCost | None, float | None, str | None]:
        """The fitted cost, the run-alone step time, and where that comes from."""
        status = record.status
        cost = record.cost
        if status.alone_step_s is not None:
            return cost, status.alone_step_s, "given"
        if (probed := self.probes.alone_s.get(slot)) is not None:
            return cost, probed, "probe"
        if (seen := self.history.get(self._key(status))) is not None:
            return cost, seen, "history"
        if cost is None:
            return None, None, None
        samples = shards(status.facts.global_batch, self._even(status))
        return cost, alone_s(cost, samples), "model"

    def _is_a_guess(self, record: _Record) -> bool:
        """Whether the observations leave open what a step alone takes: policies go by the guess,
        but nobody is told it for a fact."""
        even = shards(record.status.facts.global_batch, self._even(record.status))
        return spread(list(record.observations.values()), even) > _MOST_SPREAD

    def contracted(self, now_s: float) -> tuple[ContractedJob, ...]:
        """The jobs that train, with what lower clocks may cost them; none while some pause."""
        if self.probes.running:
            return ()
        found = []
        for slot, record in self._running(now_s).items():
            status = record.status
            rank = max(range(len(status.ranks)), key=lambda r: status.ranks[r].iteration)
            found.append(
                ContractedJob(
                    self._name(slot),
                    self._ratios(status),
                    status.max_slowdown,
                    rank,
                    status.ranks[rank].iteration,
                    status.ranks[rank].ended_s,
                )
            )
        return tuple(found)

    def summaries(self, now_s: float) -> tuple[JobSummary, ...]:
        """All jobs, the stalled ones too."""
        running = self._running(now_s)
        found = []
        for slot, record in self._records.items():
            status = record.status
            cost, alone, source = self._cost(slot, record)
            if source == "model" and self._is_a_guess(record):
                alone = source = None
            step_s = _step_s(status) or None
            found.append(
                JobSummary(
                    name=self._name(slot),
                    pid=status.pid,
                    state="running" if slot in running else "stalled",
                    iteration=status.iteration,
                    step_s=step_s,
                    slowdown=None if not alone or step_s is None else step_s / alone,
                    alone_s=alone,
                    alone_source=source,
                    ratios=self._ratios(status),
                    cost=cost,
                    note=status.facts.note,
                    energy_j=self.energy.of_job(self._name(slot)),
                )
            )
        return tuple(found)

    def _draw(self, now_s: float) -> None:
        """Note how things stand since the last tick, for the page."""
        begun_s, self._drawn_s = self._drawn_s, now_s
        if begun_s is None or not self._records:
            return
        jobs = self.summaries(now_s)
        self.stretches.append(
            TimeStretch(
                begun_s,
                now_s,
                self.utilisation(),
                {job.name: job.ratios for job in jobs if job.ratios is not None},
                {job.name: job.slowdown for job in jobs if job.slowdown is not None},
            )
        )


def _settled(status: JobStatus) -> bool:
    """Whether every rank's times belong to the ratio in force."""
    if status.ratios is None:
        return all(rank.steps >= _STEPS_TO_OBSERVE for rank in status.ranks)
    expected = shards(status.facts.global_batch, status.ratios)
    return all(
        rank.samples == samples and (rank.steps >= _STEPS_TO_OBSERVE or samples == 0)
        for rank, samples in zip(status.ranks, expected, strict=True)
    )


def _on_gpus(status: JobStatus) -> bool:
    return any(rank.reserved_bytes is not None for rank in status.ranks)


def _held(status: JobStatus) -> list[float]:
    """The fraction of time for which each rank keeps its GPU busy: on GPUs also while it waits for
    the other ranks (see `JobCost.on_gpu`)."""
    waits = _on_gpus(status)
    return [
        min((r.work_s + waits * r.comm_s) / r.step_s, 1.0) if r.step_s > 0 else 0.0
        for r in status.ranks
    ]


def _step_s(status: JobStatus) -> float:
    return max((rank.step_s for rank in status.ranks if rank.samples), default=0.0)


def _memory(ranks: Sequence[RankStatus]) -> JobMemory | None:
    """All memory is put down to the samples: that overestimates what more samples will need."""
    known = [r.reserved_bytes / r.samples for r in ranks if r.reserved_bytes and r.samples]
    return JobMemory(0, round(max(known))) if known else None
