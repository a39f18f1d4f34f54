"""The time model of a training job on shared GPUs: prediction, fit, and numbers of fairness.

A step of a job alone takes `host_s + comm_s + max over GPUs (fixed_s + sample_s * samples)`. A GPU
is time-shared among processes, so work on it takes longer by the mean number of other jobs that
are on that GPU at the same time. Each job's presence depends on its own step time: a fixed point,
solved by iteration. This is approximate mean value analysis of a closed queueing network with
processor sharing (Y. Bard 1979; P. J. Schweitzer 1979).

On a real GPU (`JobCost.on_gpu`) three things are otherwise (measured,
docs/measurements/sharing.md): switching between processes takes time; communication is work on the
GPU like any other; and the host launches kernels ahead of the GPU, so that its time hides where the
GPU has much to do.
Pure: numpy, no device, no clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

_ROUNDS = 100
_TOLERANCE = 1e-5
_SWITCHING = 0.15
"""All work on a GPU takes so much longer once processes take turns there. It was fitted to ten
pairs of networks on an H100 (2026-11-25): 0.149 to 0.151."""


class JobCost(msgspec.Struct, frozen=True):
    """Time of one step of a job, in parts."""

    sample_s: float
    """One sample takes this on a GPU."""
    fixed_s: float = 0.0
    """Each active rank takes this GPU time whatever its samples (kernel launches, the
    optimizer)."""
    host_s: float = 0.0
    """The host needs this time (data loading, Python). Without `on_gpu` no GPU of the job works in
    it; with it, the host launches a step in it, while the GPU works. Then a step takes the root of
    the sum of the squares of both times: a smooth maximum."""
    comm_s: float = 0.0
    """A step with more than one active rank has so much exposed communication."""
    contention: float = 1.0
    """How much a neighbour that is always there delays: 1 is fair time slicing, 0 nothing."""
    on_gpu: bool = False
    """Whether the ranks are processes on GPUs. A rank that waits for the others of its job then
    keeps its GPU busy: NCCL's kernels take their time slices until the slowest rank has come."""


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
    several = active.sum(axis=1) > 1
    on_gpu = np.array([[cost.on_gpu] for cost in costs])
    comm = comm[:, None] * several
    step, residence = _fixed_point(demand, host[:, None], comm, contention[:, None, None], on_gpu)

    def back(values: Array) -> Array:
        return np.moveaxis(values, -1, 0).reshape(*samples.shape[:-2], *values.shape[:-1])

    return TimePrediction(
        step_s=back(step),
        presence=back(residence / step[:, None]),
        utilisation=back(np.minimum((demand / step[:, None]).sum(axis=0), 1.0)),
    )


def _fixed_point(
    demand: Array, host: Array, comm: Array, contention: Array, on_gpu: np.ndarray[Any, Any]
) -> tuple[Array, Array]:
    """Step times by (job, case), and residence by (job, GPU, case). Cases that have converged are
    laid aside, so that a few slow ones cost little."""
    work = comm + demand.max(axis=1, initial=0.0)
    step = np.maximum(_step(host, work, on_gpu), 1e-12)
    residence = demand.copy()
    left = np.arange(step.shape[-1])
    steps, residences, demands = step, residence, demand
    for _ in range(_ROUNDS):
        active = demands > 0.0
        waits = on_gpu[:, None] & (active.sum(axis=1) > 1)[:, None] & active
        presence = np.where(waits, work[:, None], residences) / steps[:, None]
        others = presence.sum(axis=0) - presence
        stretch = _stretch(contention, others, on_gpu[:, None])
        residences = demands * stretch
        talk = comm[:, None] * np.where(on_gpu[:, None], stretch, 1.0) * active
        work = (residences + talk).max(axis=1, initial=0.0)
        before, steps = steps, np.maximum(_step(host, work, on_gpu), 1e-12)
        moving = np.abs(steps / before - 1.0).max(axis=0, initial=0.0) >= _TOLERANCE
        if 2 * np.count_nonzero(moving) <= len(left):
            step[:, left], residence[..., left] = steps, residences
            left = left[moving]
            if not len(left):
                return step, residence
            steps, residences, demands = (
                steps[:, moving],
                residences[..., moving],
                demands[..., moving],
            )
            comm, work = comm[:, moving], work[:, moving]
    step[:, left], residence[..., left] = steps, residences
    return step, residence


