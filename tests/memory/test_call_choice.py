"""How much of what calls saved is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from kilter.memory.engine.call_choice import CallChoice
from kilter.memory.engine.pass_record import (
    HELD_SHARE,
    HeldBytes,
    PassRecord,
    SavedSegment,
    SavedTensor,
    use_code,
)
from kilter.memory.kept_calls import KeptCalls
from kilter.memory.plan.mix import mix
from kilter.memory.plan.problem import IdleInterval, Link, Problem

BLOCKS = 8
SIZE_BYTES = 100_000_000
LINK = Link(to_host_bytes_per_s=5e10, to_device_bytes_per_s=5e10, both_bytes_per_s=1e11)
"""2 ms for each tensor, in an operation of 5 ms."""


def record_of(cheap_s: float, costly_s: float) -> PassRecord:
    """Blocks that save two tensors each, the second made from the first."""
    count = 2 * BLOCKS
    events = (*[SIZE_BYTES] * count, *(use_code(n) for n in reversed(range(count))))
    data = tuple(
        SavedTensor(
            name=str(n),
            size_bytes=SIZE_BYTES,
            packed_at=n,
            free_at=n + 1,
            needed_at=2 * count - 1 - n,
            recipe="known",
            recompute_s=costly_s if n % 2 else cheap_s,
            sources=(n - 1,) if n % 2 else (),
            closed=(n - 1,) if n % 2 else (),
        )
        for n in range(count)
    )
    held = [min(k + 1, 2 * count - k) * SIZE_BYTES for k in range(2 * count)]
    segments = [
        SavedSegment(
            name="Block",
            module=None,
            first=n,
            last=n + 1,
            members=frozenset({n, n + 1}),
            sources=frozenset(),
            closed=frozenset(),
            operations=("cheap", "costly"),
            held=(),
            copied_bytes=0,
            extra_bytes=0,
            recompute_s=cheap_s + costly_s,
            reads={n: frozenset(), n + 1: frozenset({n})},
        )
        for n in range(0, count, 2)
    ]
    return PassRecord(
        events=events,
        names=("operation",) * (2 * count),
        backward_from=count,
        data=data,
        operation_s=[5e-3] * (2 * count),
        level_bytes=held,
        segments=tuple(segments),
    )


def choice_of(record: PassRecord, share: float, alone_s: float = 1e-3) -> CallChoice:
    budget_bytes = int(share * record.peak_bytes)
    problem = partial(PassRecord.problem, link=LINK, budget_bytes=budget_bytes, min_bytes=1)
    return CallChoice(record, problem, alone_s)


def chosen(record: PassRecord, share: float, alone_s: float) -> tuple[SavedSegment, ...]:
    return choice_of(record, share, alone_s).best()


def test_what_is_cheap_is_made_together_and_the_rest_is_offloaded() -> None:
    parts = chosen(record_of(cheap_s=1e-5, costly_s=2e-2), 0.4, alone_s=1e-3)
    assert parts
    costly = {number for one in parts for number in one.members if number % 2}
    assert len(costly) < len(parts) / 2


def test_calls_are_made_as_a_whole_where_all_of_them_is_cheap() -> None:
    parts = chosen(record_of(cheap_s=1e-5, costly_s=1e-5), 0.4, alone_s=1e-3)
    whole = [one for one in parts if len(one.members) == 2]
    assert len(whole) > len(parts) / 2  # of some, less is enough


@pytest.mark.parametrize("costly_s", [1e-5, 2e-2], ids=["whole", "in part"])
def test_another_run_finds_the_same_calls_again(costly_s: float) -> None:
    first = choice_of(record_of(1e-5, costly_s), 0.4)
    best = first.best()
    assert any(len(one.members) == 2 for one in best) is (costly_s == 1e-5)
    kept = msgspec.json.decode(msgspec.json.encode(first.kept(best)), type=KeptCalls)
    second = choice_of(record_of(1e-5, costly_s), 0.4)
    assert second.again(kept) == best
    assert second.again(msgspec.structs.replace(kept, calls=())) is None  # which takes longer


def test_calls_that_are_not_there_or_not_as_good_are_searched_anew() -> None:
    record = record_of(1e-5, 1e-5)
    first = choice_of(record, 0.4)
    kept = first.kept(first.best())

    def found(record: PassRecord, share: float = 0.4) -> bool:
        return choice_of(record, share).again(kept) is not None

    slower = [2.0 * one for one in record.operation_s]
    assert found(replace(record, operation_s=slower))  # with everything kept as well
    assert not found(record_of(1e-5, 3e-3))
    lost = next(one for one in record.segments if one.first == kept.calls[0].first)
    others = tuple(one for one in record.segments if one is not lost)
    assert not found(replace(record, segments=others))
    other = replace(lost, members=frozenset({min(lost.members)}))
    assert not found(replace(record, segments=(other, *others)))
    assert not found(record, 0.1)
    assert not found(record, 0.5)


def test_a_part_takes_what_its_tensors_take() -> None:
    record = record_of(cheap_s=1e-4, costly_s=2e-2)
    whole = record.segments[3]
    cheap, costly = sorted(whole.members)
    part = record.part(whole, {cheap})
    assert (part.members, part.sources, part.recompute_s) == ({cheap}, frozenset(), 1e-4)
    other = record.part(whole, {costly})
    assert (other.sources, other.closed) == ({cheap}, {cheap})
    assert not record.part(replace(whole, reads={}), whole.members).members
    # All of it is the call itself, at the price that was measured.
    measured = replace(whole, recompute_s=1e-2)
    assert record.part(measured, whole.members) == measured
    # What is not known of single ones is the rest of the call.
    record.data[costly].recompute_s = None
    assert record.part(whole, {costly}).recompute_s == whole.recompute_s - 1e-4


def test_a_source_in_the_call_is_not_recomputed_from_what_is_made_from_it() -> None:
    record = record_of(cheap_s=1e-4, costly_s=2e-2)
    whole = record.segments[3]
    cheap, costly = sorted(whole.members)
    problem, numbers = record.problem(
        link=LINK, budget_bytes=1, min_bytes=1, segments=[record.part(whole, {costly})]
    )
    (source,) = (one for one, n in zip(problem.intervals, numbers, strict=True) if n == cheap)
    assert source.recompute_s is None


@pytest.mark.parametrize("copied", [False, True])
def test_a_source_that_several_calls_read_is_in_memory_once(copied: bool) -> None:
    """As a mask that all layers read; what each reads of its own is there for each."""
    record = record_of(cheap_s=1e-4, costly_s=1e-4)
    made_bytes = 2 * SIZE_BYTES
    held_bytes = int(HELD_SHARE * made_bytes) + (-1 if copied else 1)  # a larger one is not copied

    def at_the_peak(number_of: Callable[[int], int]) -> tuple[int, int]:
        """Bytes with all calls evicted that can be, and how many those are."""
        segments = [
            replace(one, held=(HeldBytes(held_bytes, one.last, number_of(k)),))
            for k, one in enumerate(record.segments)
        ]
        problem, _ = record.problem(link=LINK, budget_bytes=1, min_bytes=1, segments=segments)
        k = record.peak_at
        absent = [one for one in problem.intervals if one.together and one.after < k < one.before]
        held = problem.resident_bytes[k] - sum(one.size_bytes for one in absent)
        return held - (record.level_bytes[k] - made_bytes * len(absent)), len(absent)

    one, count = at_the_peak(lambda _: 0)
    each, same_count = at_the_peak(lambda k: k)
    assert count == same_count >= 4
    assert (one, each) == (held_bytes, count * held_bytes)


def test_where_the_host_counts_a_plan_names_fewer_tensors() -> None:
    def interval(size_bytes: int, recompute_s: float) -> IdleInterval:
        return IdleInterval(
            name="one",
            size_bytes=size_bytes,
            after=0,
            before=9,
            recompute_s=recompute_s,
            to_host=False,
        )

    problem = Problem(
        operation_s=(1e-3,) * 10,
        resident_bytes=(0, *[80_000_000] * 8, 0),
        intervals=(*[interval(1_000_000, 1e-6)] * 40, *[interval(10_000_000, 2e-4)] * 4),
        link=LINK,
        budget_bytes=40_000_000,
    )
    assert len(mix(problem).recomputed) == 40
    assert len(mix(replace(problem, alone_s=1e-4)).recomputed) == 4
