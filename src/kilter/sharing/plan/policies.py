"""The policies by name. Each is a function from a snapshot to decisions, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable

from kilter.core.reasons import Reason
from kilter.sharing.plan import maxmin, thesis
from kilter.sharing.plan.snapshot import (
    Decision,
    Snapshot,
    allowed,
    even_ratios,
    fits,
    in_force,
    usable,
)

SharingPolicy = Callable[[Snapshot], tuple[Decision, ...]]


def fixed(snapshot: Snapshot) -> tuple[Decision, ...]:
    """Every job keeps the ratio that it began with."""
    return ()


def even(snapshot: Snapshot) -> tuple[Decision, ...]:
    """Every job is split evenly over all GPUs on which it has a rank."""
    decisions = []
    ratios = in_force(snapshot)
    for job in snapshot.jobs:
        if not usable(snapshot, job):
            continue
        new = even_ratios(snapshot, job)
        if new == job.ratios or not allowed(snapshot, job, new):
            continue
        if fits(snapshot, ratios | {job.name: new}):
            ratios[job.name] = new
            reason = Reason("even", job.name, "the same share on every GPU")
            decisions.append(Decision(job.name, job.ratios, new, reason))
    return tuple(decisions)


SHARING_POLICIES: dict[str, SharingPolicy] = {
    "maxmin": maxmin.policy,
    "thesis": thesis.policy,
    "thesis_literal": functools.partial(thesis.policy, literal=True),
    "even": even,
    "fixed": fixed,
}
