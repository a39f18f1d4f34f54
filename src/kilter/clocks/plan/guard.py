"""The contract and its judgement: keep, ease or undo.

"At most s slower than the setting as found, wrong with probability at most alpha" is tested on the
running job, on pairs of interleaved blocks, by two one-sided sequential tests that may be looked at
after every pair. No evidence means no: the default stands.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kilter.core.plan import FREE_MARGIN
from kilter.model.stats import log_evidence_above, log_evidence_below

ZONE = 0.01
ZONE_SHARE = 0.1
"""Indifference zone below the bound: a setting is given up as "degraded" only on evidence that it
is slower than the bound less the zone, so that legal slowdowns are not thrown away. The zone is one
percent, or this share of a smaller bound: at 2 % a zone of 1 % would throw away half of what is
allowed. A narrower zone costs longer tests, never more violations."""

LEAST_SAVING = 0.01
"""A setting that saves less than this fraction of energy is given up as not worth holding."""


class Verdict(enum.Enum):
    SAFE = "safe"
    """There is evidence that the slowdown is below the bound."""
    DEGRADED = "degraded"
    """There is evidence that it is not safely below the bound."""
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The allowed slowdown (a fraction) and how often a verdict of "safe" may be wrong."""

    max_slowdown: float
    error_probability: float = 0.05

    @property
    def bound(self) -> float:
        """The log ratio that a safe setting stays below."""
        return math.log1p(max(self.max_slowdown, FREE_MARGIN))

    @property
    def degraded_from(self) -> float:
        """The log ratio above which a setting may be called degraded."""
        slowdown = max(self.max_slowdown, FREE_MARGIN)
        return math.log1p(slowdown - min(ZONE, ZONE_SHARE * slowdown))

    def judge(self, log_ratios: Sequence[float], *, error_probability: float) -> Verdict:
        """The verdict after these pairs (log of candidate time over baseline time).

        `error_probability` is this test's share of the contract's, when several settings are
        tested one after the other.
        """
        threshold = math.log(1.0 / error_probability)
        if log_evidence_below(log_ratios, self.bound) >= threshold:
            return Verdict.SAFE
        give_up = math.log(1.0 / self.error_probability)
        if log_evidence_above(log_ratios, self.degraded_from) >= give_up:
            return Verdict.DEGRADED
        return Verdict.UNDECIDED

    def saves(self, log_ratios: Sequence[float], *, error_probability: float) -> Verdict:
        """The same for energy (log of candidate energy over baseline energy): "safe" when there is
        evidence that it saves at all, "degraded" when it does not save `LEAST_SAVING`. Without
        this, the luckiest of several settings that save nothing would be held."""
        if log_evidence_below(log_ratios, 0.0) >= math.log(1.0 / error_probability):
            return Verdict.SAFE
        give_up = math.log(1.0 / self.error_probability)
        if log_evidence_above(log_ratios, math.log1p(-LEAST_SAVING)) >= give_up:
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
