"""Clocks of pipeline stages that wait for slower ones. Pure.

In a 1F1B schedule (D. Narayanan et al., PipeDream-Flush, 2021) a stage with less work than the
slowest waits in every micro-batch: its clock may fall until it would become critical. All forward
and all backward passes of a stage's steady phase share one clock each, so that the clock changes
a few times in an iteration; the passes before and behind that phase, which are on the critical
path once each, keep clocks of their own.

Steps of clocks are taken greedily, the one that saves most energy for the time it takes first, as
long as the longest path through the schedule stays within the bound. Then passes are exchanged: one
gets its next higher clock, others take up the slack that this leaves, and the exchange stays if it
saves energy. (A greedy step may have taken the slack of several passes that run at the same time.)
Waiting costs `blocked_w`, so what a pass costs is its energy less what waiting would have cost
meanwhile (J.-W. Chung et al., Perseus, SOSP 2024, whose optimum over every single pass is the
yardstick of the tests).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import msgspec

from kilter.core.errors import PlanError

FORWARD, BACKWARD = "forward", "backward"


class StagePass(msgspec.Struct, frozen=True, kw_only=True):
    """A pass of one micro-batch through a stage, at each clock from the highest down."""

    time_s: tuple[float, ...]
    energy_j: tuple[float, ...]


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one pipeline stage."""

    forward: StagePass
    backward: StagePass

    def of(self, kind: str) -> StagePass:
        return self.forward if kind == FORWARD else self.backward


class PipelineUnit(msgspec.Struct, frozen=True, kw_only=True):
    """One pass in the schedule."""

    stage: int
    kind: str
    micro_batch: int
    group: int
    """Passes of one group share a clock."""


class PipelineSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """The units in an order in which every unit follows those that it needs."""

    units: tuple[PipelineUnit, ...]
    needs: tuple[tuple[int, ...], ...]
    """These units have to be over before each unit."""
    groups: int


class Pipelined(msgspec.Struct, frozen=True, kw_only=True):
    """A clock for every unit."""

    levels: tuple[int, ...]
    """Each unit has one; 0 is the highest clock."""
    iteration_s: float
    energy_j: float


def one_forward_one_backward(stages: int, micro_batches: int) -> PipelineSchedule:
    """The 1F1B schedule of a pipeline."""
    if stages < 1 or micro_batches < 1:
        raise PlanError("a pipeline has at least one stage and one micro-batch")
    rows = [list(_row(s, stages, micro_batches)) for s in range(stages)]
    places: dict[tuple[int, str, int], int] = {}
    groups: dict[tuple[object, ...], int] = {}
    units: list[PipelineUnit] = []
    needs: list[tuple[int, ...]] = []
    at = [0] * stages
    while len(units) < 2 * stages * micro_batches:
        for s in range(stages):
            while at[s] < len(rows[s]):
                kind, m, steady = rows[s][at[s]]
                needed = _needed(s, kind, m, stages)
                if any(n not in places for n in needed):
                    break
                before = [places[n] for n in needed]
                if at[s]:
                    previous_kind, previous, _ = rows[s][at[s] - 1]
                    before.append(places[s, previous_kind, previous])
                name = (s, kind) if steady else (s, kind, m)
                group = groups.setdefault(name, len(groups))
                places[s, kind, m] = len(units)
                units.append(PipelineUnit(stage=s, kind=kind, micro_batch=m, group=group))
                needs.append(tuple(before))
                at[s] += 1
    return PipelineSchedule(units=tuple(units), needs=tuple(needs), groups=len(groups))


def _row(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[str, int, bool]]:
    """Kind and micro-batch of a stage's passes in order, and whether it is the steady phase."""
    warm = min(stages - stage - 1, micro_batches)
    for m in range(warm):
        yield FORWARD, m, False
    for m in range(micro_batches - warm):
        # The first and last ones are on the way in and out of the pipeline.
        inner = 0 < m < micro_batches - warm - 1
        yield FORWARD, warm + m, inner
        yield BACKWARD, m, inner
    for m in range(micro_batches - warm, micro_batches):
        yield BACKWARD, m, False


def _needed(stage: int, kind: str, m: int, stages: int) -> list[tuple[int, str, int]]:
    if kind == FORWARD:
        return [(stage - 1, FORWARD, m)] if stage else []
    return [(stage, FORWARD, m)] if stage == stages - 1 else [(stage + 1, BACKWARD, m)]


def evaluate(
    stages: Sequence[Stage], schedule: PipelineSchedule, levels: Sequence[int], blocked_w: float
) -> Pipelined:
    """Time of an iteration and its energy on all GPUs, at these clocks."""
    ends: list[float] = []
    busy_s = energy_j = 0.0
    for unit, needs, level in zip(schedule.units, schedule.needs, levels, strict=True):
        work = stages[unit.stage].of(unit.kind)
        begin = max((ends[n] for n in needs), default=0.0)
        ends.append(begin + work.time_s[level])
        busy_s += work.time_s[level]
        energy_j += work.energy_j[level]
    iteration_s = max(ends)
    energy_j += blocked_w * (len(stages) * iteration_s - busy_s)
    return Pipelined(levels=tuple(levels), iteration_s=iteration_s, energy_j=energy_j)


