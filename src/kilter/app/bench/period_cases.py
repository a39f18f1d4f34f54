"""Labelled synthetic telemetry: jobs whose iteration ends are known, seen through a GPU's sensors.

A job is a list of phases (seconds, power, SM utilisation, memory utilisation). The sensors update
every so often: power is the mean of the last quarter of the interval (as on A100 and H100,
arXiv 2312.02741), utilisation the mean of all of it or of two, and the energy counter is the
integral. No value here was fitted to a recording.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from kilter.model.period import Telemetry

Array = NDArray[np.float64]

KINDS = (
    "plain",
    "gradient accumulation",
    "evaluation pauses",
    "checkpoint stalls",
    "variable-length batches",
    "too short",
    "steady",
    "irregular",
)
SHARES = (0.2, 0.2, 0.15, 0.1, 0.15, 0.1, 0.05, 0.05)
"""How often each kind is drawn."""


class PeriodCase(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    telemetry: Telemetry
    marks_s: tuple[float, ...]
    """Iterations end at these times."""
    periodic: bool
    """Whether the telemetry can show the period: else the right answer is that there is none."""

    @property
    def period_s(self) -> float:
        return float(np.median(np.diff(self.marks_s)))


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose iteration changes for good."""

    telemetry: Telemetry
    begin_s: float
    """When it changes; `inf` for a job that stays as it is."""
    period_s: float
    """The iterations before the change took this."""
    after_s: float
    """The iterations after the change take this."""


class _Job:
    """Phases in order, and the iteration ends among them."""

    def __init__(self, rng: np.random.Generator, parts: int) -> None:
        self._rng = rng
        self.lengths: list[float] = []
        self.levels: list[tuple[float, float, float]] = []
        self.ends: list[float] = []
        self.t = 0.0
        self._shape = _shape(rng)
        self._parts = parts
        self._last = (rng.uniform(0.08, 0.3), _level(rng)) if parts > 1 else None

    def add(self, seconds: float, level: tuple[float, float, float]) -> None:
        self.lengths.append(seconds)
        self.levels.append(level)
        self.t += seconds

    def new_shape(self) -> None:
        """Other phases from now on."""
        self._shape = _shape(self._rng)

    def iteration(self, seconds: float, jitter: float) -> None:
        last, level = self._last or (0.0, (0.0, 0.0, 0.0))
        for _ in range(self._parts):
            for share, own in self._shape:
                noise = float(np.exp(self._rng.normal(0.0, jitter)))
                self.add(seconds * (1 - last) / self._parts * share * noise, own)
        if last:
            self.add(seconds * last, level)
        self.ends.append(self.t)


def _level(rng: np.random.Generator) -> tuple[float, float, float]:
    power = float(rng.uniform(100.0, 690.0))
    sm = float(np.clip(power / 7.0 + rng.normal(0.0, 15.0), 0.0, 100.0)) / 100
    return power, sm, sm * float(rng.uniform(0.1, 0.9))


def _shape(rng: np.random.Generator) -> list[tuple[float, tuple[float, float, float]]]:
    """Two to five phases of one micro-batch, of which two differ by 15 % of power or more."""
    while True:
        n = int(rng.integers(2, 6))
        shares = rng.dirichlet(np.full(n, 3.0))
        levels = [_level(rng) for _ in range(n)]
        powers = [level[0] for level in levels]
        if max(powers) > 1.15 * min(powers) and shares.min() > 0.05:
            return list(zip(map(float, shares), levels, strict=True))


def case(seed: int) -> PeriodCase:
    """The case of this number: the same on every machine."""
    rng = np.random.default_rng([seed, 20160])
    kind = str(rng.choice(KINDS, p=SHARES))
    update_s = float(np.exp(rng.uniform(np.log(0.05), np.log(1.0))))
    parts = int(rng.integers(2, 9)) if kind == "gradient accumulation" else 1
    per_period = float(np.exp(rng.uniform(np.log(2.5), np.log(60.0))))
    if kind == "too short":
        per_period = float(rng.uniform(0.2, 1.8))
    if kind == "gradient accumulation":  # micro-batches that the sensor can show
        per_period = parts * float(np.exp(rng.uniform(np.log(2.5), np.log(12.0))))
    seconds = per_period * update_s
    job = _job(rng, kind, seconds, parts)
    has_counter = kind == "too short" or bool(rng.random() < 0.7)
    telemetry = _seen(rng, job, update_s, has_counter=has_counter)
    return PeriodCase(
        kind=kind,
        telemetry=telemetry,
        marks_s=tuple(job.ends),
        periodic=kind not in ("too short", "steady", "irregular"),
    )


