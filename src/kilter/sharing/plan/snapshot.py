"""What a policy sees and what it answers: jobs, GPUs, data ratios, and the rules for a ratio."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from kilter.core.reasons import Reason
from kilter.sharing.model import JobCost

TENTHS = 10
"""A job has so many tenths of a data ratio to give out."""

Ratios = tuple[int, ...]
"""The data ratio of a job is its share of the global batch on each GPU of the machine, in
tenths."""


class JobMemory(msgspec.Struct, frozen=True):
    """GPU memory of a job on one GPU: what any rank needs, and what each sample adds."""

    replica_bytes: int
    sample_bytes: int

    def bytes_at(self, samples: int) -> int:
        """What a rank with so many samples needs; an idle rank may keep its replica."""
        return self.replica_bytes + self.sample_bytes * samples


class Progress(msgspec.Struct, frozen=True):
    """How far a job has come. `total_steps` is None for a job of unknown length."""

    elapsed_s: float = 0.0
    steps_done: float = 0.0
    total_steps: int | None = None


class SharedGpu(msgspec.Struct, frozen=True):
    """One GPU. `utilisation` is the fraction of time with work on it; `free_bytes` is what all
    jobs of the snapshot together may use, None if nobody counts."""

    utilisation: float = 0.0
    free_bytes: int | None = None
    alive: bool = True


class SharedJob(msgspec.Struct, frozen=True):
    """One training job. `ratios` are those in force, None before the job has any."""

    name: str
    global_batch: int
    ratios: Ratios | None = None
    ranks: tuple[int, ...] | None = None
    """The job has a rank on these GPUs; None: on every one."""
    cost: JobCost | None = None
    alone_s: float | None = None
    """A step takes this with the whole machine to itself."""
    progress: Progress = Progress()
    busy: tuple[float, ...] = ()
    """This job's own work takes this fraction of each GPU's time."""
    memory: JobMemory | None = None
    min_samples: int = 1
    """A rank that is active has at least so many samples (more than one for BatchNorm)."""
    may_idle: bool = True
    """Whether a rank may have ratio 0; not so under FSDP, or for a script with collectives: then
    its ratio is 1 to 10 on each live GPU on which the job has a rank."""
    periods_since_move: int | None = None
    """The ratio last changed so many periods ago; None if it never did."""
    slowdown: float | None = None
    """It is predicted completion over run-alone completion at the observed pace."""

    def slowdown_at(self, step_s: float) -> float:
        """Predicted completion time over run-alone completion time, if steps take `step_s` from
        now on. Of a job of unknown length: step time over run-alone step time."""
        assert self.alone_s is not None
        offset, slope = self.slowdown_line()
        return offset + slope * step_s / self.alone_s

    def slowdown_line(self) -> tuple[float, float]:
        """The slow-down as `offset + slope * step_s / alone_s`."""
        total = self.progress.total_steps
        if total is None or self.alone_s is None or total <= self.progress.steps_done:
            return 0.0, 1.0
        left = (total - self.progress.steps_done) / total
        return self.progress.elapsed_s / (total * self.alone_s), left


class Snapshot(msgspec.Struct, frozen=True):
    """The machine at the beginning of a period. Jobs are in order of arrival."""

    gpus: tuple[SharedGpu, ...]
    jobs: tuple[SharedJob, ...]


class Decision(msgspec.Struct, frozen=True):
    """A new data ratio of one job, and why."""

    job: str
    before: Ratios | None
    after: Ratios
    reason: Reason


def largest_remainder(weights: Sequence[int | Fraction], total: int) -> tuple[int, ...]:
    """`total` whole units split in proportion to `weights`; ties go to the lowest index."""
    whole = sum(weights)
    divided = [divmod(weight * total, whole) for weight in weights]
    parts = [int(part) for part, _ in divided]
    order = sorted(range(len(weights)), key=lambda i: (-divided[i][1], i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


@functools.lru_cache(maxsize=2**16)
def shards(batch: int, ratios: Ratios) -> tuple[int, ...]:
    """Samples per GPU: `batch` split by the ratio, largest remainder. While the batch has enough
    samples, every GPU with a ratio above 0 gets at least one (a short last batch may not)."""
    active = [g for g, ratio in enumerate(ratios) if ratio > 0]
    return at_least_one(largest_remainder(ratios, batch), active)


def at_least_one(parts: Sequence[int], active: Sequence[int]) -> tuple[int, ...]:
    """The same whole units with one or more at each of these places, taken from where there are
    most; unchanged where there are fewer units than places."""
    found = list(parts)
    if sum(parts) >= len(active):
        for g in active:
            if found[g] == 0:
                found[max(range(len(found)), key=found.__getitem__)] -= 1
                found[g] = 1
    return tuple(found)


def usable(snapshot: Snapshot, job: SharedJob) -> tuple[int, ...]:
    """The live GPUs on which the job has a rank."""
    own = range(len(snapshot.gpus)) if job.ranks is None else job.ranks
    return tuple(g for g in own if snapshot.gpus[g].alive)


def even_ratios(snapshot: Snapshot, job: SharedJob) -> Ratios:
    """The ten tenths split evenly over the usable GPUs. What does not divide goes to other GPUs
    for each job, so that it adds up nowhere."""
    own = usable(snapshot, job)
    offset = snapshot.jobs.index(job) if job in snapshot.jobs else 0
    parts = largest_remainder([1] * len(own), TENTHS)
    ratios = [0] * len(snapshot.gpus)
    extra = TENTHS - parts[-1] * len(own)
    for i, part in enumerate(parts):
        ratios[own[(i + offset * extra) % len(own)]] = part
    return tuple(ratios)


@functools.cache
def compositions(count: int) -> tuple[Ratios, ...]:
    """Every way to give ten tenths to `count` GPUs."""
    bars = itertools.combinations(range(TENTHS + count - 1), count - 1)
    edges = ((-1, *bar, TENTHS + count - 1) for bar in bars)
    return tuple(tuple(b - a - 1 for a, b in itertools.pairwise(edge)) for edge in edges)


def allowed(snapshot: Snapshot, job: SharedJob, ratios: Ratios) -> bool:
    """Whether the ratio is right for the job itself: ten tenths, on usable GPUs only, and enough
    samples for every active rank (never more than an even split would give)."""
    own = usable(snapshot, job)
    if len(ratios) != len(snapshot.gpus) or sum(ratios) != TENTHS or min(ratios) < 0:
        return False
    if any(ratio and g not in own for g, ratio in enumerate(ratios)):
        return False
    if not job.may_idle and any(ratios[g] == 0 for g in own):
        return False
    fewest = min(job.min_samples, job.global_batch // len(own))
    parts = shards(job.global_batch, ratios)
    return all(part >= fewest for part, ratio in zip(parts, ratios, strict=True) if ratio)


def fits(snapshot: Snapshot, ratios: Mapping[str, Ratios | None]) -> bool:
    """Whether all jobs together fit into the memory of every GPU. A job without figures of memory
    is not counted; an idle rank is counted with its replica."""
    needs = [0] * len(snapshot.gpus)
    for job in snapshot.jobs:
        given = ratios.get(job.name)
        if job.memory is None or given is None:
            continue
        for g, samples in enumerate(shards(job.global_batch, given)):
            if given[g] or (job.ranks is not None and g in job.ranks):
                needs[g] += job.memory.bytes_at(samples)
    return all(
        gpu.free_bytes is None or need <= gpu.free_bytes
        for gpu, need in zip(snapshot.gpus, needs, strict=True)
    )


def in_force(snapshot: Snapshot) -> dict[str, Ratios | None]:
    """The ratios of all jobs as they are."""
    return {job.name: job.ratios for job in snapshot.jobs}


def first_ratios(snapshot: Snapshot, job: SharedJob) -> Ratios | None:
    """The ratio of a job that joins: even, or the most even one that fits into the memory that the
    others leave. None: the job has to wait."""
    own = usable(snapshot, job)
    if not own:
        return None
    others = in_force(snapshot)
    even = even_ratios(snapshot, job)
    wholes = (placed(parts, own, len(snapshot.gpus)) for parts in compositions(len(own)))
    for ratios in (even, *sorted(wholes, key=lambda r: (sum(x * x for x in r), r))):
        if allowed(snapshot, job, ratios) and fits(snapshot, others | {job.name: ratios}):
            return ratios
    return None


def placed(parts: Sequence[int], own: Sequence[int], count: int) -> Ratios:
    """These parts on the GPUs `own` of `count`, and nothing on the others."""
    ratios = [0] * count
    for g, part in zip(own, parts, strict=True):
        ratios[g] = part
    return tuple(ratios)


def shown(ratios: Ratios | None) -> str:
    """`[4,3,3,0]`, or `none`."""
    return "none" if ratios is None else f"[{','.join(map(str, ratios))}]"
