"""Which of two ways to recompute is faster, and after how many turns that is clear."""

from __future__ import annotations

import pytest

from kilter.memory.kept_recompute import RecomputeWay
from kilter.memory.way_comparison import WayComparison

CALLS, OWN, OPERATIONS = RecomputeWay


def comparison_of(*turns_s: float, other: RecomputeWay) -> WayComparison:
    """The last of these turns makes it clear."""
    comparison = WayComparison()
    comparison.other = other
    assert [comparison.add(turn_s) for turn_s in turns_s] == [False] * (len(turns_s) - 1) + [True]
    return comparison


@pytest.mark.parametrize(
    ("turns_s", "stays"),
    [
        ((0.131, 0.08, 0.131), OWN),
        ((0.131, 0.14, 0.131), OPERATIONS),
        ((0.131, 0.13, 0.131), OPERATIONS),
        # Other programs make the machine slower for a while.
        ((0.27, 0.34, 0.37, 0.32, 0.27, 0.23, 0.27), OWN),
        ((0.27, 0.24, 0.37, 0.32, 0.36), OWN),
        ((0.27, 0.29, 0.30, 0.29, 0.28, 0.28, 0.27), OPERATIONS),
    ],
    ids=["own", "operations", "hardly faster", "slower meanwhile", "slower later", "never clear"],
)
def test_checkpointing_takes_turns_until_one_is_faster(
    turns_s: tuple[float, ...], stays: RecomputeWay
) -> None:
    assert comparison_of(*turns_s, other=OWN).base is stays


@pytest.mark.parametrize(
    ("calls_s", "stays"), [(0.092, CALLS), (0.130, OPERATIONS), (0.150, OPERATIONS)]
)
def test_calls_have_one_turn_beside_single_operations(calls_s: float, stays: RecomputeWay) -> None:
    assert comparison_of(0.131, calls_s, other=CALLS).base is stays


def test_calls_take_turns_with_checkpointing_that_was_faster() -> None:
    comparison = comparison_of(0.131, 0.08, 0.131, other=OWN)
    comparison.go_on_with(CALLS)
    assert not comparison.add(0.07)
    assert comparison.add(0.08)
    assert comparison.base is CALLS
    assert comparison.words == (
        "80 ms an iteration with the model's own checkpointing, "
        "131 ms with single operations, 70 ms with calls of modules [measured]"
    )


def test_a_turn_that_was_not_measured_shows_nothing() -> None:
    comparison = WayComparison()
    comparison.other = CALLS
    comparison.add(0.131)
    assert not comparison.add(None)
    assert (comparison.base, comparison.words) == (OPERATIONS, "")
