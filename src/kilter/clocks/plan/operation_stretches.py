"""Stretches of operations that get a lower clock in a running job. Pure.

The planner of operations (`plan/operations`) is asked at several prices of a switch, free switches
first: the dearer a switch, the longer its stretches of low clocks, and the fewer. The first row of
its table is pinned to the default clock, from which every stretch goes down and to which it comes
back. Each answer is cut to what the conductor of sections can carry out, and judged by the
conductor's own costs (`plan/worth`): commands leave ahead of the edges, work goes on while a switch
is under way, a stretch has to be longer than the break-even of both switches, and the clock calls
are limited per second. The answer that saves most is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import msgspec
import numpy as np

from kilter.clocks.plan.operations import (
    Array,
    OperationsProblem,
    Path,
    best_static,
    plan,
)
from kilter.clocks.plan.worth import (
    ClockCosts,
    LevelEffect,
    LowStretch,
    Worth,
    at_level,
    most_stretches,
)
from kilter.core.units import show_fraction, show_time

SWITCH_PRICES = (0.0, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""A switch is assumed to take so much of the break-even."""

LEAST_GAIN = 0.01
"""Stretches have to save so much more of the energy than one clock for the whole job."""


class OrderedOperations(msgspec.Struct, frozen=True, kw_only=True):
    """The operations of an iteration in their order, at the default clock and at each of a card's
    levels: column k of the tables is level k - 1."""

    names: tuple[str, ...]
    """Each occurs once."""
    start_s: Array
    """It was measured at the default clock, from the beginning of the iteration."""
    end_s: Array
    time_s: Array
    """It has a row for each operation and a column for each level, and one for the default."""
    energy_j: Array
    waiting_w: Array
    iteration_s: float


class OperationStretches(msgspec.Struct, frozen=True, kw_only=True):
    """What the conductor is to do, and the answer in words."""

    found: Worth
    """Its stretches are where they are while nothing is set."""
    depths: tuple[int, ...]
    """Each stretch has its place in the card's levels, from 1."""
    whole_job_saving: float
    """The best single clock saves this share of the energy within the same bound."""
    summary: str

    @property
    def pays(self) -> bool:
        """More than one clock for the whole job, by enough to be worth the calls."""
        return self.found.saving >= self.whole_job_saving + LEAST_GAIN


def operation_stretches(
    operations: OrderedOperations, card: ClockCosts, *, max_slowdown: float, rank: int = 0
) -> OperationStretches:
    """The stretches that save most within the slowdown. `PlanError` for tables that are none."""
    default_s = float(operations.time_s[:, 0].sum())
    default_j = float(operations.energy_j[:, 0].sum())
    budget_s = max_slowdown * min(default_s, operations.iteration_s)
    problem = OperationsProblem(
        time_s=operations.time_s,
        energy_j=operations.energy_j,
        waiting_w=operations.waiting_w,
        switch_s=0.0,
        bound_s=default_s + budget_s,
    )
    problem.check()
    most = most_stretches(card, operations.iteration_s)
    best: tuple[LowStretch, ...] = ()
    longest_s = 0.0
    for ladder in _ladders(card):
        part = _part(problem, ladder)
        for price in SWITCH_PRICES:
            path = ladder[_from_default(part, price * card.break_even_s)]
            low = list(_low_stretches(operations, card, path, ladder))
            longest_s = max([longest_s, *(each.end_s - each.start_s for each in low)])
            kept = _kept(low, card, budget_s=budget_s, most=most)
            if sum(s.saved_j for s in kept) > sum(s.saved_j for s in best):
                best = kept
    static_j = best_static(problem).energy_j
    found = Worth(
        rank=rank,
        exposed_share=0.0,
        longest_s=longest_s,
        iteration_s=operations.iteration_s,
        compute_s=operations.iteration_s,
        iteration_j=default_j,
        stretches=best,
        refused=(),
    )
    whole = max(0.0, 1.0 - static_j / default_j)
    return OperationStretches(
        found=found,
        depths=tuple(card.levels.index(card.level_of(stretch)) + 1 for stretch in best),
        whole_job_saving=whole,
        summary=_summary(found, whole, card, most),
    )


def as_set(found: Sequence[LowStretch], depths: Sequence[int]) -> tuple[LowStretch, ...]:
    """The same stretches where they are while their clocks are set to these depths: each begins
    later by what the ones before it have cost, and takes longer by its own delay."""
    moved, delay_s = [], 0.0
    for stretch, depth in zip(found, depths, strict=True):
        before_s = delay_s
        delay_s += stretch.effects[depth - 1].delay_s if depth else 0.0
        moved.append(
            msgspec.structs.replace(
                stretch,
                start_s=stretch.start_s + before_s,
                end_s=stretch.end_s + delay_s,
                down_at_s=stretch.down_at_s + before_s,
                up_at_s=stretch.up_at_s + delay_s,
            )
        )
    return tuple(moved)


def _from_default(problem: OperationsProblem, switch_s: float) -> Path:
    """The planner's path with the default clock at the iteration's beginning and end: a row of no
    work at the default, that no other clock may have."""
    choices = problem.time_s.shape[1]
    pinned = np.zeros((1, choices))
    pinned_s, pinned_j = pinned.copy(), pinned.copy()
    pinned_s[0, 1:] = 2.0 * problem.bound_s
    pinned_j[0, 1:] = 2.0 * float(problem.energy_j[:, 0].sum())
    found = plan(
        msgspec.structs.replace(
            problem,
            time_s=np.vstack([pinned_s, problem.time_s]),
            energy_j=np.vstack([pinned_j, problem.energy_j]),
            switch_s=switch_s,
        )
    )
    path: Path = found.best.path[1:]
    return path


