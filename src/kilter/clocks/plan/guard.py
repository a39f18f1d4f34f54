"""The contract and its judgement: keep, ease or undo.

"At most s slower than the setting as found, wrong with probability at most alpha" is tested on the
running job, on pairs of interleaved blocks, by a one-sided group-sequential test: it looks at the
data after a few fixed numbers of pairs, and all looks together spend alpha. While a setting is
held, an e-process watches it that may be looked at after every pair. No evidence means no: the
default stands.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kilter.core.plan import FREE_MARGIN
from kilter.model.stats import critical_values, log_evidence_above, log_evidence_below, t_cdf

MOST_LOOKS = 4
LEAST_PAIRS = 3
"""A test looks at its pairs at the end, and before that each time at half as many."""

ZONE = 0.01
ZONE_SHARE = 0.1
"""The indifference zone below the bound, of a test that may be looked at at any time, is one
percent, or this share of a smaller bound. A narrower zone costs longer tests, never more
violations."""

LEAST_SAVING = 0.003
"""There has to be evidence that a setting saves more than this fraction of energy: less is not
worth holding it."""

HOPE = 1.0
"""A test is given up when it would fail even if the true value were this many standard errors
better than it looks. What is given up cannot be taken any more, and the limits of a test (`limits`)
are that much wider."""


class Verdict(enum.Enum):
    SAFE = "safe"
    """There is evidence that the slowdown is below the bound."""
    DEGRADED = "degraded"
    """There is evidence that it is not safely below the bound."""
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Spread:
    """What pairs say of the spread of one: their squared deviations from the mean of their own
    setting, and how many of these are independent. All settings share one relative spread."""

    squares: float = 0.0
    freedom: int = 0

    def with_pairs(self, log_ratios: Sequence[float]) -> Spread:
        """With the pairs of one more setting."""
        mean = math.fsum(log_ratios) / len(log_ratios)
        squares = math.fsum((x - mean) ** 2 for x in log_ratios)
        return Spread(self.squares + squares, self.freedom + len(log_ratios) - 1)

    @property
    def sd(self) -> float:
        return math.sqrt(self.squares / self.freedom)


NOTHING_KNOWN = Spread()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The allowed slowdown (a fraction) and how often a verdict of "safe" may be wrong."""

    max_slowdown: float
    error_probability: float = 0.05

    @property
    def bound(self) -> float:
        """The log ratio that a safe setting stays below."""
        return math.log1p(max(self.max_slowdown, FREE_MARGIN))

    def judge(
        self,
        log_ratios: Sequence[float],
        *,
        error_probability: float,
        most: int,
        spread: Spread = NOTHING_KNOWN,
    ) -> Verdict:
        """The verdict after these pairs (log of candidate time over baseline time), of `most` that
        this test may use.

        `error_probability` is this test's share of the contract's, when several settings are
        tested one after the other. `spread` is what pairs of other settings say of it.
        """
        return _test(log_ratios, self.bound, error_probability, most, spread)

    def saves(
        self,
        log_ratios: Sequence[float],
        *,
        error_probability: float,
        most: int,
        spread: Spread = NOTHING_KNOWN,
    ) -> Verdict:
        """The same for energy (log of candidate energy over baseline energy): "safe" when there is
        evidence that it saves `LEAST_SAVING`. Without this, the luckiest of several settings that
        save nothing would be held."""
        return _test(log_ratios, math.log1p(-LEAST_SAVING), error_probability, most, spread)

    def judge_at_any_time(
        self, log_ratios: Sequence[float], *, error_probability: float
    ) -> Verdict:
        """As `judge`, for a test of which nobody knows how long it will be: an e-process, which may
        be looked at after every pair and pays for that with more of them. It gives up on evidence
        that the setting is slower than the bound less an indifference zone, so that legal slowdowns
        are not thrown away."""
        if log_evidence_below(log_ratios, self.bound) >= math.log(1.0 / error_probability):
            return Verdict.SAFE
        slowdown = max(self.max_slowdown, FREE_MARGIN)
        degraded_from = math.log1p(slowdown - min(ZONE, ZONE_SHARE * slowdown))
        give_up = math.log(1.0 / self.error_probability)
        if log_evidence_above(log_ratios, degraded_from) >= give_up:
            return Verdict.DEGRADED
        return Verdict.UNDECIDED

    def broken(self, log_ratios: Sequence[float]) -> bool:
        """There is evidence that a setting in use is slower than the bound: undo it."""
        threshold = math.log(1.0 / self.error_probability)
        return log_evidence_above(log_ratios, self.bound) >= threshold

    def share(self, test: int) -> float:
        """Error probability of the test-th test (1, 2, ...) of one search: the shares of any
        number of tests add up to the contract's."""
        return self.error_probability / (test * (test + 1))


@functools.lru_cache(maxsize=1024)
def looks(most: int) -> tuple[int, ...]:
    """After how many pairs a test of at most `most` pairs looks at them."""
    found = [max(most, 2)]
    while len(found) < MOST_LOOKS and (before := math.ceil(found[0] / 2)) >= LEAST_PAIRS:
        found.insert(0, before)
    return tuple(found)


def limits(most: int, error_probability: float) -> tuple[float, ...]:
    """How many standard errors below a bound the mean has to be at each look of such a test."""
    return critical_values(looks(most), error_probability, hope=HOPE)


def _test(
    log_ratios: Sequence[float], bound: float, error_probability: float, most: int, spread: Spread
) -> Verdict:
    """Whether there is evidence that the mean is below the bound; asked after every pair."""
    n, plan = len(log_ratios), looks(most)
    if n < 2 or (n not in plan and n < plan[-1]):
        return Verdict.UNDECIDED
    critical = dict(zip(plan, limits(most, error_probability), strict=True))
    mean = math.fsum(log_ratios) / n
    spread = spread.with_pairs(log_ratios)
    error = max(spread.sd / math.sqrt(n), 1e-12)
    freedom = spread.freedom
    if n in plan and 1.0 - t_cdf((bound - mean) / error, freedom) <= _tail(critical[n]):
        return Verdict.SAFE
    if n >= plan[-1]:
        return Verdict.DEGRADED
    hoped = (bound - mean + HOPE * error) / max(spread.sd / math.sqrt(plan[-1]), 1e-12)
    hopeless = 1.0 - t_cdf(hoped, freedom) > _tail(critical[plan[-1]])
    return Verdict.DEGRADED if hopeless else Verdict.UNDECIDED


def _tail(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2.0))
