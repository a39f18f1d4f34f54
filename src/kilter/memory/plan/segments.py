"""Which calls of modules are worth recomputing at one time: sets of them to be tried.

A set holds no two calls of which one lies inside of the other. For each level of size there is the
set of the largest calls up to that size (the blocks of a model, their halves, single layers), all
recomputed to one extent. Of the best of these sets, parts are tried, since less than all may be
enough, and mixtures: what costs much to make is offloaded from the first calls, which are needed
last, and recomputed in the others. Checkpointing of each block is one of the sets, so that no plan
is worse than it but by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from math import inf
from typing import NamedTuple

LEVELS = 6
"""Levels of size that are tried, from the largest call down; each is half of the one before."""
SHARES_OF_SET = (0.75, 0.5, 0.25, 0.125)
"""Of a set of calls, such parts of it are tried as well."""


class Extent(Enum):
    """How much of what a call has saved is recomputed."""

    ALL = "all"
    MOST = "all but what can only be made together with everything else"
    CHEAP = "what takes no product of matrices, no convolution and no attention"


class SegmentChoice(NamedTuple):
    """One call that may be recomputed."""

    first: int
    last: int
    """Events of the pass."""
    size_bytes: int
    recompute_s: float
    extent: Extent = Extent.ALL

    def overlaps(self, other: SegmentChoice) -> bool:
        return self.first <= other.last and other.first <= self.last


def best_set(
    choices: Sequence[SegmentChoice], cost_s: Callable[[tuple[int, ...], float], float]
) -> tuple[int, ...]:
    """Indices of the calls with which `cost_s` is least; empty if none is better. Its second
    argument is the cost to beat: if that is out of reach, it need not find out by how much."""
    tried: dict[tuple[int, ...], float] = {}

    def best() -> tuple[int, ...]:
        return min(tried, key=lambda found: (tried[found], len(found)), default=())

    def consider(found: tuple[int, ...]) -> None:
        if found and found not in tried:
            tried[found] = cost_s(found, min(tried.values(), default=inf))

    for level in levels(choices):
        consider(level)
    for mixture in mixtures(choices, best()):
        consider(mixture)
    whole = best()
    tried[()] = cost_s((), inf)
    by_price = sorted(
        whole, key=lambda i: (choices[i].recompute_s / choices[i].size_bytes, choices[i].first)
    )
    early = sorted(whole, key=lambda i: choices[i].first)
    for order in (by_price, early, early[::-1]):
        for part in SHARES_OF_SET:
            consider(tuple(order[: max(1, int(part * len(order)))]))
    return best()


def levels(choices: Sequence[SegmentChoice]) -> list[tuple[int, ...]]:
    """For each extent and level of size, the largest calls that lie apart from each other."""
    found: list[tuple[int, ...]] = []
    for extent in Extent:
        alike = [index for index, choice in enumerate(choices) if choice.extent is extent]
        by_size = sorted(alike, key=lambda i: (-choices[i].size_bytes, i))
        limit_bytes = choices[by_size[0]].size_bytes if by_size else 0
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


def mixtures(choices: Sequence[SegmentChoice], whole: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The calls of a set, the first of them to a lesser extent than the others."""
    order = list(Extent)
    known = {(one.first, one.last, one.extent): i for i, one in enumerate(choices)}
    calls = sorted((choices[i].first, choices[i].last) for i in whole)

    def at(call: tuple[int, int], extent: Extent) -> int | None:
        """The call to this extent, or to the next larger one that it has."""
        larger = order[order.index(extent) :: -1]
        return next((known[*call, one] for one in larger if (*call, one) in known), None)

    found: list[tuple[int, ...]] = []
    for late, extent in enumerate(order):
        for lesser in order[late + 1 :]:
            for share in SHARES_OF_SET[:3]:
                split = int(share * len(calls))
                mixed = [at(c, lesser if n < split else extent) for n, c in enumerate(calls)]
                found.append(tuple(sorted(index for index in mixed if index is not None)))
    return found
