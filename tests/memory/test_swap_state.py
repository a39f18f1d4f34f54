"""Plans for optimizer state never take more room than given, and every visit finds its state."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.core.errors import PlanError
from kilter.memory.plan.problem import Link
from kilter.memory.plan.state import (
    Bucket,
    StatePlan,
    Update,
    in_buckets,
    plan_state,
    plan_step,
)

LINK = Link(to_host_bytes_per_s=100.0, to_device_bytes_per_s=100.0, both_bytes_per_s=200.0)
updates = st.lists(
    st.builds(
        Update,
        gradient_bytes=st.integers(1, 100),
        state_bytes=st.integers(0, 200),
        arrives_s=st.floats(0, 10),
    ),
    min_size=1,
    max_size=40,
)


def walked(plan: StatePlan, buckets: tuple[Bucket, ...]) -> int:
    """Carry a plan out with a set of what is on the device; the most it ever held."""
    here = set(range(len(buckets))) - plan.streamed
    peak = 0

    def load(numbers: tuple[int, ...]) -> None:
        nonlocal peak
        for i in numbers:
            assert i not in here
            here.add(i)
        peak = max(peak, sum(buckets[i].state_bytes for i in here))

    load(plan.begin)
    for visit, _ in enumerate(buckets):
        assert visit in here
        for i in plan.release[visit]:
            assert i <= visit, "given up before it was visited"
            assert i in plan.streamed
            here.remove(i)
        load(plan.load[visit])
    assert here == set(range(len(buckets))) - plan.streamed
    return peak


@given(updates, st.integers(1, 300))
def test_buckets_are_the_updates_in_order(found: list[Update], size_bytes: int) -> None:
    buckets = in_buckets(found, size_bytes)
    first = 0
    for bucket in buckets:
        members = found[first : first + bucket.count]
        assert bucket.first == first
        assert bucket.gradient_bytes == sum(u.gradient_bytes for u in members)
        assert bucket.state_bytes == sum(u.state_bytes for u in members)
        assert bucket.gradient_bytes - members[-1].gradient_bytes < size_bytes
        first += bucket.count
    assert first == len(found)


@settings(deadline=None)
@given(updates, st.integers(1, 200), st.floats(0, 1.2))
def test_never_above_its_room_and_every_visit_finds_its_state(
    found: list[Update], size_bytes: int, share: float
) -> None:
    buckets = in_buckets(found, size_bytes)
    room_bytes = int(share * sum(b.state_bytes for b in buckets))
    largest_bytes = max(b.state_bytes for b in buckets)
    if largest_bytes > room_bytes:
        with pytest.raises(PlanError):
            plan_state(buckets, room_bytes=room_bytes, link=LINK)
        return
    plan = plan_state(buckets, room_bytes=room_bytes, link=LINK)
    assert walked(plan, buckets) == plan.peak_bytes <= room_bytes
    total_bytes = sum(b.state_bytes for b in buckets)
    assert plan.resident_bytes + plan.moved_bytes == total_bytes
    assert (plan.moved_bytes == 0) == (total_bytes <= room_bytes)


@settings(deadline=None)
@given(updates, st.integers(1, 200), st.floats(0, 1.2), st.floats(0, 1), st.floats(0, 0.01))
def test_in_a_step_state_may_take_more_than_between_steps(
    found: list[Update], size_bytes: int, share: float, more: float, each_s: float
) -> None:
    buckets = in_buckets(found, size_bytes)
    total_bytes = sum(b.state_bytes for b in buckets)
    room_bytes = int(share * total_bytes)
    step_room_bytes = room_bytes + int(more * total_bytes)
    times_s = [each_s * b.gradient_bytes for b in buckets]
    rooms = {"room_bytes": room_bytes, "step_room_bytes": step_room_bytes}
    if max(b.state_bytes for b in buckets) > step_room_bytes:
        with pytest.raises(PlanError):
            plan_step(buckets, times_s, **rooms, link=LINK)
        return
    plan = plan_step(buckets, times_s, **rooms, link=LINK)
    assert walked(plan, buckets) == plan.peak_bytes <= step_room_bytes
    assert plan.resident_bytes <= room_bytes
    assert plan.resident_bytes + plan.moved_bytes == total_bytes
    assert (plan.moved_bytes == 0) == (total_bytes <= room_bytes)


def test_updates_of_what_stays_hide_the_copies() -> None:
    """A quarter of the buckets stream, 0.1 s each way; the updates take 1.44 s in all."""
    buckets = even(48, 10, 0.0)
    rooms = {"room_bytes": 360, "step_room_bytes": 480}
    slow = plan_step(buckets, [0.03] * 48, **rooms, link=LINK)
    fast = plan_step(buckets, [0.0] * 48, **rooms, link=LINK)
    assert slow.stall_s < 0.2
    assert fast.stall_s > 1.2


def test_in_a_step_finer_buckets_leave_more_room_for_what_stays() -> None:
    """An eighth of 48 times the state of each bucket has to be away between steps. Four times as
    many buckets need a quarter of the memory in flight, so less streams."""
    rooms = {"room_bytes": 420 * 4, "step_room_bytes": 430 * 4}
    coarse = plan_step(even(48, 40, 0.0), [0.02] * 48, **rooms, link=LINK)
    fine = plan_step(even(192, 10, 0.0), [0.005] * 192, **rooms, link=LINK)
    assert 60 * 4 <= fine.moved_bytes < coarse.moved_bytes
    assert fine.stall_s < 0.8 * coarse.stall_s


def with_embedding(embedding_bytes: int) -> tuple[Bucket, ...]:
    """The state of 60 weights, and in their midst that of an embedding."""
    sizes = [10] * 30 + [embedding_bytes] + [10] * 30
    return in_buckets([Update(gradient_bytes=1, state_bytes=size) for size in sizes], 1)


def test_a_large_bucket_stays_where_others_are_enough() -> None:
    """Memory for its 80 bytes in flight would be taken from eight others."""
    plan = plan_step(
        with_embedding(80), [0.01] * 61, room_bytes=580, step_room_bytes=590, link=LINK
    )
    assert 30 not in plan.streamed
    assert plan.moved_bytes <= 140


def test_a_large_bucket_streams_where_others_are_not_enough() -> None:
    plan = plan_step(
        with_embedding(400), [0.01] * 61, room_bytes=350, step_room_bytes=420, link=LINK
    )
    assert 30 in plan.streamed
    assert plan.resident_bytes <= 350


def even(count: int, size_bytes: int, step_s: float) -> tuple[Bucket, ...]:
    return in_buckets(
        [
            Update(gradient_bytes=1, state_bytes=size_bytes, arrives_s=i * step_s)
            for i in range(count)
        ],
        1,
    )


def test_a_fast_link_hides_what_streams() -> None:
    """Each bucket takes 0.1 s each way, and there is 1 s between visits."""
    plan = plan_state(even(20, 10, 1.0), room_bytes=100, link=LINK)
    assert plan.moved_bytes >= 100
    assert plan.stall_s == pytest.approx(0.0, abs=0.2)


def test_a_slow_link_streams_every_other_bucket_rather_than_half_in_a_row() -> None:
    """0.1 s each way and 0.06 s between visits: in a row the link would be late each time."""
    buckets = even(40, 10, 0.06)
    plan = plan_state(buckets, room_bytes=280, link=LINK)
    in_a_row = sum(j - i == 1 for i in plan.streamed for j in plan.streamed)
    assert in_a_row < len(plan.streamed) / 2
    assert plan.stall_s <= 0.1


def test_stall_of_a_link_that_is_always_late() -> None:
    """One bucket at a time: in, out, in, out, nothing hidden."""
    plan = plan_state(even(3, 10, 0.0), room_bytes=10, link=LINK)
    assert plan.stall_s == pytest.approx(6 * 0.1)
