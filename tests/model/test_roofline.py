"""The roofline: faster clocks never cost time, and the roofs are where they should be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.model.roofline import Roofline

clocks = st.floats(1e8, 3e9)
amounts = st.floats(0, 1e15)


@st.composite
def rooflines(draw):
    return Roofline(
        flops_per_cycle=draw(st.floats(1e2, 1e6)),
        bytes_per_memory_cycle=draw(st.floats(10, 1e4)),
        bytes_per_sm_cycle=draw(st.floats(10, 1e5)),
        overlap=draw(st.floats(1, 12)),
        launch_s=draw(st.floats(1e-7, 1e-4)),
    )


def card(**changes):
    values = {
        "flops_per_cycle": 1000.0,
        "bytes_per_memory_cycle": 100.0,
        "bytes_per_sm_cycle": 1e9,
        "overlap": 8.0,
        "launch_s": 1e-6,
    }
    return Roofline(**{**values, **changes})


@settings(deadline=None)
@given(rooflines(), amounts, amounts, clocks, clocks, st.floats(1, 4))
def test_a_higher_clock_never_costs_time(roofline, flops, moved, sm, memory, up):
    now = roofline.busy_s(flops, moved, sm, memory)
    assert roofline.busy_s(flops, moved, sm * up, memory) <= now * (1 + 1e-12)
    assert roofline.busy_s(flops, moved, sm, memory * up) <= now * (1 + 1e-12)


@settings(deadline=None)
@given(rooflines(), amounts, amounts, clocks, clocks)
def test_time_is_between_the_longer_part_and_the_sum(roofline, flops, moved, sm, memory):
    compute_s = flops / (roofline.flops_per_cycle * sm)
    memory_s = moved / roofline.bandwidth(sm, memory)
    time_s = roofline.busy_s(flops, moved, sm, memory)
    assert max(compute_s, memory_s) * (1 - 1e-9) <= time_s
    assert time_s <= (compute_s + memory_s) * (1 + 1e-9)


@settings(deadline=None)
@given(rooflines(), clocks, clocks)
def test_bandwidth_is_below_both_what_is_asked_for_and_what_is_delivered(roofline, sm, memory):
    bandwidth = roofline.bandwidth(sm, memory)
    assert bandwidth <= roofline.bytes_per_sm_cycle * sm * (1 + 1e-12)
    assert bandwidth <= roofline.bytes_per_memory_cycle * memory * (1 + 1e-12)


def test_overlap_of_one_adds_and_a_large_one_takes_the_longer():
    def both(overlap):
        return card(overlap=overlap).busy_s(3e12, 4e11, 1e9, 1e9)  # 3 s and 4 s

    assert both(1.0) == pytest.approx(7.0)
    assert both(2.0) == pytest.approx(5.0)
    assert both(12.0) == pytest.approx(4.0, rel=0.01)


def test_compute_follows_the_sm_clock_and_copies_follow_the_memory_clock():
    roofline = card()
    assert roofline.busy_s(1e12, 0.0, 5e8, 1e9) == pytest.approx(
        2 * roofline.busy_s(1e12, 0.0, 1e9, 1e9)
    )
    assert roofline.busy_s(0.0, 1e12, 1e9, 5e8) == pytest.approx(
        2 * roofline.busy_s(0.0, 1e12, 1e9, 1e9)
    )
    assert roofline.busy_s(0.0, 1e12, 5e8, 1e9) == pytest.approx(
        roofline.busy_s(0.0, 1e12, 1e9, 1e9), rel=1e-3
    )


def test_arrays_give_what_single_values_give():
    roofline = card()
    flops, moved = np.array([0.0, 1e12, 5e12]), np.array([1e11, 0.0, 3e11])
    one_by_one = [roofline.busy_s(f, b, 1e9, 1e9) for f, b in zip(flops, moved, strict=True)]
    assert roofline.busy_s(flops, moved, 1e9, 1e9) == pytest.approx(one_by_one)


def test_no_work_takes_no_time():
    assert card().busy_s(0.0, 0.0, 1e9, 1e9) == 0.0


@pytest.mark.parametrize(
    "change", [{"flops_per_cycle": 0.0}, {"launch_s": float("nan")}, {"overlap": 0.5}]
)
def test_nonsense_is_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        card(**change)
