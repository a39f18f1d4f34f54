"""Whole-job clocks: which setting to try next, and which to take.

Constrained Bayesian search over the knobs a device has (expected improvement times probability of
feasibility: Gardner et al., ICML 2014), with two priors that keep it few and safe: curves are
monotone in every knob (`model/curve`), and a setting is only reachable one step below a setting
already seen to be fast enough. A prediction only proposes: the setting is accepted by measurement
(`plan/governor`). After four honest probes little is left to learn from models trained elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kilter.core.plan import Objective
from kilter.core.setting import Setting, Supported
from kilter.model.curve import Prior, krige, monotone

Array = NDArray[np.float64]

SEARCHED_KNOBS = ("sm_clock_hz", "memory_clock_hz", "power_limit_w")
TIME_PRIORS = (Prior(slope=-0.5), Prior(slope=-0.3), Prior(slope=-0.3, rough=1.0))
POWER_PRIORS = (Prior(slope=1.0), Prior(slope=0.3), Prior(slope=0.5, rough=1.0))
"""They stand in the order of `SEARCHED_KNOBS`. Time is half proportional to the SM clock, power
fully. A limit does nothing until it is below what the job draws: its curves have a kink
anywhere."""

STEP = 0.75
"""A probe goes at most this factor below a knob's value already seen to be fast enough."""

GRAIN = 0.98
"""Neighbouring candidates differ by at least this factor: closer ones cannot be told apart."""

FLOOR = 0.5
"""Clocks below this share of the found one are not worth a probe: static power takes over."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The settings that may be chosen, and the reference they are compared with."""

    found: Setting
    """What the device had: the baseline of every comparison."""
    reference: Setting
    """It is `found` with a number for every knob that the candidates set: for a clock left to the
    device, the observed sustained one (a request above it is a no-op that would pass for free)."""
    candidates: tuple[Setting, ...]

    @cached_property
    def coordinates(self) -> Array:
        """(m, k) log of every candidate's knobs over the reference's; 0 where it has none."""
        rows = []
        for setting in self.candidates:
            row = []
            for knob in SEARCHED_KNOBS:
                value, own = getattr(setting, knob), getattr(self.reference, knob)
                row.append(math.log(value / own) if value and own else 0.0)
            rows.append(row)
        return np.array(rows, dtype=float).reshape(len(rows), len(SEARCHED_KNOBS))


def space(found: Setting, sustained: Setting, supported: Supported) -> Space:
    """The grid of a device: clocks from the sustained one down to `FLOOR` of it, the memory clocks
    below the present one, power limits below the present one."""
    sm = _ladder(supported.sm_clocks_hz, found.sm_clock_hz or sustained.sm_clock_hz, FLOOR)
    memory = _ladder(
        supported.memory_clocks_hz, found.memory_clock_hz or sustained.memory_clock_hz, 0.0
    )
    limits = _ladder(supported.power_limits_w, found.power_limit_w, 0.0)
    candidates = [
        found.with_(sm_clock_hz=a, memory_clock_hz=b, power_limit_w=c)
        for a in (None, *sm)
        for b in (None, *memory)
        for c in (None, *limits)
    ]
    reference = Setting(
        sm_clock_hz=found.sm_clock_hz or sustained.sm_clock_hz,
        memory_clock_hz=found.memory_clock_hz or sustained.memory_clock_hz,
        power_limit_w=found.power_limit_w,
    )
    return Space(
        found=found,
        reference=reference,
        candidates=tuple(c for c in candidates if c != found),
    )


def _ladder(values: Sequence[float], top: float | None, floor: float) -> list[float]:
    """The supported values from just below `top` down to `floor * top`, highest first."""
    rungs: list[float] = []
    if top is not None:
        for value in sorted(values, reverse=True):
            last = rungs[-1] if rungs else top
            if floor * top <= value <= last * GRAIN:
                rungs.append(value)
    return rungs


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What the pairs of one candidate say: mean log ratios to the baseline and their spread."""

    log_time: float
    log_energy: float
    sd: float
    """Both have this standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestSize:
    """A test that a candidate could be put to."""

    pairs: int
    error: float
    """Standard error of the mean of so many pairs."""
    margin: float
    """That mean has to be below a bound by this."""
    price: float
    """What so many pairs cost, in the objective."""


UNTESTED = TestSize(pairs=0, error=0.0, margin=0.0, price=0.0)
"""A candidate is as good as it turns out to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is expected of one candidate."""

    index: int
    log_time: float
    log_energy: float
    improvement: float
    """The log objective is expected to improve by this over the best accepted so far, times the
    probability that its test says so, less the price of the test."""
    pairs: int
    """The test that promises most takes so many."""
    known: bool
    """It was probed, or is as well known by what was probed beside it: a probe of its own tells no
    more."""


