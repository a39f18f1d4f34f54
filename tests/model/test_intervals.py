"""Interval algebra against brute force on a small grid of unit cells."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kilter.model.intervals import clip, difference, intersection, join, length, union

CELLS = 24
INTERVALS = st.lists(
    st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)).map(lambda i: (min(i), max(i))),
    max_size=8,
)


def cells(intervals):
    return {c for begin, end in intervals for c in range(begin, end)}


def is_a_set(times):
    """Ascending, none empty, no two touching."""
    return all(b < e for b, e in times) and all(
        first[1] < second[0] for first, second in pairwise(times)
    )


@given(INTERVALS)
def test_union_covers_what_any_interval_covers(intervals):
    assert is_a_set(union(intervals))
    assert cells(union(intervals)) == cells(intervals)
    assert length(union(intervals)) == len(cells(intervals))


@given(INTERVALS, INTERVALS)
def test_intersection_and_difference_split_a_set(a, b):
    a, b = union(a), union(b)
    common, rest = intersection(a, b), difference(a, b)
    assert cells(common) == cells(a) & cells(b)
    assert cells(rest) == cells(a) - cells(b)
    assert union([*common, *rest]) == a
    assert length(common) + length(rest) == length(a)


@given(INTERVALS, INTERVALS)
def test_the_results_are_sets_again(a, b):
    a, b = union(a), union(b)
    assert is_a_set(intersection(a, b))
    assert is_a_set(difference(a, b))


@given(INTERVALS, st.integers(0, CELLS), st.integers(0, CELLS))
def test_clip_keeps_what_lies_inside(a, begin, end):
    clipped = clip(union(a), begin, end)
    assert is_a_set(clipped)
    assert cells(clipped) == cells(a) & set(range(begin, end))


@given(INTERVALS, st.integers(0, 4))
def test_join_fills_exactly_the_gaps_that_are_short_enough(a, gap):
    times = union(a)
    short = [(b, c) for (_, b), (c, _) in pairwise(times) if c - b <= gap]
    assert join(times, gap) == union([*times, *short])
