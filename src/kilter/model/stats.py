"""Statistics of paired blocks: intervals, and evidence that may be looked at after every pair.

Everything here is about the logarithm of a ratio (candidate over baseline) seen once per pair.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

EFFECTS = (0.25, 0.5, 1.0, 2.0)
"""The evidence is a mixture over these standardised effects: small to plain to see."""
STALL = 3.0
"""A block with an iteration this many times as long as its median holds something else than the
job's rhythm (a checkpoint, an evaluation)."""


def usual_time(times: Sequence[float]) -> float:
    """The time of a usual iteration of a block: the mean of all but the slowest fifth.

    What happens now and then only ever makes an iteration slower, so one side is trimmed. The
    estimate has a seventh less variance than the median under white noise and drift.
    """
    kept = sorted(times)[: len(times) - len(times) // 5]
    return math.fsum(kept) / len(kept)


def stalled(times: Sequence[float]) -> bool:
    """See `STALL`."""
    return max(times) > STALL * statistics.median(times)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio with its interval; `low` and `high` are infinite bounds for fewer than two pairs."""

    ratio: float
    low: float
    high: float
    pairs: int


def paired_ratio(log_ratios: Sequence[float]) -> Estimate | None:
    """Geometric mean ratio of pairs with Student's t interval (95 %); None without any pair."""
    n = len(log_ratios)
    if n == 0:
        return None
    mean = math.fsum(log_ratios) / n
    if n == 1:
        return Estimate(math.exp(mean), 0.0, math.inf, 1)
    variance = math.fsum((x - mean) ** 2 for x in log_ratios) / (n - 1)
    half = t_quantile(0.975, n - 1) * math.sqrt(variance / n)
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 700.0)), n)


def binomial_interval(events: int, trials: int) -> tuple[float, float]:
    """Exact interval (95 %) of a probability (Clopper and Pearson, Biometrika 26, 1934)."""
    tail = 0.025

    def at_most(k: int, p: float) -> float:
        if p <= 0.0 or p >= 1.0:
            return 1.0 if p <= 0.0 or k >= trials else 0.0
        logs = [
            math.lgamma(trials + 1)
            - math.lgamma(i + 1)
            - math.lgamma(trials - i + 1)
            + i * math.log(p)
            + (trials - i) * math.log1p(-p)
            for i in range(k + 1)
        ]
        return math.fsum(map(math.exp, logs))

    def solved(k: int, wanted: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(k, middle) > wanted else (low, middle)
        return (low + high) / 2

    low = solved(events - 1, 1.0 - tail) if events > 0 else 0.0
    return low, solved(events, tail) if events < trials else 1.0


def log_evidence_below(log_ratios: Sequence[float], bound: float) -> float:
    """Log e-value against "the mean of the log ratios is at or above `bound`".

    The process over growing n is an e-process: under that hypothesis it ever exceeds log(1/alpha)
    with probability at most alpha, however often one looks (Ville). It is the mixture over
    `EFFECTS` of the ratio of the noncentral to the central t density of the t statistic, i.e. the
    likelihood ratio of the maximal scale invariant, so the spread need not be known
    (Perez-Ortiz, Lardy, de Heide, Grunwald 2024, "E-statistics, group invariance and anytime-valid
    testing"; normal pairs are assumed, which medians of blocks come close to).
    """
    n = len(log_ratios)
    if n < 2:
        return 0.0
    x = bound - np.asarray(log_ratios, dtype=float)
    mean = float(x.mean())
    spread = float(x.std(ddof=1))
    nu = n - 1
    t = math.inf * math.copysign(1.0, mean) if spread == 0.0 else mean * math.sqrt(n) / spread
    r = math.copysign(1.0, t) if math.isinf(t) else t / math.sqrt(nu + t * t)
    if mean == 0.0:
        r = 0.0
    base = _log_moment(nu, np.zeros(1))[0]
    mu = np.asarray(EFFECTS) * math.sqrt(n)
    logs = -0.5 * mu**2 * (1.0 - r * r) + _log_moment(nu, mu * r) - base
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).mean()))


def log_evidence_above(log_ratios: Sequence[float], bound: float) -> float:
    """Log e-value against "the mean of the log ratios is at or below `bound`"."""
    return log_evidence_below([-x for x in log_ratios], -bound)


