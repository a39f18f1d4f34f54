"""The search for the fraction of a compiled region's saved tensors that keeps a budget."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kilter.memory.plan.fraction import (
    APART_FRACTION,
    CLOSE,
    LEAST_FRACTION,
    MOST_TRIES,
    Tried,
    best,
    next_fraction,
)

PLAIN = Tried(1.0, 10**9)


def searched(
    peak_of: Callable[[float], int], budget_bytes: int, saved_bytes: int
) -> tuple[Tried, list[Tried]]:
    tried: list[Tried] = []
    while (
        fraction := next_fraction(PLAIN, tried, saved_bytes=saved_bytes, budget_bytes=budget_bytes)
    ) is not None:
        tried.append(Tried(fraction, peak_of(fraction)))
        assert len(tried) <= MOST_TRIES
    return best([PLAIN, *tried], budget_bytes), tried


@given(st.lists(st.integers(0, 3 * 10**9), min_size=20, max_size=20), st.integers(1, 10**9))
def test_whatever_the_peaks_are_few_fractions_are_tried_and_a_measured_one_is_taken(
    peaks: list[int], budget_bytes: int
) -> None:
    found, tried = searched(lambda f: peaks[int(f * 20)], budget_bytes, 8 * 10**8)
    assert all(LEAST_FRACTION <= point.fraction <= 1 - APART_FRACTION for point in tried)
    assert len({point.fraction for point in tried}) == len(tried)
    assert found in [PLAIN, *tried]
    within = [point for point in [PLAIN, *tried] if point.peak_bytes <= budget_bytes]
    assert (found.peak_bytes <= budget_bytes) == bool(within)


@given(st.integers(0, 9 * 10**8), st.floats(0.3, 0.99), st.floats(0.5, 2.0))
def test_a_budget_is_met_closely_where_peaks_follow_the_fraction(
    base_bytes: int, share: float, error: float
) -> None:
    """Also where autograd saves another amount than what the peak falls by."""
    span_bytes = PLAIN.peak_bytes - base_bytes
    budget_bytes = int(share * PLAIN.peak_bytes)

    def peak_of(fraction: float) -> int:
        return int(base_bytes + fraction * span_bytes)

    found, _ = searched(peak_of, budget_bytes, int(error * span_bytes))
    if peak_of(LEAST_FRACTION) <= budget_bytes:
        assert found.peak_bytes <= budget_bytes
        apart_bytes = 2 * APART_FRACTION * span_bytes
        assert budget_bytes - found.peak_bytes <= max(CLOSE * PLAIN.peak_bytes, apart_bytes) + 2
    else:
        assert found.fraction <= LEAST_FRACTION + 2 * APART_FRACTION


def test_a_job_that_fits_is_left_alone() -> None:
    assert searched(lambda f: 0, PLAIN.peak_bytes, 10**8) == (PLAIN, [])


def test_going_lower_ends_where_it_takes_more() -> None:
    """The peak is not monotonic: what is recomputed at one time takes memory, too."""
    found, tried = searched(lambda f: int(9e8 + (0.5 - f) * 1e8), 10**8, 8 * 10**8)
    assert len(tried) <= 2
    assert found in tried
