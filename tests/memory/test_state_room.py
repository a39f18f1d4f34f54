"""How much state leaves for memory that is missing, and how much of what left for a guess comes
back."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kilter.core.units import GIB
from kilter.memory.state_room import SLACK, to_offload_bytes

BYTES = st.integers(min_value=0, max_value=2**40)


@given(offloaded_bytes=BYTES, stays_bytes=BYTES)
def test_what_is_missing_stays_on_the_host_with_little_more(
    offloaded_bytes: int, stays_bytes: int
) -> None:
    more_bytes = to_offload_bytes(stays_bytes - offloaded_bytes, offloaded_bytes)
    assert stays_bytes <= offloaded_bytes + more_bytes <= (1 + SLACK) * stays_bytes


@given(offloaded_bytes=BYTES, spare_bytes=BYTES)
def test_what_has_room_comes_back(offloaded_bytes: int, spare_bytes: int) -> None:
    back_bytes = -to_offload_bytes(-(offloaded_bytes + spare_bytes), offloaded_bytes)
    assert back_bytes >= offloaded_bytes


def test_of_state_that_left_for_a_guess_only_what_is_needed_stays() -> None:
    """A GPT of 1.64 billion parameters at half of its peak: 6.9 GiB left in the first step, and
    1.5 are needed. A tenth of the 5.4 that are spare would be a third more on the host."""
    stays_gib = 6.9 + to_offload_bytes(int(-5.4 * GIB), int(6.9 * GIB)) / GIB
    assert 1.5 <= stays_gib < 1.66