def _stretch(contention: Any, others: Array, on_gpu: Any) -> Array:
    """How many times longer work on a GPU takes beside a mean number of other jobs' work."""
    switching = 1.0 + _SWITCHING * on_gpu * np.minimum(others, 1.0)
    stretch: Array = (1.0 + contention * others) * switching
    return stretch


def _step(host: Array, work: Array, on_gpu: Any) -> Array:
    step: Array = np.where(on_gpu, np.hypot(host, work), host + work)
    return step


def alone_s(cost: JobCost, samples: Sequence[int]) -> float:
    """Step time with the GPUs to itself."""
    return float(predict([cost], np.array([samples])).step_s[0])


class Observation(msgspec.Struct, frozen=True):
    """Mean times of steps at one data ratio. A GPU without samples has compute time 0."""

    samples: tuple[int, ...]
    compute_s: tuple[float, ...]
    """On each GPU the step takes this without communication and without the wait for other
    ranks."""
    step_s: float
    pressure: tuple[float, ...]
    """Each GPU has this mean number of other jobs' kernels (their residence over their step)."""


_OBSERVATIONS = 16
"""The times of so many ratios are kept."""


def observe(
    kept: dict[tuple[int, ...], Observation], ratios: tuple[int, ...], seen: Observation
) -> None:
    """Keep what was seen last at a data ratio, and of the ratios the last ones."""
    kept.pop(ratios, None)
    kept[ratios] = seen
    while len(kept) > _OBSERVATIONS:
        del kept[next(iter(kept))]


_CONTENTIONS = (1.0, 0.75, 0.5, 0.25, 0.0, 1.25, 1.5, 2.0)
_NOISE = 0.03
"""An observed time has this relative error."""
_FIXED_PART = 0.5
_CONTENTION_SD = 0.5
"""What is expected before anything was seen: the time of a step is proportional to its samples, as
it is where the GPU is the bottleneck, give or take half a step each for what does not depend on
them on the GPU and on the host; and neighbours get fair time slices, give or take a half. Without
this, jobs whose ratio never changes, or hardly, would have no single best fit: noise would decide
between parts that only other ratios could tell apart."""


def fit(observations: Sequence[Observation], on_gpu: bool = False) -> JobCost | None:
    """The cost that explains the observations best; None without any.

    Non-negative least squares, with the expectations above as further equations (ridge
    regression), of `compute = host + (1 + contention * pressure) * (fixed + sample * samples)`;
    communication is what a step takes beyond its slowest rank. On a GPU (see `JobCost`) the times
    of host and GPU are squared, and the host's is searched for. The answer is unique and depends
    continuously on the times. How far it can be relied on for other samples: `spread`.
    """
    if (rows := _Rows.of(observations)) is None:
        return None
    best: tuple[float, float, Array] | None = None
    # GPUs are divided evenly, as measured; elsewhere, too, the expectation decides unless seen.
    varied = not on_gpu and np.ptp(rows.pressure) > 0.1
    for contention in _CONTENTIONS if varied else _CONTENTIONS[:1]:
        residual, parts = rows.launched_ahead(contention) if on_gpu else rows.added(contention)
        residual += ((contention - 1.0) / _CONTENTION_SD) ** 2
        if best is None or residual < best[0]:
            best = (residual, contention, parts)
    assert best is not None
    sample_s, fixed_s, host_s = (float(value) for value in best[2])
    comms = [
        max(o.step_s - max(o.compute_s), 0.0)
        / (_stretch(best[1], np.array(o.pressure), True).max() if on_gpu else 1.0)
        for o in observations
        if sum(part > 0 for part in o.samples) > 1
    ]
    comm_s = float(np.median(comms)) if comms else 0.0
    return JobCost(sample_s, fixed_s, host_s, comm_s, best[1], on_gpu)