def change(seed: int) -> Change:
    """A job that changes its iteration: its period by 10 % to twofold, its phases, or both; every
    fourth stays as it is."""
    rng = np.random.default_rng([seed, 20161])
    update_s = float(np.exp(rng.uniform(np.log(0.05), np.log(1.0))))
    seconds = update_s * float(np.exp(rng.uniform(np.log(4.0), np.log(60.0))))
    job = _Job(rng, int(rng.integers(1, 4)))
    jitter = float(rng.uniform(0.0, 0.02))
    for _ in range(40):
        job.iteration(seconds, jitter)
    begin_s = job.t
    kind = seed % 4
    factor = 1.0
    if kind in (1, 3):
        factor = float(np.exp(rng.choice([-1, 1]) * rng.uniform(np.log(1.1), np.log(2.0))))
    if kind in (2, 3):
        job.new_shape()
    for _ in range(20):
        job.iteration(seconds * factor, jitter)
    return Change(
        telemetry=_seen(rng, job, update_s, has_counter=False),
        begin_s=begin_s if kind else math.inf,
        period_s=seconds,
        after_s=seconds * factor,
    )


def _job(rng: np.random.Generator, kind: str, seconds: float, parts: int) -> _Job:
    job = _Job(rng, parts)
    count = int(rng.integers(25, 120))
    if kind == "too short":
        count += int(rng.uniform(200, 600))
    jitter = float(rng.uniform(0.0, 0.01))
    every = int(rng.integers(15, 50))
    pause, stall = float(rng.uniform(1.0, 8.0)), float(rng.uniform(0.5, 6.0))
    spread = float(rng.uniform(0.03, 0.15))
    evaluation, stalled, steady = _level(rng), _level(rng), _level(rng)
    for i in range(1, count + 1):
        if kind == "steady":
            job.add(seconds, steady)
            job.ends.append(job.t)
        elif kind == "irregular":
            job.add(seconds * float(rng.exponential()), _level(rng))
            job.ends.append(job.t)
        elif kind == "variable-length batches":
            job.iteration(seconds * float(np.exp(rng.normal(0.0, spread))), jitter)
        else:
            job.iteration(seconds, jitter)
        if kind == "evaluation pauses" and i % every == 0:
            for _ in range(int(rng.integers(3, 10))):
                job.add(pause * seconds / 6, evaluation)
                job.add(pause * seconds / 12, stalled)
        if kind == "checkpoint stalls" and i % every == 0:
            job.add(stall * seconds, stalled)
    return job


def _seen(rng: np.random.Generator, job: _Job, update_s: float, *, has_counter: bool) -> Telemetry:
    """What the sensors of a GPU show of a job."""
    boundaries = np.concatenate([[0.0], np.cumsum(job.lengths)])
    levels = np.array(job.levels)
    integrals = np.vstack([np.zeros(3), np.cumsum(levels * np.array(job.lengths)[:, None], axis=0)])

    def mean(begin: Array, end: Array, which: int) -> Array:
        upper, lower = (np.interp(at, boundaries, integrals[:, which]) for at in (end, begin))
        result: Array = (upper - lower) / (end - begin)
        return result

    noise = float(rng.uniform(0.002, 0.03))
    ticks = np.arange(update_s * (1 + rng.random()), boundaries[-1], update_s)
    power = mean(ticks - update_s / 4, ticks, 0)
    power = power + rng.normal(0.0, noise * power.mean(), len(ticks))
    drift = 1 + 0.02 * np.sin(2 * np.pi * ticks / boundaries[-1] * rng.uniform(0.3, 1.5))
    energy = np.interp(ticks, boundaries, integrals[:, 0])
    # some read faster than the sensors change
    rows_s = update_s / float(rng.choice([1.0, 1.0, 2.0, 10.0]))
    if rows_s == update_s:
        t = ticks + np.abs(rng.normal(0.0, 0.02 * update_s, len(ticks)))
        index = np.arange(len(ticks))
    else:
        t = np.arange(ticks[0], ticks[-1], rows_s)
        t = t + np.abs(rng.normal(0.0, 0.02 * rows_s, len(t)))
        index = np.clip(np.searchsorted(ticks, t, side="right") - 1, 0, None)
    slow = int(rng.choice([1, 2]))  # H100 and H200: utilisation changes half as often as power
    changed = ticks[np.arange(len(ticks)) // slow * slow]
    sm, memory = (mean(changed - slow * update_s, changed, which) for which in (1, 2))
    return Telemetry(
        t_s=t,
        power_w=np.round((power * drift)[index], 3),
        sm_utilisation=np.round(sm[index], 2),
        memory_utilisation=np.round(memory[index], 2),
        energy_j=np.round(energy[index], 3) if has_counter else np.empty(0),
    )
