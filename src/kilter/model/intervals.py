"""Algebra of half-open intervals `[begin, end)` on one timeline. Pure.

A *set* of times is a list of disjoint intervals in ascending order, none empty and no two
touching: that form is unique, so sets can be compared with `==`. Numbers may be of any ordered
kind (seconds, nanoseconds); all functions are linear after one sort.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
Times = list[Interval]


def union(intervals: Iterable[Interval]) -> Times:
    """The times that any of the intervals covers, from intervals in any order and overlap."""
    merged: Times = []
    for begin, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> Times:
    common: Times = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> Times:
    """The times in set `a` that are not in set `b`."""
    left: Times = []
    j = 0
    for a_begin, end in a:
        begin = a_begin
        while j < len(b) and b[j][1] <= begin:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if begin < b[k][0]:
                left.append((begin, b[k][0]))
            begin = b[k][1]
            k += 1
        if begin < end:
            left.append((begin, end))
    return left


def length(times: Iterable[Interval]) -> float:
    """How long a set is in total; of plain intervals, the sum of their lengths."""
    return sum(end - begin for begin, end in times)


def clip(times: Sequence[Interval], begin: float, end: float) -> Times:
    """The part of a set that lies in `[begin, end)`."""
    first = bisect_right(times, begin, key=lambda interval: interval[1])
    last = bisect_left(times, end, key=lambda interval: interval[0])
    cut = ((max(a, begin), min(b, end)) for a, b in times[first:last])
    return [(a, b) for a, b in cut if a < b]


def join(times: Sequence[Interval], gap: float) -> Times:
    """The set with its gaps of at most `gap` filled."""
    joined: Times = []
    for begin, end in times:
        if joined and begin - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
