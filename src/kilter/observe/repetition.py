"""Finds the repetition of an iteration in a sequence of kernels. Pure.

A period is looked for between occurrences of the rarest kernels: those run once in an iteration
(the loss, the embedding), while the kernels of a layer repeat with the layers and would give a
layer's period. (The same idea as the period of a job's MPI calls in EAR, on the GPU's timeline.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIKE = 0.95
"""Share of the kernels that have to repeat after one period."""
LEAST = 8
"""Fewer kernels than this are no iteration."""
_CANDIDATES = 32
"""Periods tried."""
_WINDOW = 32
"""Kernels compared when the beginning of an iteration is looked for."""


def starts(kernels: NDArray[Any], count: int | None = None) -> tuple[list[int], int | None]:
    """Where each iteration begins in the sequence, and where the last whole one ends if not with
    the sequence. `count` cuts the sequence into that many equal parts."""
    total = len(kernels)
    if count is not None:
        count = max(1, min(count, total))
        return [i * total // count for i in range(count)], None
    period = _period(kernels)
    if period is None:
        return [0], None
    found, at = [0], 0
    while (at := _next(kernels, at + period, period)) <= total - 0.95 * period:
        found.append(at)
    return (found, None) if abs(total - at) <= 0.05 * period else (found, at)


def _period(kernels: NDArray[Any]) -> int | None:
    numbers, counts = np.unique(kernels, return_counts=True)
    tried: set[int] = set()
    for number in numbers[counts >= 2][np.argsort(counts[counts >= 2], kind="stable")]:
        places = np.flatnonzero(kernels == number)
        period = int(np.median(np.diff(places)))
        if period < LEAST or period in tried:
            continue
        tried.add(period)
        if len(tried) > _CANDIDATES:
            break
        if np.mean(kernels[period:] == kernels[:-period]) >= ALIKE:
            return period
    return None


def _next(kernels: NDArray[Any], expected: int, period: int) -> int:
    """The place near the expected one that looks most like the beginning of the sequence."""
    window = kernels[:_WINDOW]
    slack = max(1, period // 20)
    best, alike = expected, -1.0
    for offset in sorted(range(-slack, slack + 1), key=abs):
        there = kernels[expected + offset : expected + offset + len(window)]
        if expected + offset <= 0 or len(there) < LEAST:
            continue
        share = float(np.mean(there == window[: len(there)]))
        if share > alike:
            best, alike = expected + offset, share
        if alike == 1.0:
            break
    return best