def _log_moment(nu: int, a: np.ndarray) -> np.ndarray:
    """log of the integral over y > 0 of y^nu exp(-(y - a)^2 / 2), by a fixed fine grid about the
    integrand's only mode (its curvature there is at least 1, so +-10 covers all but e^-50)."""
    mode = (a + np.sqrt(a * a + 4.0 * nu)) / 2.0
    step = 0.05
    y = np.maximum(mode[:, None] + np.arange(-10.0, 10.0, step)[None, :], 1e-300)
    logs = nu * np.log(y) - (y - a[:, None]) ** 2 / 2.0
    top = logs.max(axis=1)
    result: np.ndarray = top + np.log(np.exp(logs - top[:, None]).sum(axis=1) * step)
    return result


@functools.lru_cache(maxsize=1024)
def critical_values(
    looks: tuple[int, ...],
    error_probability: float,
    *,
    shape: float = 0.25,
    hope: float = math.inf,
) -> tuple[float, ...]:
    """How many standard errors above zero a mean has to be at each of several looks at growing
    data, so that all looks together are wrong with this probability (Wang and Tsiatis, Biometrics
    43, 1987; their `shape` is 0.5 for Pocock's constant values, 0 for O'Brien and Fleming's).

    `looks` are the numbers of observations at the looks, ascending. At all but the last, the test
    ends without success where a mean better by `hope` standard errors would not do at the last. The
    crossing probability of a random walk is integrated from look to look (Armitage, McPherson and
    Rowe, JRSS A 132, 1969).
    With an estimated variance, Student's t at the same level keeps the error probability closely
    (Jennison and Turnbull, Group Sequential Methods, 2000, section 4.4).
    """
    factors = [(n / looks[-1]) ** (shape - 0.5) for n in looks]
    grid = np.linspace(-6.0, 6.0, 241) * math.sqrt(looks[-1])
    steps = [after - before for before, after in itertools.pairwise((0, *looks))]
    kernels = {n: np.exp(-0.5 * (grid[:, None] - grid[None, :]) ** 2 / n) for n in set(steps)}
    kernels = {n: kernel / kernel.sum(axis=0) for n, kernel in kernels.items()}

    def crossing(z: float) -> float:
        """Probability that the walk is at or above z times its factor at any look."""
        inside = np.zeros(len(grid))
        inside[len(grid) // 2] = 1.0
        crossed = 0.0
        for n, step, factor in zip(looks, steps, factors, strict=True):
            inside = kernels[step] @ inside
            # the cell that holds the limit is cut there
            limit = z * factor * math.sqrt(n)
            share = np.clip((grid - limit) / (grid[1] - grid[0]) + 0.5, 0.0, 1.0)
            crossed += float((inside * share).sum())
            inside = inside * (1.0 - share)
            least = z * factors[-1] * n / math.sqrt(looks[-1]) - hope * math.sqrt(n)
            if n < looks[-1] and math.isfinite(least):
                inside = inside * np.clip((grid - least) / (grid[1] - grid[0]) + 0.5, 0.0, 1.0)
        return crossed

    low, high = 0.0, 6.0
    while high - low > 1e-3:
        z = (low + high) / 2
        low, high = (z, high) if crossing(z) > error_probability else (low, z)
    return tuple(high * factor for factor in factors)


def t_quantile(p: float, nu: int) -> float:
    """Quantile of Student's t with `nu` degrees of freedom, by bisection of its CDF."""
    if p < 0.5:
        return -t_quantile(1.0 - p, nu)
    low, high = 0.0, 1.0
    while t_cdf(high, nu) < p:
        high *= 2.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, nu) < p else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, nu: int) -> float:
    """CDF of Student's t: the finite trigonometric sums for integer degrees of freedom
    (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan2(t, math.sqrt(nu))
    cos2 = math.cos(theta) ** 2
    if nu % 2:
        term, total = math.cos(theta), 0.0
        for k in range(1, (nu - 1) // 2 + 1):
            total += term
            term *= cos2 * (2 * k) / (2 * k + 1)
        inside = (theta + math.sin(theta) * total) * 2 / math.pi
    else:
        term, total = 1.0, 0.0
        for k in range(1, nu // 2 + 1):
            total += term
            term *= cos2 * (2 * k - 1) / (2 * k)
        inside = math.sin(theta) * total
    return (1.0 + inside) / 2.0
