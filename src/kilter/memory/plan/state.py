"""Optimizer state that streams through the device, and gradients that are consumed on arrival.

The optimizer's work is cut into *buckets*: parameters whose gradients arrive one after the other in
backward. When the last gradient of a bucket has arrived, the bucket is *visited*: its state is
waited for, its parameters are updated, and the copy of its state to the host starts. The state of a
bucket that is not streamed stays on the device.

As in all of these planners, memory is decided in program order and only time is simulated: a bucket
is on the device from the visit at which its load is issued to the visit at which it is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from kilter.core.errors import PlanError
from kilter.memory.plan.problem import Link

VISITS = 48
"""An iteration has so many buckets unless told otherwise: each costs the host one call of the
optimizer, and the device one bucket of gradients."""
WINDOW_BUCKETS = (2, 3, 4, 6)
"""These sizes are tried for the room that streamed buckets share, in buckets of the largest
size."""
LAGS = (1, 2, 3)
"""The copy of a bucket to the host is given so many visits before its memory is needed."""
MARGINS = (0, 1, 2, 4)
"""So many buckets at either end are tried as not streamed: no computation hides the loads of the
first ones, nor the offloading of the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The update of one parameter, in the order in which gradients arrive."""

    gradient_bytes: int
    state_bytes: int
    arrives_s: float = 0.0
    """When the gradient is there, from the first one's arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive updates that are done together."""

    first: int
    """It is the index of the first update."""
    count: int
    gradient_bytes: int
    state_bytes: int
    due_s: float
    """When its last gradient is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """Which buckets stream, and what is issued when. Predicted numbers, SI units."""

    streamed: frozenset[int]
    begin: tuple[int, ...]
    """These buckets are loaded when the first gradient is there, in this order."""
    release: tuple[tuple[int, ...], ...]
    """After each visit the memory of these buckets is freed, before the loads of that visit."""
    load: tuple[tuple[int, ...], ...]
    """After each visit the loads of these buckets start."""
    resident_bytes: int
    """So much state is on the device while no bucket is being copied: during forward."""
    peak_bytes: int
    """It is the most state on the device at one time."""
    moved_bytes: int
    """So much moves each way, in each iteration."""
    stall_s: float
    """Simulated wait of the computation for copies."""


def in_buckets(updates: Sequence[Update], size_bytes: int | None = None) -> tuple[Bucket, ...]:
    """Cut where the gradients of a bucket reach `size_bytes` (by default a share of `1/VISITS`)."""
    if size_bytes is None:
        size_bytes = max(1, sum(u.gradient_bytes for u in updates) // VISITS)
    found: list[Bucket] = []
    first = 0
    for last, _ in enumerate(updates):
        members = updates[first : last + 1]
        gradient_bytes = sum(u.gradient_bytes for u in members)
        if gradient_bytes < size_bytes and last + 1 < len(updates):
            continue
        found.append(
            Bucket(
                first=first,
                count=len(members),
                gradient_bytes=gradient_bytes,
                state_bytes=sum(u.state_bytes for u in members),
                due_s=max(u.arrives_s for u in members),
            )
        )
        first = last + 1
    return tuple(found)


def plan_state(buckets: Sequence[Bucket], *, room_bytes: int, link: Link) -> StatePlan:
    """At most `room_bytes` of state on the device at any time, and as little waiting as was found.

    How many buckets stream, how they are spread, and how much room they share is searched; the
    simulation decides. `PlanError` if not even one bucket at a time fits.
    """
    total_bytes = sum(b.state_bytes for b in buckets)
    if total_bytes <= room_bytes:
        return _scheduled(buckets, frozenset(), room_bytes, link, LAGS[0])
    found = [
        _scheduled(buckets, streamed, room_bytes, link, lag)
        for streamed in dict.fromkeys(_candidates(buckets, room_bytes))
        for lag in LAGS
    ]
    if not found:
        raise PlanError(
            f"optimizer state of {total_bytes} bytes streams through no less than "
            f"{max(b.state_bytes for b in buckets)} bytes; {room_bytes} were given"
        )
    return min(found, key=lambda plan: (plan.stall_s, plan.moved_bytes, plan.peak_bytes))


def _candidates(buckets: Sequence[Bucket], room_bytes: int) -> Iterator[frozenset[int]]:
    """Sets of buckets to stream that leave room for themselves, evenly spread."""
    total_bytes = sum(b.state_bytes for b in buckets)
    holders = [i for i, b in enumerate(buckets) if b.state_bytes]
    for head, tail, window in product(MARGINS, MARGINS, WINDOW_BUCKETS):
        pool = holders[head : len(holders) - tail]
        sizes = [buckets[i].state_bytes for i in pool]
        offloaded_bytes = total_bytes - room_bytes + window * max(sizes, default=0)
        if sum(sizes) >= offloaded_bytes:
            yield frozenset(_spread(pool, buckets, offloaded_bytes))
    if max(b.state_bytes for b in buckets) <= room_bytes:
        yield frozenset(holders)


def _spread(pool: Sequence[int], buckets: Sequence[Bucket], offloaded_bytes: int) -> Iterator[int]:
    """Members of `pool` with at least `offloaded_bytes` in all, evenly spread."""
    pool_bytes = sum(buckets[i].state_bytes for i in pool)
    seen_bytes = taken_bytes = 0
    for i in pool:
        seen_bytes += buckets[i].state_bytes
        if (
            taken_bytes * pool_bytes < offloaded_bytes * seen_bytes
            and taken_bytes < offloaded_bytes
        ):
            taken_bytes += buckets[i].state_bytes
            yield i


def _scheduled(
    buckets: Sequence[Bucket], streamed: frozenset[int], room_bytes: int, link: Link, lag: int
) -> StatePlan:
    """Loads as early as the room allows; memory is given up when a load needs it, oldest first, and
    within the lag only if the next visit would find its state on the host otherwise."""
    total_bytes = sum(b.state_bytes for b in buckets)
    resident_bytes = total_bytes - sum(buckets[i].state_bytes for i in streamed)
    free_bytes = room_bytes - resident_bytes
    to_load = sorted(streamed)
    leaving: list[int] = []
    begin: list[int] = []
    while to_load and buckets[to_load[0]].state_bytes <= free_bytes:
        free_bytes -= buckets[to_load[0]].state_bytes
        begin.append(to_load.pop(0))
    least_free_bytes = free_bytes
    release, load = [], []
    for visit, _ in enumerate(buckets):
        released, loaded = [], []
        if visit in streamed:
            leaving.append(visit)
        while to_load:
            needed_bytes = buckets[to_load[0]].state_bytes
            urgent = to_load[0] == visit + 1
            ready = [i for i in leaving if i <= visit - lag or urgent]
            if needed_bytes > free_bytes + sum(buckets[i].state_bytes for i in ready):
                break
            while needed_bytes > free_bytes:
                released.append(leaving.pop(0))
                free_bytes += buckets[released[-1]].state_bytes
            free_bytes -= needed_bytes
            loaded.append(to_load.pop(0))
            least_free_bytes = min(least_free_bytes, free_bytes)
        if visit + 1 == len(buckets):
            released += leaving
        release.append(tuple(released))
        load.append(tuple(loaded))
    return StatePlan(
        streamed=streamed,
        begin=tuple(begin),
        release=tuple(release),
        load=tuple(load),
        resident_bytes=resident_bytes,
        peak_bytes=room_bytes - least_free_bytes,
        moved_bytes=total_bytes - resident_bytes,
        stall_s=stall_s(buckets, begin, release, load, link),
    )


def stall_s(
    buckets: Sequence[Bucket],
    begin: Iterable[int],
    release: Iterable[Iterable[int]],
    load: Iterable[Iterable[int]],
    link: Link,
) -> float:
    """Time that the computation waits for copies. Both directions are taken as busy all the time;
    the update's own time is part of the arrival of what comes next."""
    in_rate = link.to_device_bytes_per_s * link.shared
    out_rate = link.to_host_bytes_per_s * link.shared
    now_s = in_free_s = out_free_s = waited_s = 0.0
    arrival_s: dict[int, float] = {}
    departed_s: dict[int, float] = {}

    def issue(numbers: Iterable[int]) -> None:
        nonlocal in_free_s
        for i in numbers:
            start_s = max(now_s, in_free_s)
            in_free_s = start_s + link.latency_s + buckets[i].state_bytes / in_rate
            arrival_s[i] = in_free_s

    def wait(until_s: float) -> None:
        nonlocal now_s, waited_s
        waited_s += max(0.0, until_s - now_s)
        now_s = max(now_s, until_s)

    issue(begin)
    gaps_s = [max(0.0, b.due_s - a.due_s) for a, b in pairwise(buckets)]
    steps_s = [buckets[0].due_s if buckets else 0.0, *gaps_s]
    rows = zip(steps_s, release, load, strict=True)
    for visit, (step_s, released, loaded) in enumerate(rows):
        now_s += step_s
        if visit in arrival_s:
            wait(arrival_s[visit])
            start_s = max(now_s, out_free_s)
            out_free_s = start_s + link.latency_s + buckets[visit].state_bytes / out_rate
            departed_s[visit] = out_free_s
        for i in released:
            wait(departed_s[i])
        issue(loaded)
    return waited_s
