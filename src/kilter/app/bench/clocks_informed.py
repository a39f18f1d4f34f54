"""How much of the oracle's saving a search could keep at best, for `kilter bench clocks`.

`InformedGovernor` knows the true time and energy of every setting; it has only to prove the
contract, by the tests of ours under the same noise. What it loses is the price of the proof.
`most_saving` is a bound for searches of any kind: none that breaks the contract on no curve more
often than promised can keep more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

from kilter.clocks.plan.governor import LEAST_IMPROVEMENT, LEAST_SHARE, Governor
from kilter.clocks.plan.guard import LEAST_SAVING, Contract
from kilter.clocks.plan.job import Forecast, Space
from kilter.core.plan import Goal
from kilter.core.setting import Setting

PAIR_SPREAD = 1.05
"""Spread of one pair's log time ratio in blocks of five iterations, over the noise of the harness
(drift included; measured on 2,000 pairs)."""
_NORMAL = NormalDist()

LogRatios = tuple[float, float]
"""Of time and energy to the default."""


class InformedGovernor(Governor):
    """Tests what promises most by the truth, and may put all pairs that are left into one test."""

    def __init__(
        self, space: Space, goal: Goal, truth: Mapping[Setting, LogRatios], *, seed: int
    ) -> None:
        super().__init__(space, goal, seed=seed)
        self._truth = [truth[setting] for setting in space.candidates]
        self._test_part = 1.0

    def _ranking(self) -> list[Forecast]:
        best, bound = self._objective(self.choice), self._contract.bound
        tests, saved = self._affordable(), -math.log1p(-LEAST_SAVING)
        found = []
        for index, (time, energy) in enumerate(self._truth):
            gain = best - energy - self._goal.objective.time_exponent * time
            worth = energy + self._goal.price_of_time * max(time, 0.0) < 0.0
            if not (tests and worth and gain > 0.0) or index in self._decided:
                continue
            promises = [
                (
                    gain
                    * _NORMAL.cdf((bound - test.margin - time) / test.error)
                    * _NORMAL.cdf((-saved - test.margin - energy) / test.error)
                    - test.price,
                    test.pairs,
                )
                for test in tests
            ]
            improvement, pairs = max(promises)
            found.append(
                Forecast(
                    index=index,
                    log_time=time,
                    log_energy=energy,
                    improvement=improvement,
                    pairs=pairs,
                    known=True,
                )
            )
        least = max(LEAST_IMPROVEMENT, -LEAST_SHARE * self.choice.log_energy)
        return sorted(
            (f for f in found if f.improvement >= least), key=lambda f: f.improvement, reverse=True
        )


def most_saving(truth: Mapping[Setting, LogRatios], goal: Goal, *, pairs: int, sd: float) -> float:
    """The most that the mean saving of a search of so many pairs can be, where the log time ratio
    of one pair is normal with this spread.

    A search that keeps the contract on every curve holds a setting at the bound with probability
    `error_probability` at most. So it holds one that is faster with no more than the power of the
    best test of all pairs (Neyman and Pearson); the probabilities of all settings add up to one.
    Nothing is assumed of how settings resemble each other.
    """
    contract = Contract(
        max_slowdown=goal.max_slowdown or 0.0, error_probability=goal.error_probability
    )
    critical = _NORMAL.inv_cdf(1.0 - contract.error_probability)
    error = max(sd / math.sqrt(pairs), 1e-12)
    settings = [
        (-math.expm1(energy), _NORMAL.cdf((contract.bound - time) / error - critical))
        for time, energy in truth.values()
        if energy < 0.0 and time <= contract.bound + 1e-9
    ]
    saving, left = 0.0, 1.0
    for saved, power in sorted(settings, reverse=True):
        saving += saved * min(power, left)
        left -= min(power, left)
    return saving
