"""Computation with slack under communication, against a simulation of the two streams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.clocks.plan.cover import Cover, common, covers
from kilter.core.rank_trace import Collective
from kilter.model.intervals import union

PROGRAM = st.lists(
    st.tuples(
        st.floats(0.1, 5.0),  # a kernel
        st.one_of(st.none(), st.floats(0.1, 20.0)),  # the collective that it launches
    ),
    min_size=1,
    max_size=12,
).filter(lambda program: any(transfer for _, transfer in program))


def play(program, slow_from=None, stretch=1.0):
    """Kernels one after the other, those from a number on so many times as long; collectives one
    after the other, each when the kernels before it are over. What follows waits for all."""
    at, free = 0.0, 0.0
    kernels, collectives = [], []
    for number, (length, transfer) in enumerate(program):
        slow = slow_from is not None and number >= slow_from
        kernels.append((at, at + length * (stretch if slow else 1.0)))
        at = kernels[-1][1]
        if transfer is not None:
            begin = max(at, free)
            free = begin + transfer
            collectives.append(
                Collective(op="all_reduce", begin_s=begin, end_s=free, stream=1, ready_s=at)
            )
    return kernels, collectives


@given(PROGRAM)
def test_a_cover_has_no_effect_and_more_would(program):
    kernels, collectives = play(program)
    begin, end = kernels[-1][1], collectives[-1].end_s
    named = [(c, str(n)) for n, c in enumerate(collectives)]
    found = covers(named, union(kernels), from_s=0.0, begin_s=begin, end_s=end)
    numbers = [n for n, (_, transfer) in enumerate(program) if transfer is not None]
    assert [c.lead_s for c in found] == sorted(c.lead_s for c in found)
    for cover in found:
        first = numbers[int(cover.after)] + 1
        assert cover.compute_s == pytest.approx(sum(s for s, _ in program[first:]))
        assert cover.lead_s == pytest.approx(begin - kernels[first - 1][1])
        then, moved = play(program, first, cover.stretch)
        assert then[-1][1] <= end * (1 + 1e-9)
        assert [c.begin_s for c in moved] == pytest.approx([c.begin_s for c in collectives])
        then, moved = play(program, first, cover.stretch * 1.01)
        later = [a.begin_s > b.begin_s + 1e-9 for a, b in zip(moved, collectives, strict=True)]
        assert then[-1][1] > end or any(later)


def test_without_launches_nothing_is_known_to_have_slack():
    kernels, collectives = play([(1.0, 5.0), (1.0, 5.0), (2.0, None)])
    named = [(c, str(n)) for n, c in enumerate(collectives)]
    args = {"from_s": 0.0, "begin_s": 4.0, "end_s": 11.0}
    assert covers(named, union(kernels), **args)
    blind = [(Collective(op="x", begin_s=c.begin_s, end_s=c.end_s, stream=1), n) for c, n in named]
    assert covers(blind, union(kernels), **args) == ()


def test_a_collective_that_begins_as_soon_as_it_is_ready_leaves_no_slack_before_it():
    program = [(1.0, 0.5), (1.0, 0.5), (1.0, 9.0)]
    kernels, collectives = play(program)
    named = [(c, str(n)) for n, c in enumerate(collectives)]
    assert covers(named, union(kernels), from_s=0.0, begin_s=3.0, end_s=12.0) == ()


def test_of_several_occurrences_the_least_counts():
    a = Cover(after="x", lead_s=3.0, compute_s=2.0, stretch=4.0)
    b = Cover(after="x", lead_s=2.0, compute_s=2.5, stretch=3.0)
    other = Cover(after="y", lead_s=5.0, compute_s=5.0, stretch=2.0)
    assert common([(a, other), (b,)]) == (Cover(after="x", lead_s=2.0, compute_s=2.0, stretch=3.0),)
    assert common([]) == ()
