"""Which sets of calls are tried."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from kilter.memory.plan.segments import SegmentChoice, best_set, levels

SPANS = st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(1, 10**6))
CHOICES = st.lists(
    SPANS.map(lambda span: SegmentChoice(span[0], span[0] + span[1], span[2], 1e-3)), max_size=12
)


@given(CHOICES)
def test_calls_of_a_set_lie_apart(choices: list[SegmentChoice]) -> None:
    for level in levels(choices):
        found = [choices[index] for index in level]
        assert not any(a.overlaps(b) for i, a in enumerate(found) for b in found[:i])


@given(CHOICES)
def test_the_best_set_is_no_worse_than_none_and_no_worse_than_any_level(
    choices: list[SegmentChoice],
) -> None:
    def cost_s(chosen: tuple[int, ...], below_s: float = inf) -> float:
        found_s = abs(sum(choices[index].size_bytes for index in chosen) - 10**6)
        return found_s if found_s < below_s else inf

    best = best_set(choices, cost_s)
    least_s = min(cost_s(level) for level in [(), *levels(choices)])
    assert best is not None
    assert cost_s(best) <= least_s
    for below_s in (cost_s(best), least_s + 1):
        found = best_set(choices, cost_s, below_s)
        assert found is None or cost_s(found) < below_s
    assert found is not None
    assert cost_s(found) <= least_s


def test_blocks_are_a_set_beside_their_halves() -> None:
    blocks = [SegmentChoice(10 * k, 10 * k + 9, 1000, 1e-3) for k in range(4)]
    halves = [SegmentChoice(5 * k, 5 * k + 4, 400, 1e-3) for k in range(8)]
    found = levels([*blocks, *halves])
    assert tuple(range(4)) in found
    assert tuple(range(4, 12)) in found


def test_where_not_all_of_the_largest_calls_fit_the_last_of_them_are_tried() -> None:
    blocks = [SegmentChoice(10 * k, 10 * k + 9, 1000, 1e-3) for k in range(8)]
    layers = [SegmentChoice(10 * k, 10 * k + 2, 100, 1e-3) for k in range(8)]

    def cost_s(chosen: tuple[int, ...], below_s: float) -> float:
        """The first two blocks do not fit."""
        found_s = inf if {0, 1} & {*chosen} else 10.0 - len([i for i in chosen if i < 8])
        return found_s if found_s < below_s else inf

    assert best_set([*blocks, *layers], cost_s) == (2, 3, 4, 5, 6, 7)
