"""When weights are offloaded and prefetched: between their use in forward and in backward.

The host has a copy of each weight's value since its last update, so offloading copies nothing and
only frees the memory. Weights that are used first in forward are needed last in backward: these are
offloaded for the longest time, over the end of forward, where memory peaks. They are prefetched in
the order in which they are needed, as late as the link allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kilter.memory.plan.problem import Link

SPARE_FACTOR = 1.25
"""Loads are given so much more time than the link needs: it is shared with what leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight in a pass. Places in the pass are indices of *ticks*, moments known to both sides:
    a module has run, a gradient has arrived."""

    size_bytes: int
    used_at: int
    """After this tick forward does not need it any more."""
    needed_at: int
    """Before this tick of backward it has to be resident."""
    updated_at: int | None = None
    """From this tick on its new value is known; `None`: at the end, in the optimizer's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """What is done at which tick, by index of the weight."""

    release: dict[int, tuple[int, ...]]
    load: dict[int, tuple[int, ...]]
    offloaded_bytes: int
    """So much is offloaded at the end of forward."""
    stall_s: float
    """Compute is predicted to wait so long for copies in either direction."""

    @property
    def moved(self) -> tuple[int, ...]:
        return tuple(sorted(i for numbers in self.release.values() for i in numbers))


def plan_weights(
    weights: Sequence[Weight],
    *,
    at_s: Sequence[float],
    turn: int,
    period_s: float,
    offloaded_bytes: int,
    link: Link,
) -> WeightPlan:
    """At least `offloaded_bytes` on the host at the end of forward, or all that can be.

    `at_s` are the times of the ticks, `turn` is the first of backward, and a pass begins
    `period_s` after the one before it.
    """
    moved, total_bytes = [], 0
    for i in sorted(range(len(weights)), key=lambda i: weights[i].used_at):
        weight = weights[i]
        if total_bytes >= offloaded_bytes or weight.used_at >= turn - 1:
            break
        if weight.needed_at > turn:
            moved.append(i)
            total_bytes += weight.size_bytes
    load, load_stall_s = _loads(weights, moved, at_s, turn, link)
    release, release_stall_s = _releases(weights, moved, at_s, turn, period_s, link)
    return WeightPlan(
        release=release,
        load=load,
        offloaded_bytes=total_bytes,
        stall_s=load_stall_s + release_stall_s,
    )


def _loads(
    weights: Sequence[Weight], moved: Sequence[int], at_s: Sequence[float], turn: int, link: Link
) -> tuple[dict[int, tuple[int, ...]], float]:
    """Latest start first, from the last need backwards; issued in the order of their needs."""
    rate = link.to_device_bytes_per_s * link.shared
    order = sorted(moved, key=lambda i: weights[i].needed_at)
    load: dict[int, list[int]] = defaultdict(list)
    start_s = float("inf")
    tick = len(at_s) - 1
    for i in reversed(order):
        weight = weights[i]
        due_s = at_s[weight.needed_at - 1]
        start_s = min(start_s, due_s) - SPARE_FACTOR * (link.latency_s + weight.size_bytes / rate)
        while tick > turn and at_s[tick] > start_s:
            tick -= 1
        load[min(tick, weight.needed_at - 1)].insert(0, i)
    free_s = stall_s = 0.0
    for tick in sorted(load):
        for i in load[tick]:
            begin_s = max(free_s, at_s[tick] + stall_s)
            free_s = begin_s + link.latency_s + weights[i].size_bytes / rate
            due_s = at_s[weights[i].needed_at] + stall_s
            stall_s += max(0.0, free_s - due_s)
    return {tick: tuple(numbers) for tick, numbers in load.items()}, stall_s


def _releases(
    weights: Sequence[Weight],
    moved: Sequence[int],
    at_s: Sequence[float],
    turn: int,
    period_s: float,
    link: Link,
) -> tuple[dict[int, tuple[int, ...]], float]:
    """With the first tick after the last use at which the new value is on the host; the last of
    forward waits for those that are not there yet."""
    rate = link.to_host_bytes_per_s * link.shared
    release: dict[int, list[int]] = defaultdict(list)
    free_s = 0.0

    def known_s(i: int) -> float:
        tick = weights[i].updated_at
        return period_s if tick is None else at_s[tick]

    for i in sorted(moved, key=lambda i: (known_s(i), weights[i].used_at)):
        free_s = max(free_s, known_s(i)) + link.latency_s + weights[i].size_bytes / rate
        tick = weights[i].used_at
        while tick < turn - 1 and at_s[tick] < free_s - period_s:
            tick += 1
        release[tick].append(i)
    stall_s = max(0.0, free_s - period_s - at_s[turn - 1]) if moved else 0.0
    return {tick: tuple(numbers) for tick, numbers in release.items()}, stall_s
