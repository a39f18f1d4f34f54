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

    best_s = cost_s(best_set(choices, cost_s))
    assert best_s <= min(cost_s(level) for level in [(), *levels(choices)])


def test_blocks_are_a_set_beside_their_halves() -> None:
    blocks = [SegmentChoice(10 * k, 10 * k + 9, 1000, 1e-3) for k in range(4)]
    halves = [SegmentChoice(5 * k, 5 * k + 4, 400, 1e-3) for k in range(8)]
    found = levels([*blocks, *halves])
    assert tuple(range(4)) in found
    assert tuple(range(4, 12)) in found