def plan(
    stages: Sequence[Stage],
    schedule: PipelineSchedule,
    *,
    blocked_w: float,
    max_slowdown: float = 0.0,
    each: bool = False,
) -> Pipelined:
    """Clocks for all units. `each`: the passes of the steady phase may differ as well, which saves
    a little more if clocks change fast enough to follow. `PlanError` for passes with different
    numbers of clocks."""
    counts = {len(p.time_s) for s in stages for p in (s.forward, s.backward)}
    counts |= {len(p.energy_j) for s in stages for p in (s.forward, s.backward)}
    if len(counts) != 1:
        raise PlanError("every pass needs a time and an energy for every clock")
    fastest = evaluate(stages, schedule, [0] * len(schedule.units), blocked_w)
    bound_s = fastest.iteration_s * (1.0 + max_slowdown) * (1.0 + 1e-9)
    shared = _Search(stages, schedule, blocked_w, bound_s).lowest([0] * schedule.groups)
    levels = [shared[unit.group] for unit in schedule.units]
    if each:
        levels = _Search(stages, apart(schedule), blocked_w, bound_s).lowest(levels)
    return evaluate(stages, schedule, levels, blocked_w)


def apart(schedule: PipelineSchedule) -> PipelineSchedule:
    """The same schedule with a clock for every unit."""
    units = tuple(
        PipelineUnit(stage=u.stage, kind=u.kind, micro_batch=u.micro_batch, group=i)
        for i, u in enumerate(schedule.units)
    )
    return PipelineSchedule(units=units, needs=schedule.needs, groups=len(units))


class _Search:
    """The lowest clocks of groups of passes within a bound; `chosen` is a clock for each group."""

    def __init__(
        self, stages: Sequence[Stage], schedule: PipelineSchedule, blocked_w: float, bound_s: float
    ) -> None:
        works = [stages[unit.stage].of(unit.kind) for unit in schedule.units]
        self._schedule, self._bound_s = schedule, bound_s
        self._lost_w = blocked_w * len(stages)
        self._time_s = [work.time_s for work in works]
        self._cost_j = [
            [e - blocked_w * t for t, e in zip(work.time_s, work.energy_j, strict=True)]
            for work in works
        ]
        self._units: list[list[int]] = [[] for _ in range(schedule.groups)]
        for place, unit in enumerate(schedule.units):
            self._units[unit.group].append(place)

    def lowest(self, chosen: Sequence[int]) -> list[int]:
        """Clocks from the given ones down, until no exchange saves any more."""
        best_j, best = self._filled(chosen)
        improved = True
        while improved:
            improved = False
            for group in range(len(best)):
                if best[group] == 0:
                    continue
                raised = [*best]
                raised[group] -= 1
                _, others = self._filled(raised, but=group)
                tried_j, tried = self._filled(others)
                if _saves(best_j, tried_j):
                    best_j, best, improved = tried_j, tried, True
        return best

    def _filled(self, chosen: Sequence[int], *, but: int | None = None) -> tuple[float, list[int]]:
        """The greedy steps from here, of all groups but one; with the energy."""
        filled = [*chosen]
        energy_j, slack_s = self._outcome(filled)
        steps = [
            step for g, level in enumerate(filled) if g != but for step in self._step(g, level)
        ]
        heapq.heapify(steps)
        while steps:
            _, group, level = heapq.heappop(steps)
            # A step that does not fit now never will: clocks only fall.
            if self._longer_s(group, filled[group], level) > min(
                slack_s[unit] for unit in self._units[group]
            ):
                continue
            tried = [*filled]
            tried[group] = level
            tried_j, left_s = self._outcome(tried)
            if min(left_s) >= 0.0 and _saves(energy_j, tried_j):
                energy_j, slack_s, filled = tried_j, left_s, tried
                for step in self._step(group, level):
                    heapq.heappush(steps, step)
        return energy_j, filled

    def _outcome(self, chosen: Sequence[int]) -> tuple[float, list[float]]:
        """The energy, and by unit how much later it may end within the bound."""
        units, needs = self._schedule.units, self._schedule.needs
        times_s = [of[chosen[unit.group]] for of, unit in zip(self._time_s, units, strict=True)]
        ends_s: list[float] = []
        for time_s, before in zip(times_s, needs, strict=True):
            ends_s.append(max((ends_s[n] for n in before), default=0.0) + time_s)
        latest_s = [self._bound_s] * len(units)
        for place in reversed(range(len(units))):
            begin_s = latest_s[place] - times_s[place]
            for n in needs[place]:
                latest_s[n] = min(latest_s[n], begin_s)
        cost_j = sum(of[chosen[u.group]] for of, u in zip(self._cost_j, units, strict=True))
        slack_s = [latest - end for latest, end in zip(latest_s, ends_s, strict=True)]
        return cost_j + self._lost_w * max(ends_s), slack_s

    def _longer_s(self, group: int, level: int, lower: int) -> float:
        times_s = self._time_s[self._units[group][0]]
        return times_s[lower] - times_s[level]

    def _step(self, group: int, level: int) -> Iterator[tuple[float, int, int]]:
        """The next lower clock of a group that saves energy, as (minus energy saved per second that
        a pass takes longer, group, clock). Nothing at the end."""
        costs_j = self._cost_j[self._units[group][0]]
        for lower in range(level + 1, len(costs_j)):
            if costs_j[lower] < costs_j[level]:
                longer_s = max(self._longer_s(group, level, lower), 1e-15)
                yield -(costs_j[level] - costs_j[lower]) / longer_s, group, lower
                return


def _saves(before_j: float, after_j: float) -> bool:
    """More than rounding does."""
    return after_j < before_j - 1e-9 * abs(before_j)
