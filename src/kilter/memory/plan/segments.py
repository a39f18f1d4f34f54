"""Which calls of modules are worth recomputing as a whole: sets of them to be tried.

A set holds no two calls of which one lies inside of the other. For each level of size there is the
set of the largest calls up to that size (the blocks of a model, their halves, single layers). Parts
are tried of the best of these sets, since less than all may be enough, and of the largest ones,
since all of a set may not fit: at the end of backward gradients fill the device, and what the first
calls have saved is needed then. Checkpointing of each block is one of the sets, so that no plan is
worse than it but by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

LEVELS = 6
"""So many levels of size are tried, from the largest call down; each is half of the one before."""
SHARES_OF_SET = (0.75, 0.5, 0.25, 0.125)
"""Such parts of a set of calls are tried as well."""
LARGEST = 3
"""Sets of which parts are tried in any case: their last calls."""


class SegmentChoice(NamedTuple):
    """One call that may be recomputed."""

    first: int
    last: int
    """Both are events of the pass."""
    size_bytes: int
    recompute_s: float

    def overlaps(self, other: SegmentChoice) -> bool:
        return self.first <= other.last and other.first <= self.last


def best_set(
    choices: Sequence[SegmentChoice],
    cost_s: Callable[[tuple[int, ...], float], float],
    below_s: float = inf,
) -> tuple[int, ...] | None:
    """Indices of the calls with which `cost_s` is least; None if it is below `below_s` with none.
    Its second argument is the cost to beat: if that is out of reach, it need not find out by how
    much."""
    tried: dict[tuple[int, ...], float] = {}

    def try_set(some: tuple[int, ...]) -> None:
        if some not in tried:
            tried[some] = cost_s(some, min([below_s, *tried.values()]))

    found = levels(choices)
    for level in found:
        try_set(level)
    try_set(())

    def try_shares(order: Sequence[int]) -> None:
        for share in SHARES_OF_SET if order else ():
            try_set(by_first(choices, order[: max(1, int(share * len(order)))]))

    for level in found[:LARGEST]:
        try_shares(level[::-1])
    whole = min(found, key=tried.__getitem__, default=())
    try_shares(sorted(whole, key=lambda i: choices[i].recompute_s / choices[i].size_bytes))
    try_shares(whole)
    try_shares(whole[::-1])
    best = min(tried, key=lambda found: (tried[found], len(found)))
    return best if tried[best] < below_s else None


def by_first(choices: Sequence[SegmentChoice], some: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(some, key=lambda i: (choices[i].first, i)))


def levels(choices: Sequence[SegmentChoice]) -> list[tuple[int, ...]]:
    """For each level of size, the largest calls that lie apart from each other."""
    by_size = sorted(range(len(choices)), key=lambda i: (-choices[i].size_bytes, i))
    if not by_size:
        return []
    found = []
    limit_bytes = choices[by_size[0]].size_bytes
    for _ in range(LEVELS):
        chosen: list[int] = []
        for index in by_size:
            choice = choices[index]
            apart = not any(choice.overlaps(choices[other]) for other in chosen)
            if choice.size_bytes <= limit_bytes and apart:
                chosen.append(index)
        if chosen and (level := by_first(choices, chosen)) not in found:
            found.append(level)
        limit_bytes //= 2
    return found
