"""Which fraction of what compiled regions save keeps a budget, found from measured peaks.

`torch.compile` plans within a region by itself, but it takes a fraction of the saved tensors and
not a size. The peak need not follow the fraction: what is recomputed takes memory as well, and a
lower fraction may have a higher peak. So nothing is concluded from a fraction that was not
measured, and since each costs a compilation, only a few are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_TRIES = 4
LEAST_FRACTION = 0.05
"""Below it nearly all is recomputed at one time, which takes memory. At 0 the compiler does not ask
any more what must not be recomputed."""
APART_FRACTION = 0.02
"""Fractions that are nearer than this to each other are not both tried."""
CLOSE = 0.03
"""A peak that is below the budget by at most this share of the plain peak is near enough."""


class Tried(NamedTuple):
    """What was measured under one fraction."""

    fraction: float
    peak_bytes: int


def next_fraction(
    plain: Tried, tried: Sequence[Tried], *, saved_bytes: int, budget_bytes: int
) -> float | None:
    """The fraction to try next; None where enough is known. `plain` is the fraction 1, under which
    autograd keeps `saved_bytes`."""
    points = sorted((plain, *tried))
    kept = [point for point in points if point.peak_bytes <= budget_bytes]
    if plain in kept or len(tried) >= MOST_TRIES:
        return None
    aim_bytes = budget_bytes - CLOSE / 2 * plain.peak_bytes
    if not tried:
        guess = 1 - (plain.peak_bytes - aim_bytes) / max(1, saved_bytes)
        return _within(guess, LEAST_FRACTION, 1 - APART_FRACTION)
    if not kept:
        return _lower(points, aim_bytes)
    below = kept[-1]
    above = points[points.index(below) + 1]
    near = budget_bytes - below.peak_bytes <= CLOSE * plain.peak_bytes
    if near or above.fraction - below.fraction <= 2 * APART_FRACTION:
        return None
    slope = (above.peak_bytes - below.peak_bytes) / (above.fraction - below.fraction)
    guess = below.fraction + (aim_bytes - below.peak_bytes) / slope
    return _within(guess, below.fraction + APART_FRACTION, above.fraction - APART_FRACTION)


def _lower(points: Sequence[Tried], aim_bytes: float) -> float | None:
    """No fraction keeps the budget so far: a lower one, if going lower has helped."""
    lowest, above = points[0], points[1]
    slope = (above.peak_bytes - lowest.peak_bytes) / (above.fraction - lowest.fraction)
    if slope <= 0 or lowest.fraction < LEAST_FRACTION + APART_FRACTION:
        return None
    guess = lowest.fraction - (lowest.peak_bytes - aim_bytes) / slope
    return _within(guess, LEAST_FRACTION, lowest.fraction - APART_FRACTION)


def best(points: Sequence[Tried], budget_bytes: int) -> Tried:
    """The highest fraction that keeps the budget, or else the lowest peak."""
    kept = [point for point in points if point.peak_bytes <= budget_bytes]
    return max(kept) if kept else min(points, key=lambda point: (point.peak_bytes, -point.fraction))


def _within(value: float, least: float, most: float) -> float:
    return round(min(max(value, least), most), 3)