def spread(observations: Sequence[Observation], samples: Sequence[int]) -> float:
    """Relative standard deviation of the computing time that a fit predicts for a step alone with
    so many samples on its GPUs: small where such samples were seen, large where the observations
    do not tell what depends on the samples. Infinite without any."""
    if (rows := _Rows.of(observations)) is None:
        return math.inf
    columns, values = rows.equations(1.0)
    covariance = np.linalg.inv(columns.T @ columns)
    most = np.array([max(samples), 1.0, 1.0])
    parts = _non_negative(columns, values)[1]
    return float(np.sqrt(most @ covariance @ most) / (most @ parts))


class _Rows(msgspec.Struct, frozen=True):
    """One row for each observation and active GPU."""

    samples: Array
    times: Array
    pressure: Array

    @classmethod
    def of(cls, observations: Sequence[Observation]) -> _Rows | None:
        rows = [
            (o.samples[g], o.compute_s[g], o.pressure[g])
            for o in observations
            for g in range(len(o.samples))
            if o.samples[g] > 0 and o.compute_s[g] > 0.0
        ]
        return cls(*np.array(rows, dtype=float).T) if rows else None

    def added(self, contention: float) -> tuple[float, Array]:
        return _non_negative(*self.equations(contention))

    def launched_ahead(self, contention: float) -> tuple[float, Array]:
        """Residual and parts (sample, fixed, host) where the host launches ahead of a GPU."""
        stretch = _stretch(contention, self.pressure, True)
        usual_s = _FIXED_PART * float(np.median(self.times / stretch))
        expected, best = np.array([[0.0, 1.0 / usual_s]]), None
        for host_s in np.linspace(0.0, 0.98, 50) * self.times.min():
            work = np.sqrt(self.times**2 - host_s**2)
            scale = work / self.times**2 / _NOISE  # errors of the whole time, relative
            columns = np.stack([stretch * self.samples, stretch], 1) * scale[:, None]
            found, parts = _non_negative(
                np.vstack([columns, expected]), np.append(work * scale, 0.0)
            )
            found += (host_s / usual_s) ** 2
            if best is None or found < best[0]:
                best = found, np.append(parts, host_s)
        assert best is not None
        return best

    def equations(self, contention: float) -> tuple[Array, Array]:
        """Columns (sample, fixed, host) and values of the equations, each over its expected error:
        relative errors count, so that short times do too."""
        stretch = 1.0 + contention * self.pressure
        columns = np.stack([stretch * self.samples, stretch, np.ones_like(self.times)], 1)
        alone_s = float(np.median(self.times / stretch))
        expected = np.diag([0.0, 1.0, 1.0])[1:] / (_FIXED_PART * alone_s)
        scaled = columns / (_NOISE * self.times)[:, None]
        return np.vstack([scaled, expected]), np.append(np.full(len(scaled), 1 / _NOISE), [0.0, 0])


def _non_negative(columns: Array, values: Array) -> tuple[float, Array]:
    """Least squares with coefficients of at least 0, by trying every set of those above 0."""
    products, right = columns.T @ columns, columns.T @ values
    best = 0.0, np.zeros(columns.shape[1])
    for size in range(1, len(right) + 1):
        for subset in map(list, itertools.combinations(range(len(right)), size)):
            answer = np.linalg.solve(products[np.ix_(subset, subset)], right[subset])
            better = -float(right[subset] @ answer)  # than nothing at all
            if better < best[0] and bool(np.all(answer >= 0.0)):
                parts = np.zeros(len(right))
                parts[subset] = answer
                best = better, parts
    return best[0] + float(values @ values), best[1]


def jain(slowdowns: Sequence[float]) -> float | None:
    """Jain's index of the speeds 1 / slow-down: 1 is perfectly fair (R. Jain et al. 1984)."""
    speeds = [1.0 / value for value in slowdowns]
    return sum(speeds) ** 2 / (len(speeds) * sum(x * x for x in speeds)) if speeds else None