def _ladders(card: ClockCosts) -> list[Path]:
    """The depths that are planned with: all, those of one clock, and those of SM clocks alone, so
    that no further level makes a plan worse. Where these are the same, they are planned with once.
    """
    levels = card.levels
    one = [level.setting.calls == 1 for level in levels]
    sm_alone = [level.memory_clock_hz is None for level in levels]
    ladders = dict.fromkeys(tuple(each) for each in ([True] * len(levels), one, sm_alone))
    return [np.flatnonzero((True, *ladder)) for ladder in ladders]


def _part(problem: OperationsProblem, columns: Path) -> OperationsProblem:
    """With these clocks alone."""
    return msgspec.structs.replace(
        problem,
        time_s=problem.time_s[:, columns],
        energy_j=problem.energy_j[:, columns],
        waiting_w=problem.waiting_w[columns],
    )


def _low_stretches(
    operations: OrderedOperations, card: ClockCosts, path: Path, ladder: Path
) -> Iterator[LowStretch]:
    """One for each run of operations below the default, and for each part of it at one level."""
    runs = set()
    for alike in (path.astype(bool), path):
        for low, run in groupby(range(len(path)), key=alike.tolist().__getitem__):
            places = list(run)
            if low:
                runs.add((places[0], places[-1]))
    for first, last in sorted(runs):
        if (stretch := _stretch(operations, card, path, first, last, ladder)) is not None:
            yield stretch


def _stretch(
    operations: OrderedOperations,
    card: ClockCosts,
    path: Path,
    first: int,
    last: int,
    ladder: Path,
) -> LowStretch | None:
    """One level of the ladder for all operations of a run: the one that saves most without more
    delay than the path; None where that is the default."""
    inside = slice(first, last + 1)
    rows = np.arange(first, last + 1)
    time_s = operations.time_s[inside].sum(axis=0)
    energy_j = operations.energy_j[inside].sum(axis=0)
    allowed_s = float(operations.time_s[rows, path[inside]].sum()) * (1.0 + 1e-9)
    depth = int(ladder[np.where(time_s <= allowed_s, energy_j, np.inf)[ladder].argmin()])
    if depth == 0:
        return None
    start_s, end_s = float(operations.start_s[first]), float(operations.end_s[last])
    effects = tuple(
        LevelEffect(delay_s=float(time_s[k] - time_s[0]), saved_j=float(energy_j[0] - energy_j[k]))
        for k in range(1, len(card.levels) + 1)
    )
    level = card.levels[depth - 1]
    down, up = card.switches(level)
    # The clock is low from when the command down acts to when the command up does.
    lost_s = down.median_s - down.quantile(0.05) + up.quantile(0.95) - up.median_s
    share = max(0.0, 1.0 - lost_s / (end_s - start_s))
    mistimed_s = (up.late_s + down.early_s) * (1.0 - 1.0 / level.stretch)
    bare = LowStretch(
        first=operations.names[first],
        last=operations.names[last],
        sections=last + 1 - first,
        sm_clock_hz=level.sm_clock_hz,
        memory_clock_hz=level.memory_clock_hz,
        start_s=start_s,
        end_s=end_s,
        down_at_s=start_s,
        up_at_s=end_s,
        computed_s=0.0,
        saved_j=share * effects[depth - 1].saved_j - card.computing_w * mistimed_s,
        delay_s=share * effects[depth - 1].delay_s + mistimed_s,
        effects=effects,
    )
    return at_level(bare, level, card)


def _kept(
    low: Sequence[LowStretch], card: ClockCosts, *, budget_s: float, most: int | None
) -> tuple[LowStretch, ...]:
    """Of a path's stretches those that can be carried out and save something: the best first, as
    long as there are calls and time for them, and no command comes before the stretch before it is
    over."""
    chosen: list[LowStretch] = []
    for stretch in sorted(low, key=lambda s: -s.saved_j):
        break_even_s = card.break_even_of_s(card.level_of(stretch))
        long = stretch.end_s - stretch.start_s >= break_even_s
        if stretch.saved_j <= 0.0 or not long:
            continue
        together = sorted([*chosen, stretch], key=lambda s: s.start_s)
        if most is not None and sum(card.level_of(s).setting.calls for s in together) > most:
            continue
        apart = all(a.end_s <= b.down_at_s for a, b in pairwise(together))
        if apart and sum(s.delay_s for s in together) <= budget_s:
            chosen = together
    return tuple(chosen)


def _summary(found: Worth, whole: float, card: ClockCosts, most: int | None) -> str:
    """The answer in one or two sentences."""
    if found.stretches:
        count = len(found.stretches)
        text = (
            f"A lower clock in {count} stretch{'es' if count > 1 else ''} of operations would save "
            f"{show_fraction(found.saving)} of the energy at {show_fraction(found.slowdown)} "
            "slowdown."
        )
    elif not found.longest_s:
        text = "Nothing is worth switching: no operation saves energy within the bound."
    elif found.longest_s < card.break_even_s:
        text = (
            f"Nothing is worth switching: the longest stretch takes {show_time(found.longest_s)}, "
            f"below the break-even of {show_time(card.break_even_s)}."
        )
    elif most == 0:
        text = (
            f"Nothing is worth switching: an iteration of {show_time(found.iteration_s)} is too "
            f"short for two clock calls at {card.calls_per_s:g} per second."
        )
    else:
        text = (
            "Nothing is worth switching: no stretch saves more than its switches and its delay "
            "cost."
        )
    return f"{text} One clock for the whole iteration would save {show_fraction(whole)}."
