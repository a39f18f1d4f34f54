"""The time model of a training job on shared GPUs: prediction, fit, and numbers of fairness.

A step of a job alone takes `host_s + comm_s + max over GPUs (fixed_s + sample_s * samples)`. A GPU
is time-shared among processes, so work on it takes longer by the mean number of other jobs that
are on that GPU at the same time. Each job's presence depends on its own step time: a fixed point,
solved by iteration. This is approximate mean value analysis of a closed queueing network with
processor sharing (Y. Bard 1979; P. J. Schweitzer 1979). Pure: numpy, no device, no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

_ROUNDS = 100
_TOLERANCE = 1e-5


class JobCost(msgspec.Struct, frozen=True):
    """Time of one step of a job, in parts."""

    sample_s: float
    """GPU time per sample."""
    fixed_s: float = 0.0
    """GPU time of each active rank whatever its samples (kernel launches, the optimizer)."""
    host_s: float = 0.0
    """Time in which no GPU of the job works (data loading, Python)."""
    comm_s: float = 0.0
    """Exposed communication of a step with more than one active rank."""
    contention: float = 1.0
    """How much a neighbour that is always there delays: 1 is fair time slicing, 0 nothing."""


class TimePrediction(msgspec.Struct, frozen=True):
    """Step time of each job, and busy time over time of each GPU; leading axes are cases."""

    step_s: Array
    presence: Array
    """Mean number of each job's kernels on each GPU: residence time over step time."""
    utilisation: Array


def predict(costs: Sequence[JobCost], samples: Array) -> TimePrediction:
    """Steps of jobs that share GPUs. `samples` has axes (..., job, GPU)."""
    samples = np.asarray(samples, dtype=float)
    # The many cases last: numpy is slow at sums over a short last axis.
    parts = np.ascontiguousarray(np.moveaxis(samples.reshape(-1, *samples.shape[-2:]), 0, -1))
    fixed, sample, host, comm, contention = (
        np.array([getattr(cost, name) for cost in costs], dtype=float)
        for name in ("fixed_s", "sample_s", "host_s", "comm_s", "contention")
    )
    active = parts > 0
    demand = np.where(active, fixed[:, None, None] + sample[:, None, None] * parts, 0.0)
    rest = host[:, None] + comm[:, None] * (active.sum(axis=1) > 1)
    step, residence = _fixed_point(demand, rest, contention[:, None, None])

    def back(values: Array) -> Array:
        return np.moveaxis(values, -1, 0).reshape(*samples.shape[:-2], *values.shape[:-1])

    return TimePrediction(
        step_s=back(step),
        presence=back(residence / step[:, None]),
        utilisation=back(np.minimum((demand / step[:, None]).sum(axis=0), 1.0)),
    )


def _fixed_point(demand: Array, rest: Array, contention: Array) -> tuple[Array, Array]:
    """Step times by (job, case), and residence by (job, GPU, case). Cases that have converged are
    laid aside, so that a few slow ones cost little."""
    step = np.maximum(rest + demand.max(axis=1, initial=0.0), 1e-12)
    residence = demand.copy()
    left = np.arange(step.shape[-1])
    steps, residences, demands, rests = step, residence, demand, rest
    for _ in range(_ROUNDS):
        presence = residences / steps[:, None]
        residences = demands * (1.0 + contention * (presence.sum(axis=0) - presence))
        before, steps = steps, np.maximum(rests + residences.max(axis=1, initial=0.0), 1e-12)
        moving = np.abs(steps / before - 1.0).max(axis=0, initial=0.0) >= _TOLERANCE
        if 2 * np.count_nonzero(moving) <= len(left):
            step[:, left], residence[..., left] = steps, residences
            left = left[moving]
            if not len(left):
                return step, residence
            steps, residences = steps[:, moving], residences[..., moving]
            demands, rests = demands[..., moving], rests[:, moving]
    step[:, left], residence[..., left] = steps, residences
    return step, residence


def alone_s(cost: JobCost, samples: Sequence[int]) -> float:
    """Step time with the GPUs to itself."""
    return float(predict([cost], np.array([samples])).step_s[0])


class Observation(msgspec.Struct, frozen=True):
    """Mean times of steps at one data ratio. A GPU without samples has compute time 0."""

    samples: tuple[int, ...]
    compute_s: tuple[float, ...]
    """Per GPU: the step without communication and without the wait for other ranks."""
    step_s: float
    pressure: tuple[float, ...]
    """Per GPU: mean number of other jobs' kernels there (their residence over their step)."""


_CONTENTIONS = (1.0, 0.75, 0.5, 0.25, 0.0, 1.25, 1.5, 2.0)
_BETTER = 0.9
"""A further parameter has to take at least a tenth off the residual."""


def fit(observations: Sequence[Observation]) -> JobCost | None:
    """The cost that explains the observations best; None without any.

    Non-negative least squares of `compute = host + (1 + contention * pressure) * (fixed + sample *
    samples)`; communication is what a step takes beyond its slowest rank. Parts that the
    observations cannot tell apart are put into the time per sample.
    """
    rows = [
        (o.samples[g], o.compute_s[g], o.pressure[g])
        for o in observations
        for g in range(len(o.samples))
        if o.samples[g] > 0 and o.compute_s[g] > 0.0
    ]
    if not rows:
        return None
    samples, times, pressure = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    varied = bool(np.ptp(pressure) > 0.1) and len(rows) > 2
    best: tuple[float, float, Array] | None = None
    for contention in _CONTENTIONS if varied else _CONTENTIONS[:1]:
        stretch = 1.0 + contention * pressure
        found = _non_negative(np.stack([stretch * samples, stretch, np.ones_like(times)], 1), times)
        if best is None or found[0] < best[0] * _BETTER - 1e-18:
            best = (found[0], contention, found[1])
    assert best is not None
    comms = [
        max(o.step_s - max(o.compute_s), 0.0)
        for o in observations
        if sum(part > 0 for part in o.samples) > 1
    ]
    sample_s, fixed_s, host_s = (float(value) for value in best[2])
    comm_s = float(np.median(comms)) if comms else 0.0
    return JobCost(sample_s, fixed_s, host_s, comm_s, best[1])


def _non_negative(columns: Array, values: Array) -> tuple[float, Array]:
    """Least squares with coefficients of at least 0: the first subset of columns, smallest first,
    that no larger one betters by a tenth. Relative errors count, so that short times do too."""
    weight = 1.0 / np.maximum(values, 1e-12)
    target = values * weight
    best: tuple[float, Array] | None = None
    count = columns.shape[1]
    for size in range(1, count + 1):
        for subset in itertools.combinations(range(count), size):
            chosen = columns[:, subset] * weight[:, None]
            answer, _, rank, _ = np.linalg.lstsq(chosen, target, rcond=1e-6)
            if rank < size or bool(np.any(answer < 0.0)):
                continue
            residual = float(np.sum((chosen @ answer - target) ** 2))
            if best is None or residual < best[0] * _BETTER - 1e-9:
                full = np.zeros(count)
                full[list(subset)] = answer
                best = (residual, full)
    assert best is not None  # the first column alone is always possible
    return best


def jain(slowdowns: Sequence[float]) -> float | None:
    """Jain's index of the speeds 1 / slow-down: 1 is perfectly fair (R. Jain et al. 1984)."""
    speeds = [1.0 / value for value in slowdowns]
    return sum(speeds) ** 2 / (len(speeds) * sum(x * x for x in speeds)) if speeds else None
