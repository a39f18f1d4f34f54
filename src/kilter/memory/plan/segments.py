"""Which calls of modules are worth recomputing as a whole: sets of them to be tried.

A set holds no two calls of which one lies inside of the other. For each level of size there is the
set of the largest calls up to that size (the blocks of a model, their halves, single layers), and
of the best of these sets parts are tried, since less than all may be enough. Checkpointing of each
block is one of the sets, so that no plan is worse than it but by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

LEVELS = 6
"""Levels of size that are tried, from the largest call down; each is half of the one before."""
SHARES_OF_SET = (0.75, 0.5, 0.25, 0.125)
"""Of a set of calls, such parts of it are tried as well."""


class SegmentChoice(NamedTuple):
    """One call that may be recomputed."""

    first: int
    last: int
    """Events of the pass."""
    size_bytes: int
    recompute_s: float

    def overlaps(self, other: SegmentChoice) -> bool:
        return self.first <= other.last and other.first <= self.last


def best_set(
    choices: Sequence[SegmentChoice], cost_s: Callable[[tuple[int, ...], float], float]
) -> tuple[int, ...]:
    """Indices of the calls with which `cost_s` is least; empty if none is better. Its second
    argument is the cost to beat: if that is out of reach, it need not find out by how much."""
    tried: dict[tuple[int, ...], float] = {}
    for level in levels(choices):
        tried[level] = cost_s(level, min(tried.values(), default=inf))
    whole = min(tried, key=tried.__getitem__, default=())
    tried[()] = cost_s((), inf)
    by_price = sorted(
        whole, key=lambda i: (choices[i].recompute_s / choices[i].size_bytes, choices[i].first)
    )
    early = sorted(whole, key=lambda i: choices[i].first)
    for order in (by_price, early, early[::-1]):
        for part in SHARES_OF_SET:
            some = tuple(order[: max(1, int(part * len(order)))])
            if some and some not in tried:
                tried[some] = cost_s(some, min(tried.values()))
    return min(tried, key=lambda found: (tried[found], len(found)))


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
        if chosen and (level := tuple(sorted(chosen))) not in found:
            found.append(level)
        limit_bytes //= 2
    return found
