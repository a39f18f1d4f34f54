"""When the commands of a section plan leave, relative to the marker of an iteration. Pure.

A marker stands on the device's timeline at the beginning of every iteration. A stretch of a low
clock has two edges, at learned distances from that marker: the beginning of its first section and
the end of its last one. The command for an edge leaves a lead earlier, so that it acts at the edge
although a switch takes time (`clocks/plan/worth`). A command that has to leave before its marker
leaves in the iteration before, by the marker's expected time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from kilter.clocks.plan.sections import SectionOccurrence
from kilter.clocks.plan.worth import ClockCosts, LowStretch, at_level
from kilter.core.setting import Setting

LONGEST_HOLD_S = 1.0
"""No low clock has a longer deadline, unless the stretch itself takes longer."""
HOLD_LENGTHS = 3.0
"""The deadline of a low clock is so many lengths of its stretch."""


Edge = Literal["down", "up"]
CommandState = Literal["would set", "set", "left out"]


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One clock call of every iteration."""

    edge: Edge
    key: str
    """It is the key of the section whose beginning (`down`) or end (`up`) is the edge; where
    computation before the section is taken in, the collective with whose readiness that begins is
    named, too."""
    sm_clock_hz: float | None
    """None stands for the clock as found."""
    memory_clock_hz: float | None = None
    at_s: float
    """It counts from the marker, and is below zero where the command leaves before the marker."""
    lead_s: float
    """The command leaves this long before the edge."""
    hold_s: float
    """The low clock has this deadline; it is of no use for `up`."""

    @property
    def setting(self) -> Setting:
        return Setting(sm_clock_hz=self.sm_clock_hz, memory_clock_hz=self.memory_clock_hz)


class CommandSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """The commands of every iteration, in order of their time. Empty: the default stands."""

    commands: tuple[Command, ...]
    iteration_s: float
    """Until better is known: the time to the next marker."""
    calls_per_s: float


class ScheduleArm(msgspec.Struct, frozen=True, kw_only=True):
    """Commands that rule from one iteration on."""

    first: int
    """That iteration begins with the iteration end of this number."""
    schedule: CommandSchedule


class Commanded(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the conductor's log: a command that left, or that was left out. Times are
    `time.monotonic()` of the machine."""

    t_s: float
    iteration: int
    """The iteration of the section begins with the iteration end of this number. -1: there is none,
    the clock was put back without a command."""
    edge: Edge
    key: str
    sm_clock_hz: float | None
    memory_clock_hz: float | None = None
    edge_s: float
    """When the clock was to change by this command: a lead after it left."""
    late_s: float
    """How much later than scheduled it left."""
    took_s: float
    """How long the call took; 0 in a dry run."""
    state: CommandState
    why: str = ""
    marker_s: float | None = None
    """The command's time was reckoned from the marker at this time: that of its own iteration, or
    of the one before if it leaves earlier. None: it belongs to no marker."""


class RealEdge(msgspec.Struct, frozen=True, kw_only=True):
    """Where an edge really was in one iteration, in times of `time.monotonic()`."""

    iteration: int
    edge: Edge
    key: str
    t_s: float
    marker_s: float | None = None
    """The marker of that iteration was then, in the same trace."""


class EdgeErrors(msgspec.Struct, frozen=True, kw_only=True):
    """How far the expected edges were from the real ones."""

    n: int
    p50_s: float
    p95_s: float
    bias_s: float
    """The median of expected minus real is this: below zero, the commands come early."""


NOTHING = CommandSchedule(commands=(), iteration_s=0.0, calls_per_s=0.0)
"""The default stands."""


def at_depths(
    stretches: Sequence[LowStretch], depths: Sequence[int], card: ClockCosts
) -> tuple[LowStretch, ...]:
    """The stretches at so many steps below the default clock, with commands that leave as early as
    that clock needs; those at the default are left out."""
    return tuple(
        at_level(stretch, card.levels[depth - 1], card)
        for stretch, depth in zip(stretches, depths, strict=True)
        if depth
    )


def schedule(
    stretches: Sequence[LowStretch], card: ClockCosts, iteration_s: float
) -> CommandSchedule:
    """The commands for the stretches of one rank's plan."""
    commands = [command for stretch in stretches for command in _commands(stretch, card)]
    return CommandSchedule(
        commands=tuple(sorted(commands, key=lambda c: c.at_s)),
        iteration_s=iteration_s,
        calls_per_s=card.calls_per_s,
    )


def _commands(stretch: LowStretch, card: ClockCosts) -> tuple[Command, Command]:
    length_s = stretch.up_at_s - stretch.down_at_s
    usual_s = min(HOLD_LENGTHS * length_s, LONGEST_HOLD_S)
    cover = stretch.cover
    _, back = card.switches(card.level_of(stretch))
    down = Command(
        edge="down",
        key=stretch.first if cover is None else f"{stretch.first} after {cover.after}",
        sm_clock_hz=stretch.sm_clock_hz,
        memory_clock_hz=stretch.memory_clock_hz,
        at_s=stretch.down_at_s,
        lead_s=stretch.start_s - stretch.down_at_s,
        hold_s=max(usual_s, length_s + back.quantile(0.99)),
    )
    up = Command(
        edge="up",
        key=stretch.last,
        sm_clock_hz=None,
        at_s=stretch.up_at_s,
        lead_s=stretch.end_s - stretch.up_at_s,
        hold_s=0.0,
    )
    return down, up


def edges(found: Iterable[SectionOccurrence]) -> list[RealEdge]:
    """Both edges of every section of every iteration."""
    return [
        RealEdge(
            iteration=place.iteration, edge=edge, key=place.key, t_s=t_s, marker_s=place.marker_s
        )
        for place in found
        for edge, t_s in _both(place)
    ]


def _both(place: SectionOccurrence) -> tuple[tuple[Edge, float], tuple[Edge, float]]:
    return ("down", place.begin_s), ("up", place.end_s)


def differences(commanded: Iterable[Commanded], real: Iterable[RealEdge]) -> list[float]:
    """Expected minus real edges of the same iteration and section."""
    at = {(edge.iteration, edge.edge, edge.key): edge.t_s for edge in real}
    return [
        command.edge_s - at[place]
        for command in commanded
        if command.state != "left out"
        and (place := (command.iteration, command.edge, command.key)) in at
    ]


def edge_errors(off: Sequence[float]) -> EdgeErrors | None:
    """Statistics of the differences; None if there are none."""
    if not off:
        return None
    sizes = sorted(abs(s) for s in off)
    return EdgeErrors(
        n=len(off),
        p50_s=statistics.median(sizes),
        p95_s=sizes[math.ceil(0.95 * len(sizes)) - 1],
        bias_s=statistics.median(off),
    )
