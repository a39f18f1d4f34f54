"""Curves over settings: what a few noisy measurements say about the settings between them.

Kriging (Gaussian process regression) with a linear trend in the logarithm of every knob and a bend
that is smooth for the most part, so that neighbours tell of each other; made monotone afterwards:
time never falls and power never rises when a knob is lowered. A knob's coordinate is the log of its
value over the reference's, so that one prior fits all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is believed before the first measurement, per knob and in log-log terms.

    `slope` is the expected sensitivity (1 = proportional), `slope_sd` how sure that is; `bend_sd`
    is how far the curve strays from a straight line over a change of the knob by `length` (in log
    units). Of the variance of that bend, `rough` is a random walk, which may break off anywhere;
    the rest is smooth (Matern, 3/2). These are wide physical beliefs, not fitted to any table.
    """

    slope: float
    slope_sd: float = 0.4
    bend_sd: float = 0.08
    length: float = 0.5
    rough: float = 0.1


JUMP_SD = 0.03
"""A step from the device's own governor, under which the reference is measured, to any requested
value has this standard deviation."""
OWN_SD = 0.005
"""How far a single setting is off the curve."""


def krige(
    points: Array,
    values: Array,
    noise_sd: Array,
    queries: Array,
    priors: Sequence[Prior],
) -> tuple[Array, Array]:
    """Posterior mean and standard deviation at `queries` (m, k) from `values` at `points` (n, k).

    The curve is 0 at the origin (the reference setting), but for `JUMP_SD`.
    """
    slopes = np.array([p.slope for p in priors])

    def covariance(a: Array, b: Array) -> Array:
        # what all requested settings have in common, and what each has for itself
        total: Array = np.where(_in_all_knobs(np.equal, a, b), JUMP_SD**2 + OWN_SD**2, JUMP_SD**2)
        for k, prior in enumerate(priors):
            x, y = a[:, k, None], b[None, :, k]
            # the bend is tied to zero at the origin by conditioning, not by the kernel
            bend = _likeness(x - y, prior) - _likeness(x, prior) * _likeness(y, prior)
            total = total + prior.slope_sd**2 * x * y + prior.bend_sd**2 * bend
        return total

    own = np.full(len(queries), JUMP_SD**2 + OWN_SD**2)
    for k, prior in enumerate(priors):  # the diagonal of covariance(queries, queries)
        x = queries[:, k]
        own += (prior.slope_sd * x) ** 2 + prior.bend_sd**2 * (1 - _likeness(x, prior) ** 2)
    if len(points) == 0:
        return queries @ slopes, np.sqrt(own)
    gram = covariance(points, points) + np.diag(noise_sd**2 + 1e-12)
    cross = covariance(queries, points)
    gain = np.linalg.solve(gram, cross.T).T
    mean = queries @ slopes + gain @ (values - points @ slopes)
    variance = np.maximum(own - (gain * cross).sum(axis=1), 0.0)
    return mean, np.sqrt(variance)


def _in_all_knobs(compare: np.ufunc, a: Array, b: Array) -> NDArray[np.bool_]:
    """(m, n) whether a row of `a` compares with a row of `b` in every column."""
    # a reduction over so short an axis takes several times as long
    result = np.ones((len(a), len(b)), dtype=bool)
    for k in range(a.shape[1]):
        result &= compare(a[:, k, None], b[None, :, k])
    return result


def _likeness(distance: Array, prior: Prior) -> Array:
    """Correlation of the bend at two points of a knob."""
    r = np.abs(distance) / prior.length
    smooth = (1.0 + math.sqrt(3.0) * r) * np.exp(-math.sqrt(3.0) * r)
    result: Array = prior.rough * np.exp(-r) + (1.0 - prior.rough) * smooth
    return result


def monotone(points: Array, values: Array, queries: Array, mean: Array, *, rising: bool) -> Array:
    """`mean` clipped so that it contradicts no measured point in the partial order of the knobs.

    `rising`: the quantity rises with every knob (power); otherwise it falls (time).
    """
    above = _in_all_knobs(np.less_equal, queries, points)
    below = _in_all_knobs(np.greater_equal, queries, points)
    if rising:
        above, below = below, above
    least = np.where(above, values[None, :], -np.inf).max(axis=1, initial=-np.inf)
    most = np.where(below, values[None, :], np.inf).min(axis=1, initial=np.inf)
    # measured points may contradict each other by noise: then the middle of the two
    crossed = least > most
    middle = (np.where(crossed, least, 0.0) + np.where(crossed, most, 0.0)) / 2
    result: Array = np.where(crossed, middle, np.clip(mean, least, np.where(crossed, least, most)))
    return result
