"""Correcting a plan where its passes waited longer for copies than the simulator expected.

Loads that were late start earlier, as far as the budget allows. Where that cannot help, since the
wait was for copies to the host or there is no memory for earlier loads, the link is slower than its
table says, and another plan is made for the slower link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kilter.memory.plan.problem import Link, Problem
from kilter.memory.plan.simulate import Schedule, simulate

NOTICED = 0.01
"""Waiting that goes beyond the expected by less than this share of the iteration, as planned or as
measured, is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """For how long computation stood still for copies in one pass: measured, or simulated."""

    out_s: float = 0.0
    """Before memory could be given up: copies to the host."""
    in_s: Mapping[int, float] = field(default_factory=dict)
    """Each interval that was loaded has its own."""

    @property
    def total_s(self) -> float:
        return self.out_s + sum(self.in_s.values())

    def beyond(self, other: Waiting) -> Waiting:
        """How much longer than in `other`."""
        return Waiting(
            out_s=max(0.0, self.out_s - other.out_s),
            in_s={
                index: seconds - other.in_s.get(index, 0.0)
                for index, seconds in self.in_s.items()
                if seconds > other.in_s.get(index, 0.0)
            },
        )


def expected(problem: Problem, schedule: Schedule) -> Waiting:
    """What the simulator says. Where several loads are due at once, the first one has it all.
    Waiting for optimizer state is left out: passes are not asked for it."""
    due = problem.deadlines(frozenset(schedule.recomputed))
    first: dict[int, int] = {}
    for move in schedule.moves:
        first.setdefault(due[move.interval], move.interval)
    visits = {len(problem.operation_s), *problem.visits}
    visits |= {interval.after for interval in problem.intervals if interval.wraps}
    out_s, in_s = 0.0, dict.fromkeys(first.values(), 0.0)
    for span in simulate(problem, schedule).spans:
        if span.lane == "stall" and span.index in first:
            in_s[first[span.index]] += span.end_s - span.start_s
        elif span.lane == "stall" and span.index not in visits:
            out_s += span.end_s - span.start_s
    return Waiting(out_s=out_s, in_s=in_s)


def earlier(problem: Problem, schedule: Schedule, late_s: Mapping[int, float]) -> Schedule:
    """The same moves, with the loads of these intervals by so many seconds earlier.

    Loads that the link serves right before a late one make room for it: they start earlier as well.
    None starts before a load that is due before it, and memory is never above the budget, for which
    a load may have to stay where it is.
    """
    due = problem.deadlines(frozenset(schedule.recomputed))
    outcome = simulate(problem, schedule)
    begins = [span.end_s for span in outcome.spans if span.lane == "compute"]
    begins = [0.0, *begins[:-1]]
    on_link = {span.index: span for span in outcome.spans if span.lane == "in"}
    order = sorted(schedule.moves, key=lambda m: (due[m.interval], m.interval))

    shift_s: dict[int, float] = {}
    behind_s, begin_s = 0.0, float("inf")
    for move in reversed(order):
        span = on_link[move.interval]
        behind_s = late_s.get(move.interval, 0.0) + max(0.0, behind_s - (begin_s - span.end_s))
        begin_s = span.start_s
        shift_s[move.interval] = behind_s

    evicted = {i: (problem.intervals[i].after + 1, due[i]) for i in schedule.recomputed}
    evicted |= {m.interval: (m.release, m.load) for m in schedule.moves}
    slack = problem.budget_bytes - problem.profile(evicted)
    moves, before = [], 0
    for move in order:
        size_bytes = problem.intervals[move.interval].size_bytes
        load, until_s = move.load, begins[move.load] - shift_s[move.interval]
        first = max(move.release + 1, min(before, load))
        while load > first and begins[load] > until_s and slack[load - 1] >= size_bytes:
            load -= 1
        slack[load : move.load] -= size_bytes
        before = max(before, load)
        moves.append(replace(move, load=load))
    return Schedule(moves=tuple(sorted(moves)), recomputed=schedule.recomputed)


def slower(link: Link, *, out: float, back: float) -> Link:
    """A link whose transfers take so many times as long, to the host and back to the device."""
    to_host = link.to_host_bytes_per_s / out
    to_device = link.to_device_bytes_per_s / back
    return replace(
        link,
        to_host_bytes_per_s=to_host,
        to_device_bytes_per_s=to_device,
        both_bytes_per_s=link.shared * (to_host + to_device),
    )


def slowness(problem: Problem, schedule: Schedule, late: Waiting) -> tuple[float, float]:
    """How many times as long transfers must have taken, at least, out and back, if it was for them
    that computation stood still for so long."""
    moved = [problem.intervals[move.interval] for move in schedule.moves]
    out_s = sum(problem.link.out_s(interval.size_bytes) for interval in moved)
    in_s = sum(problem.link.in_s(interval.size_bytes) for interval in moved)
    if not moved:
        return 1.0, 1.0
    return 1 + late.out_s / out_s, 1 + sum(late.in_s.values()) / in_s