def forecasts(
    space: Space,
    probed: Mapping[int, Probed],
    *,
    bound: float,
    objective: Objective,
    best: float,
    price_of_time: float,
    least_saving: float = 0.0,
    tests: Sequence[TestSize] = (UNTESTED,),
    told_apart: float = 0.0,
    rejected: frozenset[int] = frozenset(),
    expected: Mapping[Setting, tuple[float, float]] | None = None,
) -> list[Forecast]:
    """All reachable candidates, the most promising first.

    `bound` is the log time ratio to stay below, `best` the log objective of the setting accepted
    so far (0 = the baseline), `tests` are the tests that can be afforded. What differs by less than
    `told_apart` cannot be told apart by probes. `expected`, of a
    predictor, are the log ratios of time and power that take the place of the priors' straight
    lines, by setting.
    """
    x = space.coordinates
    if len(x) == 0:
        return []
    seen = sorted(probed)
    points = x[seen]
    times = np.array([probed[i].log_time for i in seen])
    powers = np.array([probed[i].log_energy - probed[i].log_time for i in seen])
    noise = np.array([probed[i].sd for i in seen])
    bends = _bends(space, x, expected or {})
    time, time_sd = krige(points, times - bends[seen, 0], noise, x, TIME_PRIORS)
    power, power_sd = krige(points, powers - bends[seen, 1], noise, x, POWER_PRIORS)
    time, power = time + bends[:, 0], power + bends[:, 1]
    known = np.vstack([np.zeros((1, 3)), points])
    time = monotone(known, np.append(0.0, time[seen]), x, time, rising=False)
    power = monotone(known, np.append(0.0, power[seen]), x, power, rising=True)

    reach = _reachable(x, points, times, bound)
    reach[seen] = True
    reach[list(rejected)] = False
    told = np.maximum(time_sd, power_sd) <= told_apart
    told[seen] = True
    time, time_sd, power, power_sd = time[reach], time_sd[reach], power[reach], power_sd[reach]
    weight = 1 + objective.time_exponent
    value = power + weight * time
    value_sd = np.sqrt(power_sd**2 + (weight * time_sd) ** 2)
    gain = _expected_improvement(best - value, value_sd)
    worth = -(power + time + price_of_time * np.maximum(time, 0.0))
    worth_sd = np.sqrt(power_sd**2 + ((1 + price_of_time) * time_sd) ** 2)
    gain *= _normal_cdf(worth / np.maximum(worth_sd, 1e-9))
    energy, energy_sd = power + time, np.hypot(power_sd, time_sd)
    saved = -math.log1p(-least_saving)

    def promise(test: TestSize) -> Array:
        """Gain by a test: that its means come out well, too, is uncertain."""
        in_time = (bound - test.margin - time) / np.maximum(np.hypot(time_sd, test.error), 1e-9)
        saves = (-saved - test.margin - energy) / np.maximum(np.hypot(energy_sd, test.error), 1e-9)
        result: Array = gain * _normal_cdf(in_time) * _normal_cdf(saves) - test.price
        return result

    promises = np.array([promise(test) for test in tests])
    rows = zip(
        np.flatnonzero(reach).tolist(),
        time.tolist(),
        energy.tolist(),
        promises.max(axis=0).tolist(),
        promises.argmax(axis=0).tolist(),
        told[reach].tolist(),
        strict=True,
    )
    return sorted(
        (
            Forecast(
                index=index,
                log_time=log_time,
                log_energy=log_energy,
                improvement=improvement,
                pairs=tests[test].pairs,
                known=known,
            )
            for index, log_time, log_energy, improvement, test, known in rows
        ),
        key=lambda f: -f.improvement,
    )


def _bends(space: Space, x: Array, expected: Mapping[Setting, tuple[float, float]]) -> Array:
    """(m, 2) how far the expected log time and log power of every candidate are from the straight
    lines of the priors; 0 where nothing is expected."""
    bends = np.zeros((len(x), 2))
    for i, setting in enumerate(space.candidates):
        if setting in expected:
            for column, priors in enumerate((TIME_PRIORS, POWER_PRIORS)):
                line = sum(prior.slope * z for prior, z in zip(priors, x[i], strict=True))
                bends[i, column] = expected[setting][column] - line
    return bends


def _reachable(x: Array, points: Array, times: Array, bound: float) -> NDArray[np.bool_]:
    """Candidates within one step, knob by knob, of a setting seen to be fast enough. A step is the
    factor `STEP`, or the next value of a knob that has no nearer one."""
    fast = np.vstack([np.zeros((1, x.shape[1])), points[times <= bound]])
    result = np.zeros(len(x), dtype=bool)
    for origin in fast:
        near = np.ones(len(x), dtype=bool)
        for k in range(x.shape[1]):
            below = x[:, k][x[:, k] < origin[k] - 1e-9]
            next_value = below.max() if len(below) else origin[k]
            near &= x[:, k] >= min(origin[k] + math.log(STEP), next_value) - 1e-9
        result |= near
    return result


def _normal_cdf(z: Array) -> Array:
    return 0.5 * np.array(list(map(math.erfc, (-z / math.sqrt(2.0)).tolist())))


def _expected_improvement(gain: Array, sd: Array) -> Array:
    """Mean of max(0, g) for g normal with this mean and standard deviation."""
    safe = np.maximum(sd, 1e-9)
    z = gain / safe
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    result: Array = gain * _normal_cdf(z) + safe * density
    return result
