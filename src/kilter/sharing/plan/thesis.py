"""Algorithms 1 and 2 of "Improving the Efficiency of DNN Model Inference and Training through
Distribution Mechanisms" (Kim In Mo, master's thesis, Hansung University).

The printed text has gaps and faults. The readings chosen here: loads are compared as they are, but
where a job's share is computed its own load does not count against a GPU; tenths are rounded by
largest remainder, so that they sum to ten; the target of a move is the mid-point of the slow-downs,
`(max + min) / 2`; at least one tenth moves; of equally empty GPUs a job keeps its own. Where the
time of every job is known, each change is rehearsed under the fitted time model: nothing is done
that makes the largest slow-down larger, and with fewer jobs than GPUs, where the text leaves GPUs
without work, jobs get a GPU each only if that promises something; else the slowest job moves.

`literal` takes the text as printed instead: half-up rounding, `(max - min) / 2`, no lower bound,
own load included, no rehearsal. Then a ratio may not sum to ten, and the batch is split in
proportion to it.

The text has ranks without work. Where a job cannot have them (`SharedJob.may_idle`), each of its
ranks keeps one tenth of what the text would take away; literally, the job stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from kilter.core.reasons import Reason
from kilter.sharing.model import predict
from kilter.sharing.plan.snapshot import (
    TENTHS,
    Decision,
    Ratios,
    SharedJob,
    Snapshot,
    allowed,
    at_least_one,
    fits,
    in_force,
    largest_remainder,
    placed,
    shards,
    usable,
)

LEAST_SPREAD = 0.1
"""Nothing moves while the largest less the smallest slow-down is below this. The source is not
legible here, nor in the next one."""
MOST_GAP = 0.2
"""Above this gap between the most and the least used GPU, load is mended first."""
LEAST_FALL = 0.05
"""Jobs get one GPU each if the largest slow-down falls by at least this, relatively."""


def policy(snapshot: Snapshot, *, literal: bool = False) -> tuple[Decision, ...]:
    """Algorithm 1 for every job in turn."""
    if len(snapshot.jobs) < sum(gpu.alive for gpu in snapshot.gpus):
        decisions = _one_gpu_each(snapshot, literal)
        if literal or _promises(snapshot, decisions, LEAST_FALL):
            return decisions
    for job in snapshot.jobs:
        moved = _rebalance(snapshot, job, literal)
        if moved is None:
            continue
        new, code, text = moved
        new = _kept(snapshot, job, new, literal)
        decision = Decision(job.name, job.ratios, new, Reason(code, job.name, text))
        if (
            new != job.ratios
            and _in_order(snapshot, job, new, literal)
            and fits(snapshot, in_force(snapshot) | {job.name: new})
            and (literal or _promises(snapshot, (decision,), 0.0))
        ):
            return (decision,)
    return ()


def _one_gpu_each(snapshot: Snapshot, literal: bool) -> tuple[Decision, ...]:
    """Lines 2 to 10 of Algorithm 1: each job in turn on the emptiest GPU that is left."""
    decisions = []
    ratios = in_force(snapshot)
    pool = {g for g, gpu in enumerate(snapshot.gpus) if gpu.alive}
    for job in snapshot.jobs:
        own = pool.intersection(usable(snapshot, job))
        if not own:
            continue
        load = _load(snapshot, job, literal)
        held = (0,) * len(snapshot.gpus) if literal or job.ratios is None else job.ratios
        g = min(own, key=lambda g: (load[g], -held[g], g))
        pool.remove(g)
        new = _kept(snapshot, job, placed((TENTHS,), (g,), len(snapshot.gpus)), literal)
        if new == job.ratios or not _in_order(snapshot, job, new, literal):
            continue
        if not fits(snapshot, ratios | {job.name: new}):
            continue
        ratios[job.name] = new
        share = "whole" if new[g] == TENTHS else "for most of its work"
        text = f"{job.name} gets GPU {g} {share}: there are fewer jobs than GPUs"
        reason = Reason("fewer-jobs-than-gpus", job.name, text)
        decisions.append(Decision(job.name, job.ratios, new, reason))
    return tuple(decisions)


def _promises(snapshot: Snapshot, decisions: Sequence[Decision], gain: float) -> bool:
    """Whether the decisions lower the largest slow-down by so much, or, for a gain of 0, do not
    raise it, under the fitted time model. Yes where the time of a job is not known."""
    after = {decision.job: decision.after for decision in decisions}
    jobs = [job for job in snapshot.jobs if job.ratios is not None]
    costs = [job.cost for job in jobs if job.cost is not None and job.alone_s]
    if len(costs) < len(snapshot.jobs):
        return True
    before, then = (
        [shards(job.global_batch, moved.get(job.name, job.ratios or ())) for job in jobs]
        for moved in (dict[str, Ratios](), after)
    )
    largest = [
        max(job.slowdown_at(s) for job, s in zip(jobs, step_s.tolist(), strict=True))
        for step_s in predict(costs, np.array([before, then])).step_s
    ]
    return bool(after) and largest[1] <= largest[0] * (1.0 - gain)


def _rebalance(snapshot: Snapshot, job: SharedJob, literal: bool) -> tuple[Ratios, str, str] | None:
    """Lines 11 to 23 of Algorithm 1; None where the ratio stays."""
    known = {j.name: j.slowdown for j in snapshot.jobs if j.slowdown is not None}
    if job.ratios is None or job.name not in known:
        return None
    high, low = max(known.values()), min(known.values())
    if job.name != min(name for name, value in known.items() if value == high):
        return None
    if high - low < LEAST_SPREAD:
        return None
    own = usable(snapshot, job)
    if not own:
        return None
    busy = [gpu.utilisation for gpu in snapshot.gpus]
    g_max = max(own, key=lambda g: (busy[g], -g))
    g_min = min(own, key=lambda g: (busy[g], g))
    if busy[g_max] - busy[g_min] > MOST_GAP:
        load = _load(snapshot, job, literal)
        used = {g for g in own if job.ratios[g] > 0} | {g_min}
        if sum(Fraction(1) - _exact(load[g]) for g in used) <= 0:
            return None
        new = update_utilisation(job.ratios, used, g_min, load, literal=literal)
        return new, "load", f"{job.name} is the slowest, and GPU {g_min} has the most time left"
    destination = min(own, key=lambda g: (_mean_slowdown(snapshot, g), g))
    source = max(own, key=lambda g: (job.ratios[g] if job.ratios else 0, -g))
    if source == destination:
        return None
    new = update_slowdown(
        job.ratios, source, destination, known[job.name], high, low, literal=literal
    )
    text = f"{job.name} is the slowest, and jobs on GPU {destination} are the least slowed down"
    return new, "slow-down", text


def update_utilisation(
    ratios: Ratios, used: set[int], g_min: int, load: Sequence[float], *, literal: bool = False
) -> Ratios:
    """Algorithm 2, DR_Update_Util: shares in proportion to the time left on each GPU used, the
    least used one included. Without any time left the ratio stays (literal: division by zero)."""
    used = used | {g_min}
    left = [
        Fraction(1) - _exact(value) if g in used else Fraction(0) for g, value in enumerate(load)
    ]
    if literal:
        whole = sum(left)
        return tuple(math.floor(part / whole * TENTHS + Fraction(1, 2)) for part in left)
    if sum(left) <= 0:
        return ratios
    return largest_remainder(left, TENTHS)


def update_slowdown(
    ratios: Ratios,
    source: int,
    destination: int,
    slowdown: float,
    high: float,
    low: float,
    *,
    literal: bool = False,
) -> Ratios:
    """Algorithm 2, DR_Update_SD: tenths move from the job's largest share until its slow-down
    would, in proportion, be half-way between the largest and the smallest."""
    own, top, bottom = _exact(slowdown), _exact(high), _exact(low)
    per_tenth = own / ratios[source]
    target = (top - bottom if literal else top + bottom) / 2
    moved = math.floor(abs(own - target) / per_tenth)
    if not literal:
        moved = min(max(moved, 1), ratios[source])
    new = list(ratios)
    new[source] -= moved
    new[destination] += moved
    return tuple(new)


def _exact(value: float) -> Fraction:
    """A measured number as the decimal it was written as, so that floors fall where one expects."""
    return Fraction(value).limit_denominator(10**6)


def _load(snapshot: Snapshot, job: SharedJob, literal: bool) -> list[float]:
    """Utilisation of each GPU; the job's own share of it is taken off, unless literal."""
    own = job.busy if job.busy and not literal else (0.0,) * len(snapshot.gpus)
    return [max(gpu.utilisation - mine, 0.0) for gpu, mine in zip(snapshot.gpus, own, strict=True)]


def _mean_slowdown(snapshot: Snapshot, g: int) -> float:
    """Mean slow-down of the jobs on a GPU; of an empty one 0."""
    there = [
        job.slowdown
        for job in snapshot.jobs
        if job.ratios is not None and job.ratios[g] > 0 and job.slowdown is not None
    ]
    return sum(there) / len(there) if there else 0.0


def _kept(snapshot: Snapshot, job: SharedJob, ratios: Ratios, literal: bool) -> Ratios:
    """The ratio with a tenth for each rank of a job whose ranks may not be idle."""
    if literal or job.may_idle:
        return ratios
    return at_least_one(ratios, usable(snapshot, job))


def _in_order(snapshot: Snapshot, job: SharedJob, ratios: Ratios, literal: bool) -> bool:
    """A literal ratio need not sum to ten, but it has to be one that a job can run."""
    if not literal:
        return allowed(snapshot, job, ratios)
    own = usable(snapshot, job)
    inside = all(g in own for g, ratio in enumerate(ratios) if ratio)
    active = job.may_idle or all(ratios[g] > 0 for g in own)
    return inside and active and min(ratios) >= 0 and sum(ratios) > 0
