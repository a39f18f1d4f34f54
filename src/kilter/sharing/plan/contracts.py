"""The contracts of jobs that share GPUs: which slow-down each allows, and what two stretches under
different clocks say of them. The clock that is set is one that every contract allows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from kilter.core.plan import FREE_MARGIN
from kilter.sharing.plan.snapshot import Ratios

StepTimes = Mapping[str, float]
"""It maps a job to the seconds of one step."""


class ContractedJob(msgspec.Struct, frozen=True):
    """A job as the clocks see it. The moment is that at which its rank of most steps ended
    `iteration`, on that rank's monotonic clock; None before there was one."""

    name: str
    ratios: Ratios
    max_slowdown: float | None
    """What the clocks may cost the job, as a fraction of its step time; None: nothing was said."""
    rank: int = 0
    iteration: int = 0
    ended_s: float | None = None


def bounds(jobs: Sequence[ContractedJob], default: float | None) -> dict[str, float] | str:
    """What each contract allows, as a log ratio; or a sentence on who has none."""
    without = [job.name for job in jobs if job.max_slowdown is None]
    if without and default is None:
        return f"{without[0]} has no contract (kilter share run --max-slowdown 2%)"
    allowed = {j.name: default if j.max_slowdown is None else j.max_slowdown for j in jobs}
    # A contract of 0 means free savings only: nothing can be proven to cost exactly nothing.
    return {name: math.log1p(max(s or 0.0, FREE_MARGIN)) for name, s in allowed.items()}


def step_times(
    before: Sequence[ContractedJob], after: Sequence[ContractedJob], steps: int
) -> dict[str, float] | None:
    """Seconds of a step of each job between two moments; None until every job has made so many."""
    then = {job.name: job for job in before}
    found = {}
    for job in after:
        begun = then[job.name]
        if begun.ended_s is None or job.ended_s is None or begun.rank != job.rank:
            return None
        done = job.iteration - begun.iteration
        if done < steps or job.ended_s <= begun.ended_s:
            return None
        found[job.name] = (job.ended_s - begun.ended_s) / done
    return found


def slowest(candidate: StepTimes, baseline: StepTimes, bound: Mapping[str, float]) -> float:
    """The log ratio of the job that is closest to its contract, or furthest beyond, as it would be
    if that job had the strictest contract of all: at most the strictest bound if every contract is
    kept, and above it if one is broken."""
    strictest = min(bound.values())
    return max(
        math.log(candidate[name] / baseline[name]) - bound[name] + strictest for name in bound
    )


def work_ratio(candidate: StepTimes, baseline: StepTimes) -> float:
    """The mean log ratio of the step times: how much longer the same work of all jobs takes."""
    return statistics.fmean(math.log(candidate[name] / baseline[name]) for name in baseline)
