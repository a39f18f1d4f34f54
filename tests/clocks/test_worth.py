"""Which sections are worth a lower clock: break-even, timing, and the choice of stretches."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.clocks.plan.cover import Cover
from kilter.clocks.plan.sections import RankSections, Section, SectionPlace, Short
from kilter.clocks.plan.timing import schedule
from kilter.clocks.plan.worth import (
    ClockCosts,
    Latency,
    Level,
    candidates,
    choose,
    job,
    retimed,
    summary,
    whole_job,
    worth,
)

FAST = Latency(median_s=1e-3, spread=0.0)


def card(latency=FAST, levels=(0.75, 0.5), calls_per_s=math.inf):
    return ClockCosts(
        levels=tuple(
            Level(
                sm_clock_hz=2e9 * f,
                saved_w=60.0 * (1 - f),
                waiting_w=60 + 60 * f,
                computing_w=60 + 540 * f**3,
                stretch=1 / f,
            )
            for f in levels
        ),
        down=latency,
        up=latency,
        computing_w=600.0,
        waiting_w=120.0,
        calls_per_s=calls_per_s,
    )


def sections(lengths, gaps, presence=1.0, covers=()):
    """`covers`: of each section, how much of the gap before it has slack, and for which stretch."""
    found, at, before = [], 0.0, 0.0
    for i, (length, gap) in enumerate(zip(lengths, gaps, strict=True)):
        share, most = covers[i] if covers else (0.0, 1.0)
        lead = share * before
        own = Cover(after=f"all_reduce/dp/{i}", lead_s=lead, compute_s=0.9 * lead, stretch=most)
        before = gap
        found.append(
            Section(
                key=f"all_reduce/dp/{i}",
                op="all_reduce",
                group="dp",
                bytes=None,
                collectives=1,
                presence=presence,
                start_s=at,
                length_s=length,
                length_p5_s=length,
                length_p95_s=length,
                exposed_s=length,
                wait_s=None,
                gap_s=gap,
                gap_compute_s=gap,
                covers=(own,) if lead else (),
            )
        )
        at += length + gap
    return found


def rank(found, *, presence=1.0):
    exposed = sum(s.exposed_s for s in found)
    compute = sum(s.gap_compute_s for s in found)
    mean = SectionPlace(
        iteration_s=exposed + compute,
        compute_s=compute,
        comm_s=exposed,
        exposed_s=exposed,
        overlapped_s=0.0,
        copy_s=0.0,
        idle_s=0.0,
        wait_s=None,
        transfer_s=None,
        exposed_wait_s=None,
    )
    return RankSections(
        rank=0,
        source="x",
        device="",
        iterations=10,
        found_by="",
        mean=mean,
        per_iteration=(mean,),
        sections=tuple(found),
        short_sections=Short(count=0.0, exposed_s=0.0),
        clock_offset_s=0.0,
    )


@given(
    lengths=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
    gap=st.floats(0.01, 1.0),
    slowdowns=st.tuples(st.floats(0.0, 0.2), st.floats(0.0, 0.2)),
)
def test_one_clock_for_the_job_saves_more_the_more_it_may_cost(lengths, gap, slowdowns):
    found = worth(rank(sections(lengths, [gap] * len(lengths))), card(), max_slowdown=0.01)
    low, high = (whole_job([found], card(), max_slowdown=s) for s in sorted(slowdowns))
    assert 0.0 <= low <= high + 1e-12
    assert whole_job([found], card(), max_slowdown=0.0) == pytest.approx(0.0, abs=1e-12)
    assert whole_job([found], card(levels=()), max_slowdown=0.2) == pytest.approx(0.0, abs=1e-12)


def test_stretches_take_the_times_of_a_newer_window():
    before = rank(sections([0.3, 0.3], [0.2, 0.2]))
    found = worth(before, card(), max_slowdown=0.01).stretches
    assert found
    newer = rank(sections([0.4, 0.4], [0.1, 0.1]))
    after = retimed(found, newer, card())
    assert after is not None
    assert [s.first for s in after] == [s.first for s in found]
    assert after[0].end_s - after[0].start_s > found[0].end_s - found[0].start_s
    assert retimed(found, rank(sections([0.4], [0.1])), card()) is None
    assert retimed(found, rank(sections([0.001, 0.001], [0.1, 0.1])), card()) is None
    assert retimed((), before, card()) == ()


@pytest.mark.parametrize("spread", [0.05, 0.3, 0.8])
def test_the_tails_of_the_latency_are_those_of_its_samples(spread):
    latency = Latency(median_s=0.03, spread=spread)
    samples = 0.03 * np.exp(np.random.default_rng(0).normal(0.0, spread, 400_000))
    assert latency.quantile(0.95) == pytest.approx(np.quantile(samples, 0.95), rel=0.01)
    late = np.maximum(samples - latency.quantile(0.95), 0.0).mean()
    early = np.maximum(latency.quantile(0.05) - samples, 0.0).mean()
    assert latency.late_s == pytest.approx(late, rel=0.05)
    assert latency.early_s == pytest.approx(early, rel=0.05)


def test_below_the_break_even_nothing_is_gained():
    found = worth(rank(sections([1.9e-3] * 3, [0.1] * 3)), card(), max_slowdown=0.0)
    assert found.stretches == ()
    assert {r.code for r in found.refused} == {"below_break_even"}
    assert found.refused[0].text == "1.9 ms < break-even 2 ms"
    text = summary([found], card())
    assert text == (
        "Nothing to gain: 1.9 % exposed, the longest section takes 1.9 ms, below the break-even "
        "of 2 ms."
    )


def test_a_long_section_takes_the_lowest_clock_and_is_restored_before_its_end():
    found = worth(rank(sections([0.3], [0.1])), card(), max_slowdown=0.01)
    (stretch,) = found.stretches
    assert stretch.sm_clock_hz == 1e9
    assert stretch.up_at_s == pytest.approx(0.3 - 1e-3)
    assert stretch.down_at_s == pytest.approx(-1e-3)
    assert stretch.saved_j == pytest.approx(0.3 * 30.0)
    assert found.slowdown == pytest.approx(0.0, abs=1e-9)
    assert found.saving == pytest.approx(9.0 / (0.1 * 600 + 0.3 * 120))
    assert job([found]) == (pytest.approx(found.saving), pytest.approx(found.slowdown, abs=1e-12))


def test_short_sections_are_joined_over_short_gaps_only_within_the_budget():
    found = sections([1.5e-3] * 4, [10e-6, 10e-6, 10e-6, 50e-3])
    assert choose(found, card(), budget_s=0.0) == ()
    (stretch,) = choose(found, card(), budget_s=1e-3)
    assert stretch.sections == 4
    assert stretch.delay_s == pytest.approx(30e-6, rel=0.01)


def test_the_gentler_clock_is_taken_where_the_lower_one_would_break_the_budget():
    found = sections([3e-3] * 2, [300e-6, 50e-3])
    clocks = []
    for budget_s in (110e-6, 140e-6):
        (stretch,) = choose(found, card(levels=(0.75, 0.7)), budget_s=budget_s)
        assert stretch.sections == 2
        clocks.append(stretch.sm_clock_hz)
    assert clocks == [1.5e9, 1.4e9]


CASES = st.lists(
    st.tuples(
        st.floats(0.2e-3, 6e-3),
        st.floats(1e-6, 2e-3),
        st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([1.2, 1.5, 3.0])),
    ),
    min_size=1,
    max_size=4,
)


@given(
    case=CASES,
    budget_s=st.sampled_from([0.0, 1e-5, 1e-4, 1e-3, 1e-2]),
    most=st.sampled_from([None, 0, 1, 2]),
    spread=st.sampled_from([0.0, 0.3]),
)
@settings(deadline=None)
def test_the_choice_equals_brute_force(case, budget_s, most, spread):
    found = sections(*zip(*(c[:2] for c in case), strict=True), covers=[c[2] for c in case])
    there = card(Latency(median_s=0.5e-3, spread=spread))
    options = [
        (a, b, stretch)
        for a in range(len(found))
        for b, stretch in candidates(found, a, there, budget_s=budget_s)
    ]
    best = 0.0
    for count in range(len(found) + 1 if most is None else most + 1):
        for some in itertools.combinations(options, count):
            ordered = sorted(some, key=lambda option: option[0])
            apart = all(
                x[1] < y[0] and y[2].start_s - there.down.quantile(0.05) >= x[2].end_s
                for x, y in itertools.pairwise(ordered)
            )
            if apart and sum(s.delay_s for *_, s in some) <= budget_s:
                best = max(best, sum(s.saved_j for *_, s in some))
    chosen = choose(found, there, budget_s=budget_s, most=most)
    assert sum(s.saved_j for s in chosen) == pytest.approx(best)
    assert sum(s.delay_s for s in chosen) <= budget_s * (1 + 1e-9)
    assert most is None or len(chosen) <= most


def test_computation_with_slack_is_taken_in_as_far_as_it_saves():
    lengths, gaps = [0.2, 0.3], [0.1, 0.0]
    without = worth(rank(sections(lengths, gaps)), card(), max_slowdown=0.001)
    for most, clock_hz in ((1.5, 1.5e9), (2.5, 1e9)):
        found = sections(lengths, gaps, covers=[(0.0, 1.0), (0.5, most)])
        [first, second] = worth(rank(found), card(), max_slowdown=0.001).stretches
        assert first == without.stretches[0]
        assert second.sm_clock_hz == clock_hz
        assert second.start_s == pytest.approx(0.25)
        assert second.cover is not None
        assert second.saved_j > without.stretches[1].saved_j
        assert second.delay_s == pytest.approx(0.0, abs=1e-9)
        [down, up, *_] = schedule([second], card(), 0.6).commands
        assert down.key == "all_reduce/dp/1 after all_reduce/dp/1"  # no edge of the section
        assert up.key == "all_reduce/dp/1"
    # Where the lowest clock has no slack, and a gentler one saves less, the section stands alone.
    tight = sections(lengths, gaps, covers=[(0.0, 1.0), (0.01, 1.5)])
    assert worth(rank(tight), card(), max_slowdown=0.001).stretches == without.stretches
    newer = rank(sections(lengths, gaps, covers=[(0.0, 1.0), (0.8, 2.2)]))
    [again] = retimed([second], newer, card())
    assert again.start_s == pytest.approx(0.22)
    assert retimed([second], rank(found[:1]), card()) is None
    assert retimed([second], rank(sections(lengths, gaps)), card()) is None


def test_clock_calls_are_rate_limited():
    found = rank(sections([5e-3] * 40, [5e-3] * 40))
    unlimited = worth(found, card(), max_slowdown=0.01)
    limited = worth(found, card(calls_per_s=10.0), max_slowdown=0.01)
    assert len(unlimited.stretches) == 40
    assert len(limited.stretches) == 2
    assert {r.code for r in limited.refused} == {"rate"}
    short = worth(rank(sections([50e-3], [50e-3])), card(calls_per_s=10.0), max_slowdown=0.01)
    assert "too short for two clock calls" in summary([short], card(calls_per_s=10.0))


def test_a_section_that_comes_seldom_is_no_prediction():
    often = worth(rank(sections([0.3], [0.1], presence=0.3)), card(), max_slowdown=0.01)
    assert often.stretches == ()
    assert [r.code for r in often.refused] == ["reactive"]
    rare = worth(rank(sections([1e-3], [0.1], presence=0.3)), card(), max_slowdown=0.01)
    assert [r.code for r in rare.refused] == ["rare"]
