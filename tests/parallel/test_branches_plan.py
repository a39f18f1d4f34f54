"""Grouping, streams, regions and the choice: against oracles, on any input."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.core.errors import PlanError
from kilter.core.reasons import Reason
from kilter.parallel.plan import (
    Trial,
    assign_lanes,
    choose,
    find_regions,
    group_equal,
    lane_counts,
    within,
)


def makespan(seconds, lanes):
    """When the last lane is done, if lanes do not slow each other down."""
    return max((sum(seconds[i] for i in lane) for lane in lanes), default=0.0)


times = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=7)


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_groups_hold_every_position_once_and_equals_together(signatures):
    groups = group_equal(signatures)
    assert sorted(i for g in groups for i in g) == list(range(len(signatures)))
    assert all(len({signatures[i] for i in g}) == 1 for g in groups)
    assert len(groups) == len(set(signatures))


@given(times, st.integers(1, 5))
def test_lanes_run_every_piece_once_longest_first_on_the_main_lane(seconds, count):
    lanes = assign_lanes(seconds, count)
    assert sorted(i for lane in lanes for i in lane) == list(range(len(seconds)))
    assert len(lanes) <= count
    assert seconds[lanes[0][0]] == max(seconds)
    for lane in lanes:
        assert [seconds[i] for i in lane] == sorted((seconds[i] for i in lane), reverse=True)


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=6), st.integers(1, 3))
def test_lanes_end_within_grahams_bound_of_the_best(seconds, count):
    best = min(
        max(sum(s for s, at in zip(seconds, where, strict=True) if at == lane) for lane in where)
        for where in product(range(count), repeat=len(seconds))
    )
    assert (
        makespan(seconds, assign_lanes(seconds, count)) <= (4 / 3 - 1 / (3 * count)) * best + 1e-9
    )


def test_lanes_refuse_nonsense():
    with pytest.raises(PlanError):
        assign_lanes([1.0], 0)
    with pytest.raises(PlanError):
        assign_lanes([float("nan")], 2)


def test_lane_counts_end_with_one_for_each():
    assert lane_counts(8) == (1, 2, 4, 8)
    assert lane_counts(3) == (1, 2, 3)
    assert lane_counts(0) == (1,)


def trial(mode, ms, streams=1, refused=None):
    why = None if refused is None else Reason("test", mode, refused)
    return Trial(mode=mode, streams=streams, seconds=ms and ms * 1e-3, refused=why)


def test_the_fastest_right_way_is_chosen():
    chosen, reason = choose(
        [
            trial("serial", 20),
            trial("graph", 5),
            trial("compiled", 1, 4),
            trial("fused", None, 1, "x"),
        ]
    )
    assert (chosen.mode, chosen.streams) == ("compiled", 4)
    assert "20.00x" in reason.text


def test_forking_must_earn_its_streams():
    chosen, reason = choose(
        [trial("serial", 20), trial("graph", 5), trial("graph_streams", 4.9, 4)]
    )
    assert chosen.mode == "graph"
    assert "less than 3%" in reason.text


def test_serial_stands_when_nothing_is_faster_or_right():
    assert choose([trial("serial", 1), trial("threads", 2)])[0].mode == "serial"
    chosen, reason = choose([trial("serial", 1), trial("graph", None, 1, "draws random numbers")])
    assert chosen.mode == "serial"
    assert reason == Reason("test", "graph", "draws random numbers")


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10.0), st.integers(1, 4), st.booleans()), min_size=1, max_size=12
    )
)
def test_whoever_tries_one_after_the_other_keeps_only_the_chosen_one(ways):
    """After each trial the choice is the one before, or the new trial."""
    trials = [trial("serial", 5)]
    chosen = trials[0]
    for ms, streams, refused in ways:
        trials.append(trial("way", ms, streams, "not right" if refused else None))
        now, _ = choose(trials)
        assert now is chosen or now is trials[-1] or now is trials[0]
        if now is trials[0]:
            assert chosen is trials[0]
        chosen = now


def test_reasons_of_several_refusals_are_joined_and_one_stays_itself():
    refusals = [trial("graph", None, 1, "b"), trial("streams", None, 1, "a")]
    assert choose([trial("serial", 1), *refusals])[1] == Reason("all_refused", "", "a; b")
    assert choose([trial("serial", 1), refusals[0]])[1] == refusals[0].refused
    assert choose([trial("serial", 1)])[1].code == "nothing_tried"


def test_the_first_trial_must_be_serial():
    with pytest.raises(PlanError):
        choose([trial("graph", 1)])


def test_errors_may_be_twice_the_serial_ones_or_one_rounding():
    assert within(2e-6, 1e-6, 0.0)
    assert not within(2.1e-6, 1e-6, 0.0)
    assert within(1e-7, 0.0, 2e-7)
    assert not within(float("inf"), 1.0, 1.0)
    assert not within(float("nan"), 1.0, 1.0)


def loop_of(branches: list[int], *, shared: bool) -> tuple[list[list[int]], list[int]]:
    """A trunk node, then chains of the given lengths one after the other, then a join."""
    producers: list[list[int]] = [[]]
    ends = []
    for length in branches:
        for step in range(length):
            producers.append([0] if step == 0 else [len(producers) - 1])
        ends.append(len(producers) - 1)
    if shared and len(branches) > 1:
        producers[ends[1]] = [*producers[ends[1]], ends[0]]
    producers.append(ends)
    return producers, ends


@given(st.lists(st.integers(2, 6), min_size=2, max_size=6))
def test_a_serial_loop_over_branches_is_found(branches):
    producers, ends = loop_of(branches, shared=False)
    (region,) = find_regions(producers, [1.0] * len(producers))
    assert len(region.branches) == len(branches)
    assert [b[-1] for b in region.branches] == ends
    assert region.gain == sum(branches) - max(branches)


def test_branches_that_read_each_other_are_one():
    producers, _ = loop_of([3, 3, 3], shared=True)
    (region,) = find_regions(producers, [1.0] * len(producers))
    assert len(region.branches) == 2


def test_a_chain_has_no_branches():
    assert find_regions([[], [0], [1], [2]], [1.0] * 4) == ()


def test_layers_become_regions_in_order():
    first, _ = loop_of([3, 4], shared=False)
    offset = len(first)
    second = [[r + offset for r in reads] for reads in first]
    second[0] = [offset - 1]
    regions = find_regions(first + second, [1.0] * (2 * offset))
    assert [len(r.branches) for r in regions] == [2, 2]
    assert regions[0].end <= regions[1].start


@st.composite
def programs(draw):
    count = draw(st.integers(1, 24))
    producers = [
        draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        for i in range(count)
    ]
    return producers, draw(st.lists(st.floats(0, 3), min_size=count, max_size=count))


@given(programs())
def test_branches_never_read_each_other_and_never_overlap(program):
    producers, weights = program
    taken: set[int] = set()
    for region in find_regions(producers, weights):
        owner = {n: i for i, branch in enumerate(region.branches) for n in branch}
        assert sorted(owner) == list(range(region.start, region.end))
        assert not taken & set(owner)
        taken |= set(owner)
        for node in owner:
            for read in producers[node]:
                assert owner.get(read, owner[node]) == owner[node]


def test_a_program_out_of_order_is_refused():
    with pytest.raises(PlanError):
        find_regions([[1], []], [1.0, 1.0])
