"""What telemetry says about a job's iterations, and how long a block has to be to judge them by it.

Marks from inside of a program are exact; the ends of iterations that telemetry shows are not. A
block is as long as it takes to make that error small against the contract.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kilter.clocks.plan.guard import Contract
from kilter.clocks.plan.job import Space, forecasts
from kilter.core.plan import Goal
from kilter.core.setting import Setting
from kilter.core.units import show_fraction, show_time
from kilter.model.period import Detection, JobPace

PART_OF_BOUND = 0.25
"""One pair of blocks has this standard error, as a share of the bound."""
LEAST_WATCHED_ITERATIONS = 12
"""A block has at least so many: the period is looked for anew in each, also in longer ones."""
LEAST_WATCHED_BLOCK_S = 5.0
MOST_BLOCK_S = 120.0
"""A job of uneven iterations, or a tight bound, takes more pairs instead of longer blocks."""


class Rhythm(msgspec.Struct, frozen=True, kw_only=True):
    """The iterations of a job, as telemetry shows them under the setting as found."""

    pace: JobPace
    power_w: float
    """It is the mean over the same stretch."""
    block_iterations: int
    pair_error: float
    """The log ratio of two such blocks is expected to have this standard error."""

    def __str__(self) -> str:
        """`iterations of 1.16 s (single ones differ by 0.9 %), blocks of 14 (16 s)`."""
        pace = self.pace
        return (
            f"iterations of {show_time(pace.iteration_s)} in the telemetry (single ones differ by "
            f"{show_fraction(pace.jitter_s / pace.iteration_s)}, their ends are seen to "
            f"{show_time(pace.edge_s)}); blocks of {self.block_iterations} iterations "
            f"({self.block_iterations * pace.iteration_s:.0f} s), so that the time ratio of two "
            f"has a standard error of {100 * self.pair_error:.2f} %"
        )


def rhythm(pace: JobPace, power_w: float, goal: Goal) -> Rhythm:
    """The rhythm with the length of its blocks, for this goal."""
    period_s = pace.iteration_s
    bound = Contract(max_slowdown=goal.max_slowdown or 0.0).bound
    least = max(LEAST_WATCHED_ITERATIONS, math.ceil(LEAST_WATCHED_BLOCK_S / period_s))
    most = max(least, math.floor(MOST_BLOCK_S / period_s))
    iterations = next(
        (n for n in range(least, most) if _pair_error(pace, n) <= PART_OF_BOUND * bound), most
    )
    return Rhythm(
        pace=pace,
        power_w=power_w,
        block_iterations=iterations,
        pair_error=_pair_error(pace, iterations),
    )


def _pair_error(pace: JobPace, iterations: int) -> float:
    """Standard error of the log ratio of two blocks of so many iterations."""
    variance = pace.jitter_s**2 / iterations + 2 * pace.edge_s**2 / iterations**2
    return math.sqrt(2 * variance) / pace.iteration_s


def nothing_to_govern(detection: Detection) -> str:
    """Why nothing is set, and what to do instead."""
    reason = detection.reason.removesuffix("; use marks")
    return (
        f"{reason}: nothing is set; `kilter run` starts a job so that its iterations are known from"
        " inside"
    )


def would_try(space: Space, goal: Goal, first: Sequence[Setting]) -> list[Setting]:
    """The first settings of a search: those of its class (`first`), then the most promising."""
    contract = Contract(max_slowdown=goal.max_slowdown or 0.0)
    ranked = forecasts(
        space,
        {},
        bound=contract.bound,
        objective=goal.objective,
        best=0.0,
        price_of_time=goal.price_of_time,
    )
    promising = [space.candidates[each.index] for each in ranked if each.improvement > 0.0]
    return list(dict.fromkeys([*first, *promising]))[:MOST_TOLD]


MOST_TOLD = 3
