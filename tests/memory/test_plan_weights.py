"""Weights leave after their use, when the host has them, and are back before their need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.memory.plan.problem import Link
from kilter.memory.plan.weights import Weight, WeightPlan, plan_weights

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
MB = 10**6


def layered(
    count: int,
    *,
    size_bytes: int = MB,
    tick_s: float = 2e-3,
    offloaded_bytes: int = 2**62,
    in_step: bool = True,
) -> tuple[list[Weight], WeightPlan]:
    """One weight a layer, forward and back; a tick of backward takes twice as long."""
    weights = [
        Weight(
            size_bytes=size_bytes,
            used_at=i,
            needed_at=2 * count - 1 - i,
            updated_at=None if in_step else 2 * count - 1 - i,
        )
        for i in range(count)
    ]
    at_s = [tick_s * i for i in range(count)] + [tick_s * (count + 2 * i) for i in range(count)]
    plan = plan_weights(
        weights,
        at_s=at_s,
        turn=count,
        period_s=tick_s * (3 * count + 1),
        offloaded_bytes=offloaded_bytes,
        link=LINK,
    )
    return weights, plan


def test_so_much_leaves_as_is_asked_for_first_used_first() -> None:
    _, plan = layered(8, offloaded_bytes=3 * MB)
    assert plan.moved == (0, 1, 2)
    assert plan.offloaded_bytes == 3 * MB


def test_what_is_needed_at_once_stays() -> None:
    _, plan = layered(8)
    assert plan.moved == tuple(range(7))


def test_a_fast_link_never_lets_compute_wait() -> None:
    _, plan = layered(8, in_step=False)
    assert plan.stall_s == 0
    assert plan.release == {i: (i,) for i in range(7)}
    for tick, numbers in plan.load.items():
        for i in numbers:
            assert tick == max(8, 16 - 3 - i)  # one tick ahead, in backward


def test_updates_in_the_step_leave_when_their_copies_are_done() -> None:
    """All are copied in forward: one a tick arrives at the host, a little later than it is used."""
    _, plan = layered(8, tick_s=0.5e-3)
    assert all(tick >= i for tick, numbers in plan.release.items() for i in numbers)
    assert plan.release[7] != ()  # forward's end waits for the rest
    assert plan.stall_s > 0


def test_a_slow_link_is_said_to_cost() -> None:
    _, plan = layered(8, tick_s=0.1e-3, in_step=False)
    assert plan.stall_s > 4e-3  # 7 ms of loads in 1.6 ms of backward


def test_nothing_asked_for_is_nothing_done() -> None:
    _, plan = layered(8, offloaded_bytes=0)
    assert plan == WeightPlan(release={}, load={}, offloaded_bytes=0, stall_s=0.0)


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[Weight], list[float], int]:
    forward = draw(st.integers(1, 8))
    backward = draw(st.integers(1, 8))
    gaps = draw(
        st.lists(st.floats(0, 1e-2), min_size=forward + backward, max_size=forward + backward)
    )
    at_s = [sum(gaps[:i]) for i in range(forward + backward)]
    weights = draw(
        st.lists(
            st.builds(
                Weight,
                size_bytes=st.integers(1, 10 * MB),
                used_at=st.integers(0, forward - 1),
                needed_at=st.integers(forward, forward + backward - 1),
                updated_at=st.none() | st.integers(forward, forward + backward - 1),
            ),
            max_size=8,
        )
    )
    return weights, at_s, forward


@given(passes(), st.integers(0, 40 * MB), st.floats(0, 0.2))
def test_every_weight_leaves_after_its_use_and_is_asked_back_before_its_need(
    made: tuple[list[Weight], list[float], int], offloaded_bytes: int, spare_s: float
) -> None:
    weights, at_s, turn = made
    plan = plan_weights(
        weights,
        at_s=at_s,
        turn=turn,
        period_s=at_s[-1] + spare_s,
        offloaded_bytes=offloaded_bytes,
        link=LINK,
    )
    left = {i: tick for tick, numbers in plan.release.items() for i in numbers}
    back = {i: tick for tick, numbers in plan.load.items() for i in numbers}
    assert sorted(left) == sorted(back) == list(plan.moved)
    assert plan.offloaded_bytes == sum(weights[i].size_bytes for i in left)
    for i, tick in left.items():
        assert weights[i].used_at <= tick < turn
        assert turn <= back[i] < weights[i].needed_at
    order = [i for tick in sorted(plan.load) for i in plan.load[tick]]
    assert [weights[i].needed_at for i in order] == sorted(weights[i].needed_at for i in order)
    assert plan.stall_s >= 0
    if plan.moved:
        last = max(plan.moved, key=lambda i: (weights[i].used_at, i))
        assert (
            plan.offloaded_bytes - weights[last].size_bytes < offloaded_bytes
        )  # no more than necessary


def test_lateness_is_that_of_a_queue() -> None:
    """Two weights of 1 ms needed at the same tick, half a millisecond after the turn."""
    weights = [Weight(size_bytes=MB, used_at=0, needed_at=3, updated_at=3) for _ in range(2)]
    plan = plan_weights(
        weights,
        at_s=[0.0, 1e-3, 2e-3, 2.5e-3],
        turn=2,
        period_s=1.0,
        offloaded_bytes=2 * MB,
        link=LINK,
    )
    assert plan.load == {2: (0, 1)}
    assert plan.stall_s == pytest.approx(1.5e-3)
