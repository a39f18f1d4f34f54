"""Curves over settings: what a few noisy measurements say about the settings between them.

Kriging (Gaussian process regression) with a linear trend in the logarithm of every knob, made
monotone afterwards: time never falls and power never rises when a knob is lowered. A knob's
coordinate is the log of its value over the reference's, so that one prior fits all devices.
"""

from __future__ import annotations

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
    units). These are wide physical beliefs, not fitted to any table.
    """

    slope: float
    slope_sd: float = 0.4
    bend_sd: float = 0.08
    length: float = 0.5


def krige(
    points: Array,
    values: Array,
    noise_sd: Array,
    queries: Array,
    priors: Sequence[Prior],
) -> tuple[Array, Array]:
    """Posterior mean and standard deviation at `queries` (m, k) from `values` at `points` (n, k).

    The origin (the reference setting) has value 0 exactly.
    """
    slopes = np.array([p.slope for p in priors])

    def covariance(a: Array, b: Array) -> Array:
        total = np.zeros((len(a), len(b)))
        for k, prior in enumerate(priors):
            x, y = a[:, k, None], b[None, :, k]
            # the bend is tied to zero at the origin by conditioning, not by the kernel
            near = np.exp(-np.abs(x - y) / prior.length)
            to_a, to_b = np.exp(-np.abs(x) / prior.length), np.exp(-np.abs(y) / prior.length)
            total += prior.slope_sd**2 * x * y + prior.bend_sd**2 * (near - to_a * to_b)
        result: Array = total
        return result

    own = np.zeros(len(queries))
    for k, prior in enumerate(priors):  # the diagonal of covariance(queries, queries)
        x = queries[:, k]
        own += (prior.slope_sd * x) ** 2
        own += prior.bend_sd**2 * (1 - np.exp(-2 * np.abs(x) / prior.length))
    if len(points) == 0:
        return queries @ slopes, np.sqrt(own)
    gram = covariance(points, points) + np.diag(noise_sd**2 + 1e-12)
    cross = covariance(queries, points)
    gain = np.linalg.solve(gram, cross.T).T
    mean = queries @ slopes + gain @ (values - points @ slopes)
    variance = np.maximum(own - (gain * cross).sum(axis=1), 0.0)
    return mean, np.sqrt(variance)


def monotone(points: Array, values: Array, queries: Array, mean: Array, *, rising: bool) -> Array:
    """`mean` clipped so that it contradicts no measured point in the partial order of the knobs.

    `rising`: the quantity rises with every knob (power); otherwise it falls (time).
    """
    above = (points[None, :, :] >= queries[:, None, :]).all(axis=2)
    below = (points[None, :, :] <= queries[:, None, :]).all(axis=2)
    if rising:
        above, below = below, above
    least = np.where(above, values[None, :], -np.inf).max(axis=1, initial=-np.inf)
    most = np.where(below, values[None, :], np.inf).min(axis=1, initial=np.inf)
    # measured points may contradict each other by noise: then the middle of the two
    crossed = least > most
    middle = (np.where(crossed, least, 0.0) + np.where(crossed, most, 0.0)) / 2
    result: Array = np.where(crossed, middle, np.clip(mean, least, np.where(crossed, least, most)))
    return result
