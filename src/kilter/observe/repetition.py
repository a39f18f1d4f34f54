"""Finds the repetition of an iteration in a sequence of kernels. Pure.

An anchor is a kernel that is run once in an iteration. The rarest kernels are tried first: the
kernels of a layer repeat with the layers and would give a layer's period. Between two anchors
there have to be the same kernels, however they are ordered (streams change the order), and before
the first and behind the last one no others: the embedding and the head of a single
iteration are what tells its layers from iterations.
(The period of a job's MPI calls in EAR is the same idea on the host.)
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIKE_SHARE = 0.95
"""Neighbouring iterations have at least this share of the kernels in common."""
FOREIGN_EVENTS = 0.02
"""At most this share of the kernels at both ends is in no iteration."""
LEAST = 8
"""Fewer kernels than this are no iteration."""
_CANDIDATES = 32
"""So many anchors are tried."""
_WINDOW = 32
"""So many kernels are compared when the beginning of an iteration is looked for."""

Kernels = NDArray[Any]


def starts(kernels: Kernels, count: int | None = None) -> tuple[list[int], int | None]:
    """Where each iteration begins in the sequence of kernels (numbered from 0), and where the last
    whole one ends if not with the sequence. `count` cuts the sequence into equal parts."""
    total = len(kernels)
    if count is not None:
        count = max(1, min(count, total))
        return [i * total // count for i in range(count)], None
    anchors = _anchors(kernels)
    if anchors is None:
        return [0], None
    period = int(np.median(np.diff(anchors)))
    begins = [0, *(_begin(kernels, int(a - anchors[0]), period) for a in anchors[1:])]
    if total - begins[-1] < ALIKE_SHARE * period:
        return begins[:-1], begins[-1]
    # The first iteration may have begun before the trace, and another one behind the last anchor.
    if total - begins[-1] - period <= (1.0 - ALIKE_SHARE) * period:
        return begins, None
    return begins, _begin(kernels, begins[-1] + period, period)


def _anchors(kernels: Kernels) -> Kernels | None:
    numbers, counts = np.unique(kernels, return_counts=True)
    repeated = counts >= 2
    rarest = numbers[repeated][np.argsort(counts[repeated], kind="stable")]
    size = int(kernels.max(initial=0)) + 1
    for number in rarest[:_CANDIDATES]:
        places = np.flatnonzero(kernels == number)
        if np.diff(places).min() >= LEAST and _is_anchor(kernels, places, size):
            return places
    return None


def _is_anchor(kernels: Kernels, places: Kernels, size: int) -> bool:
    edges = [0, *places.tolist(), len(kernels)]
    pieces = [np.bincount(kernels[a:b], minlength=size) for a, b in pairwise(edges)]
    head, *whole, tail = pieces
    for one, other in pairwise(whole):
        if np.minimum(one, other).sum() < ALIKE_SHARE * max(one.sum(), other.sum()):
            return False
    usual = np.max(whole, axis=0)
    return all(
        np.maximum(end - usual, 0).sum() <= FOREIGN_EVENTS * usual.sum() for end in (head, tail)
    )


def _begin(kernels: Kernels, expected: int, period: int) -> int:
    """The place near the expected one that looks most like the beginning of the sequence."""
    window = kernels[:_WINDOW]
    slack = max(1, period // 20)
    best, alike = expected, -1.0
    for offset in sorted(range(-slack, slack + 1), key=abs):
        there = kernels[max(0, expected + offset) : expected + offset + len(window)]
        if len(there) < LEAST:
            continue
        share = float(np.mean(there == window[: len(there)]))
        if share > alike:
            best, alike = expected + offset, share
        if alike == 1.0:
            break
    return best
