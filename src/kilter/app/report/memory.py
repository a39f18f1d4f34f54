"""The memory part of a report: what the budget was, what it came to, what moved and what it cost.

Values from the events of a run alone, so a killed run has them too; the timeline of a pass comes
from the `trace.json` and `plan.json` beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kilter.app.report.words import Finding
from kilter.core import codec
from kilter.core.errors import FileError
from kilter.core.events import Fitted, Moved
from kilter.core.label import Label
from kilter.core.memory_record import MemoryRecord
from kilter.core.plan import MemoryBudget, MoveData, Plan
from kilter.core.trace import IterationTrace
from kilter.core.units import MIB, show_bytes, show_count, show_fraction, show_time
from kilter.memory.messages import more_needed
from kilter.memory.plan.problem import Link, Problem, problem_of
from kilter.memory.plan.simulate import Move, Schedule, Span, simulate

MOST_KINDS = 4
"""So many kinds of passes get a line of their own."""
BEYOND = 0.1
"""What takes longer than planned by more than this share of an iteration is said."""
UNLIKE = 0.1
"""A plan makes no iteration shorter by so much: those before it did more."""
MIN_OTHERS, SOME = 3, 0.05
"""Iterations without a plan are told of if there are so many of them, and this share of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's card."""

    rank: int
    budget_bytes: int | None
    peak_before_bytes: int | None
    peak_bytes: int | None


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a memory budget, on rank 0's card."""

    goal: MemoryBudget
    record: MemoryRecord
    plans: tuple[Fitted, ...]
    """They stand in the order in which they came into force."""
    in_force: tuple[Fitted, ...]
    """These rule now, one for each kind of pass, the largest first."""
    ranks: tuple[RankMemory, ...]
    complete: bool = True
    """The record has an end: the run was not killed, and goes on no longer."""

    @property
    def label(self) -> Label:
        """Of all that is not said to be simulated: measured on a GPU; a stand-in is a
        simulation."""
        return Label.MEASURED if self.record.backend == "cuda" else Label.SIMULATED

    @property
    def plan(self) -> Fitted | None:
        """Of the largest pass that has one."""
        return self.in_force[0] if self.in_force else None

    @property
    def feasible(self) -> bool | None:
        """There is a plan within the budget; None: none was asked for, or it is not known. Where
        the budget was exceeded, a kind of pass without a plan may be the reason."""
        least_bytes, budget_bytes = self.record.least_bytes, self.record.budget_bytes
        unreached = bool(least_bytes and budget_bytes and least_bytes > budget_bytes)
        if not self.in_force:
            return False if unreached else None
        # Below the least of a kind without a plan, the excess is of another one.
        exceeded = self.within is False and (self.record.peak_bytes or 0) >= (least_bytes or 0)
        return all(map(self.fits, self.in_force)) and not (unreached and exceeded)

    def fits(self, plan: Fitted) -> bool:
        """Where no plan keeps the budget, the best one is made for more than that. (What a plan
        leaves to rounding may be what it was made for more.)"""
        budget_bytes = self.record.budget_bytes
        return plan.feasible and (budget_bytes is None or plan.peak_bytes <= budget_bytes)

    @property
    def within(self) -> bool | None:
        """The measured peak is within the budget; None: not known."""
        record = self.record
        if not record.applied or record.peak_bytes is None or record.budget_bytes is None:
            return None
        return record.peak_bytes <= record.budget_bytes

    @property
    def why_not_kept(self) -> str:
        """Empty if it is known that all ranks have kept their budgets."""
        peaks = [(one.peak_bytes, one.budget_bytes) for one in self.ranks]
        if self.moves_nothing:
            peaks = [(one.peak_before_bytes, one.budget_bytes) for one in self.ranks]
        elif not self.record.applied:
            return "no plan was in force"
        for rank, (peak_bytes, budget_bytes) in zip(self.ranks, peaks, strict=True):
            if peak_bytes is None or budget_bytes is None:
                return f"the peak of rank {rank.rank} under its budget was not measured"
            if peak_bytes > budget_bytes:
                over = f"{show_bytes(peak_bytes)}, over the budget of {show_bytes(budget_bytes)}"
                return f"the peak of rank {rank.rank} is {over}"
        return ""

    @property
    def host_bytes(self) -> int:
        """Of host memory: reserved, or planned where nothing was applied."""
        if self.record.applied or self.plan is None:
            return self.record.host_bytes
        return self.plan.host_bytes

    @property
    def slowdown(self) -> float | None:
        """Measured: iterations under the plan against the plain ones. Not on a stand-in, where the
        CPU that computes also copies and spoils, and not where the plain ones took far longer:
        then they did more than those under the plan (evaluation in between)."""
        record = self.record
        if record.backend == "stand-in" or not record.iteration_s or not record.plain_iteration_s:
            return None
        change = record.iteration_s / record.plain_iteration_s - 1.0
        return None if change < -UNLIKE else change

    @property
    def unplanned_slowdown(self) -> float | None:
        """The same of iterations that ended with a pass without a plan."""
        plain_s, others_s = self.record.plain_iteration_s, self.record.other_iteration_s
        return others_s / plain_s - 1.0 if plain_s and others_s else None

    @property
    def unplanned_share(self) -> float:
        """Of the iterations since a plan came into force, those that ended with a pass without one;
        0 where they are few."""
        others, planned = self.record.other_iterations, self.record.planned_iterations
        share = others / max(1, others + planned)
        return share if others >= MIN_OTHERS and share >= SOME else 0.0

    @property
    def pass_slowdown(self) -> float | None:
        """Simulated: forward and backward under the plan against everything kept. None where the
        model's own checkpointing is on: plans do not know what it takes."""
        if self.plan is None or not self.plan.iteration_s or not self.plan.compute_s:
            return None
        if self.record.own_checkpointing:
            return None
        return self.plan.iteration_s / self.plan.compute_s - 1.0

    @property
    def moved(self) -> str:
        """What really moved, over all passes; empty if nothing did."""
        record = self.record
        parts = []
        if record.out_bytes or record.in_bytes:
            parts.append(f"{show_bytes(record.out_bytes)} out and {show_bytes(record.in_bytes)} in")
        if record.recomputed:
            parts.append(f"{show_count(record.recomputed, 'tensor')} recomputed")
        if record.consumed:
            parts.append(
                f"{show_count(record.consumed, 'bucket')} of gradients used up in backward"
            )
        return ", ".join(parts)

    @property
    def moves_nothing(self) -> bool:
        """The job fits as it is: no plan moves anything, and nothing ever moved."""
        record = self.record
        if self.feasible is not True or record.plain_peak_bytes is None or self.moved:
            return False
        if record.own_checkpointing:
            return False
        plans = self.in_force or self.plans[-1:]
        if any(plan.swapped or plan.recomputed for plan in plans):
            return False
        return record.budget_bytes is None or record.plain_peak_bytes <= record.budget_bytes


def memory_report(
    goal: MemoryBudget | None,
    ranks: Sequence[tuple[int, Sequence[Fitted], Sequence[Moved]]],
    *,
    complete: bool = True,
) -> MemoryReport | None:
    """From the events of each rank. None if memory was left alone, or nothing was met."""
    if goal is None or not ranks or not ranks[0][2]:
        return None
    _, plans, moved = ranks[0]
    return MemoryReport(
        goal=goal,
        record=moved[-1],
        plans=tuple(plans),
        in_force=_in_force(plans, moved[-1]),
        ranks=tuple(
            RankMemory(
                rank=rank,
                budget_bytes=events[-1].budget_bytes,
                peak_before_bytes=events[-1].plain_peak_bytes,
                peak_bytes=events[-1].peak_bytes,
            )
            for rank, _, events in ranks
            if events
        ),
        complete=complete,
    )


def _in_force(plans: Sequence[Fitted], last: Moved) -> tuple[Fitted, ...]:
    """The plan of each kind of pass, the largest first. A record without them: of the largest."""
    largest = max((plan.peak_before_bytes for plan in plans), default=0)
    found = [plans[number] for number in last.in_force if number < len(plans)]
    if not found:
        found = [plan for plan in plans if plan.peak_before_bytes == largest][-1:]
    return tuple(sorted(found, key=lambda plan: -plan.peak_before_bytes))


FROM_RECORD = {
    "peak_before_bytes": "plain_peak_bytes",
    "peak_before_seen": "plain_peak_seen",
    "iteration_before_s": "plain_iteration_s",
}
FROM_PLAN = {
    "pass_before_s": "compute_s",
    "pass_s": "iteration_s",
    "stall_s": "stall_s",
    "recompute_s": "recompute_s",
    "pass_out_bytes": "out_bytes",
    "pass_in_bytes": "in_bytes",
    "hidden": "hidden",
    "swapped": "swapped",
    "recomputed": "remade",
    "kept": "kept",
}
"""It says what keys of `report.json` are called in the events."""


def as_json(memory: MemoryReport) -> dict[str, Any]:
    """The object `memory` of `report.json`: the record, the largest pass's plan, and the rest, in
    one level."""
    record = msgspec.to_builtins(memory.record)
    for name in ("event", "t_s"):
        record.pop(name, None)
    record |= {key: record.pop(name) for key, name in FROM_RECORD.items()}
    plan = {} if memory.plan is None else msgspec.to_builtins(memory.plan)
    rest = {name: getattr(memory, name) for name in ("goal", "plans", "in_force", "ranks")}
    return {
        **record,
        **{key: plan.get(name) for key, name in FROM_PLAN.items()},
        **msgspec.to_builtins(rest),
        "label": memory.label.value,
        "feasible": memory.feasible,
        "within": memory.within,
        "host_bytes": memory.host_bytes,
    }


# In words


def headline(memory: MemoryReport) -> str:
    """What came of it, in one sentence."""
    return f"memory: {result(memory)}"


def lines(memory: MemoryReport) -> list[str]:
    """The headline, and a line for each detail."""
    return [headline(memory), *(f"{name}: {text}" for name, text in details(memory))]


def result(memory: MemoryReport) -> Finding:
    """What came of it."""
    record = memory.record
    label = memory.label.value
    before, budget = show_bytes(record.plain_peak_bytes), show_bytes(record.budget_bytes)
    if record.passes == record.most_bytes == 0 and not memory.moved:
        if not memory.complete:
            return Finding("no pass is on record", label)
        text = f"no activation of {show_bytes(MIB)} or more was seen being saved for backward"
        return Finding(f"nothing to move: {text}", label)
    if record.budget_bytes is None:
        moved = memory.moved or "nothing was moved"
        return Finding(f"no budget ({record.budget}); peak {before}, {moved}", label)
    if memory.moves_nothing:
        return Finding(f"the job fits: peak {before} within {budget}, nothing was moved", label)
    if memory.feasible is False:
        return Finding(_unmet(memory, before, budget), label)
    after = show_bytes(record.peak_bytes)
    over = ""
    if memory.within is False:
        assert record.peak_bytes is not None
        over_bytes = record.peak_bytes - record.budget_bytes
        over = f", {show_bytes(over_bytes)} OVER the budget of {budget}"
        if 0 < record.highest_bytes <= record.budget_bytes:
            over += ", outside of forward and backward"
    if memory.feasible is None:
        own = "the model's own checkpointing is on" if record.own_checkpointing else ""
        moved = (own or memory.moved) if record.applied else ""
        if record.peak_bytes is None or not moved:
            return Finding(f"no plan yet: peak {before}, budget {budget}", label)
        return Finding(f"no plan: peak {before} -> {after}{over}, {moved}", label)
    if not record.applied:
        planned = show_bytes(memory.plans[-1].peak_bytes)
        moved = memory.moved or "nothing was moved"
        return Finding(f"peak {before} would be {planned}; {moved}", Label.SIMULATED.value)
    return Finding(f"peak {before} -> {after}{over}{_slower(memory)}", label)


def _unmet(memory: MemoryReport, before: str, budget: str) -> str:
    """No plan keeps the budget."""
    record = memory.record
    text = f"{budget} cannot be met"
    if record.least_bytes is not None:  # a killed run has none
        text += f", {show_bytes(record.least_bytes)} is the least that is possible"
    after = record.peak_bytes if record.applied else None
    planned = memory.in_force and after is not None
    if record.spilled and not planned:
        text += "; tensors were offloaded on demand"
    if after is None:
        return text
    less = after < (record.least_bytes or 0)  # than what was planned can take
    if less or (planned and after > (record.plain_peak_bytes or 0)):
        return f"{text}; passes of other kinds take up to {show_bytes(after)}"
    if planned:
        return f"{text}; the best plan takes {show_bytes(after)} of {before}{_slower(memory)}"
    return f"{text}; passes take up to {show_bytes(after)} of {before}"


def _slower(memory: MemoryReport) -> str:
    """By how much iterations are longer. Those without a plan come first where they are most."""
    if memory.slowdown is None:
        return ""
    change, share = show_fraction(memory.slowdown, signed=True), memory.unplanned_share
    if share > 0.5 and memory.unplanned_slowdown is not None:
        others = show_fraction(memory.unplanned_slowdown, signed=True)
        most = f"{others} without a plan ({show_fraction(share)} of all)"
        return f", iteration {most}, {change} under one"
    return f", iteration {change}{beside_plans(memory)}"


def beside_plans(memory: MemoryReport) -> str:
    """What belongs behind the time of iterations under a plan, where some are without."""
    share = memory.unplanned_share
    return f" under a plan, {show_fraction(share)} of iterations without one" if share else ""


def details(memory: MemoryReport) -> list[tuple[str, str]]:
    """Name and text of what else a reader may ask."""
    lines = _conditions(memory)
    if not memory.moves_nothing and memory.record.budget_bytes is not None:
        lines += [("time", time)] if (time := _time(memory)) else []
        lines += _beyond(memory)
        kinds = [(_name(memory, plan), _each_pass(plan)) for plan in memory.in_force]
        lines += list(dict.fromkeys(kinds))[:MOST_KINDS]
        lines += _what_moved(memory)
    return lines + _ranks(memory)


def _conditions(memory: MemoryReport) -> list[tuple[str, str]]:
    """Under what the job ran: budget, device, and peaks that the headline does not have."""
    record = memory.record
    lines = []
    if record.budget_bytes is not None:
        lines.append(("budget", f"{show_bytes(record.budget_bytes)}: {record.budget}"))
    if record.backend == "stand-in":
        counted = "no GPU: a stand-in on the CPU that counts what autograd keeps, nothing else"
        lines.append(("device", counted))
    if memory.moved and not record.plain_peak_seen and record.plain_peak_bytes is not None:
        text = f"{show_bytes(record.plain_peak_bytes)} counted: parts were offloaded on demand"
        lines.append(("peak before", f"{text} from the first iteration on"))
    if record.at_peak:
        lines.append(("at the peak", record.at_peak))
    if memory.feasible is False and record.least_bytes and record.budget_bytes:
        over_bytes = record.least_bytes - record.budget_bytes
        if over_bytes > 0:
            stay = record.backend == "cuda" and not record.consumed
            lines.append(("to fit", more_needed(over_bytes, gradients_stay=stay)))
    if record.recompute_choice:
        lines.append(("recompute", record.recompute_choice))
    if record.compiled:
        lines.append(("compiled", record.compiled))
    if record.applied and record.most_bytes > (record.peak_bytes or record.most_bytes):
        text = f"{show_bytes(record.most_bytes)} in passes before the present plans were in force"
        lines.append(("highest peak", text))
    return lines


def _what_moved(memory: MemoryReport) -> list[tuple[str, str]]:
    """Over all passes."""
    record = memory.record
    lines = []
    if record.applied:
        lines.append(("all passes", memory.moved or "nothing was moved"))
    if record.state:
        lines.append(("the rest", record.state))
    if memory.host_bytes:
        pinned = "pinned " if record.backend == "cuda" else ""
        lines.append(("host", f"{show_bytes(memory.host_bytes)} of {pinned}host memory"))
    if record.applied:
        counts = f"{record.passes} passes, {record.planned} under a plan; "
        counts += f"{show_count(record.deviations, 'deviation')}, {record.late} late, "
        counts += f"{record.spilled} on demand"
        lines.append(("passes", counts))
    if record.waited_s is not None:
        waits = f"{show_time(record.waited_s)} a pass [{memory.label.value}]"
        if record.hastened:
            waits += f"; {record.hastened} loads start earlier than planned, since they were late"
        lines.append(("waits for copies", waits))
    return lines


def _name(memory: MemoryReport, plan: Fitted) -> str:
    """What a line about one kind of pass is called."""
    if len(memory.in_force) == 1:
        return "each planned pass"
    return f"passes of {show_bytes(plan.peak_before_bytes)}"


def _each_pass(plan: Fitted) -> str:
    moved = f"{show_bytes(plan.out_bytes)} out and {show_bytes(plan.in_bytes)} in"
    hidden = f", {show_fraction(plan.hidden)} of it hidden" if plan.out_bytes else ""
    return (
        f"{show_count(plan.swapped, 'tensor')} offloaded, {plan.recomputed} recomputed, "
        f"{plan.kept} kept; {moved}{hidden} [simulated]"
    )


def _time(memory: MemoryReport) -> str:
    record = memory.record
    parts = []
    if record.iteration_s is not None and record.backend != "stand-in":
        before = ""
        if memory.slowdown is not None:
            before = f"{show_time(record.plain_iteration_s)} -> "
        after = show_time(record.iteration_s)
        parts.append(f"iteration {before}{after} [{memory.label.value}]")
        if memory.unplanned_share:
            parts.append(f"{without_plan(memory)} [measured]")
    if memory.plan is not None and not record.own_checkpointing:
        bound = "" if record.bound_s is None else f", bound {show_time(record.bound_s)}"
        change = show_fraction(memory.pass_slowdown, signed=True)
        parts.append(
            f"forward and backward {show_time(memory.plan.compute_s)} -> "
            f"{show_time(memory.plan.iteration_s)} ({change}){bound} [simulated]"
        )
    return "; ".join(parts)


def without_plan(memory: MemoryReport) -> str:
    """What the iterations that ended with a pass without a plan took."""
    share, took_s = show_fraction(memory.unplanned_share), memory.record.other_iteration_s
    return f"{show_time(took_s)} where a pass has no plan, {share} of iterations"


def how_kept(memory: MemoryReport) -> str:
    """What was in force while iterations were timed, as further sentences; empty: nothing was."""
    own = " The model's own checkpointing was on." if memory.record.own_checkpointing else ""
    if memory.plan is not None:
        return f"{own} The memory plan was in force."
    offloaded = " Tensors were offloaded without a memory plan." if memory.record.out_bytes else ""
    return own + offloaded


def _beyond(memory: MemoryReport) -> list[tuple[str, str]]:
    """What an iteration takes longer than the plan accounts for, where that is a lot. Each pass of
    an iteration counts like the largest one: what smaller ones take is not said to be missing."""
    record, plan = memory.record, memory.plan
    before_s = record.plain_iteration_s if memory.slowdown is not None else None
    after_s = record.iteration_s
    if record.backend == "stand-in" or plan is None or after_s is None or record.own_checkpointing:
        return []
    if before_s is None:
        beyond_s = after_s - record.iteration_passes * plan.iteration_s - record.step_wait_s
        what = "are no part of forward and backward as planned: the optimizer, other work of the"
        what += " program, and the host where it is late in issuing"
    else:
        planned_s = record.iteration_passes * (plan.iteration_s - plan.compute_s)
        beyond_s = (after_s - before_s) - planned_s - record.step_wait_s
        what = "are not in the plan, which counts the device's time alone: the host is likely late"
        what += " in issuing"
    if beyond_s < BEYOND * (before_s or plan.iteration_s):
        return []
    text = (
        f"{show_time(beyond_s)} an iteration {what} what moves and what is recomputed; larger "
        "batches, fewer waits for the device (.item(), print), or --recompute auto give it time"
    )
    return [("beyond the plan", text)]


def _ranks(memory: MemoryReport) -> list[tuple[str, str]]:
    if len(memory.ranks) < 2:
        return []
    peaks = ", ".join(
        f"{r.rank}: {show_bytes(r.peak_before_bytes)} -> {show_bytes(r.peak_bytes)}"
        for r in memory.ranks
    )
    return [("ranks", f"peak of each: {peaks}")]


# The timeline of one pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One pass under its plan, in simulated time."""

    problem: Problem
    schedule: Schedule
    starts_s: tuple[float, ...]
    """Each operation starts then."""
    end_s: float
    before_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    backward_from: int
    """Backward begins with this operation."""
    spans: tuple[Span, ...]


def timeline(run: str | Path) -> Timeline | None:
    """From the files of a run; None if it has no memory plan, or if one of the files cannot be
    read."""
    trace, plan = Path(run) / "trace.json", Path(run) / "plan.json"
    try:
        return timeline_of(codec.load(trace, IterationTrace), codec.load(plan, Plan))
    except FileError:
        return None


def timeline_of(trace: IterationTrace, plan: Plan) -> Timeline | None:
    """The plan's schedule on the trace's memory, by the event simulator."""
    memory, moved = trace.memory or trace, plan.memory
    if moved is None or not memory.data:
        return None
    problem, schedule = problem_and_schedule(memory, moved)
    outcome = simulate(problem, schedule)
    starts_s = tuple(span.start_s for span in outcome.spans if span.lane == "compute")
    count = len(problem.operation_s)
    kinds = [operation.kind.value for operation in memory.operations]
    return Timeline(
        problem=problem,
        schedule=schedule,
        starts_s=starts_s,
        end_s=outcome.iteration_s,
        before_bytes=problem.resident_bytes,
        after_bytes=planned_levels(problem, schedule),
        backward_from=kinds.index("backward") if "backward" in kinds else count,
        spans=outcome.spans,
    )


def problem_and_schedule(trace: IterationTrace, moved: MoveData) -> tuple[Problem, Schedule]:
    """What was planned, from the files."""
    out, back, both, latency_s = moved.link
    link = Link(
        to_host_bytes_per_s=out,
        to_device_bytes_per_s=back,
        both_bytes_per_s=both,
        latency_s=latency_s,
    )
    problem = problem_of(
        trace, link=link, budget_bytes=moved.budget_bytes, min_bytes=moved.min_bytes
    )
    moves = tuple(Move(interval, release, load) for interval, release, load in moved.moves)
    return problem, Schedule(moves=moves, recomputed=moved.recomputed)


def planned_levels(problem: Problem, schedule: Schedule) -> tuple[int, ...]:
    """Bytes in use in each operation under the schedule."""
    evicted = {move.interval: (move.release, move.load) for move in schedule.moves}
    due = problem.deadlines(frozenset(schedule.recomputed))
    evicted |= {i: (problem.intervals[i].after + 1, due[i]) for i in schedule.recomputed}
    return tuple(int(level) for level in problem.profile(evicted))


def chrome_of(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """A feasible schedule as a Chrome trace: one row for compute, recomputation and stalls, one for
    each direction, and the memory level with and without the plan. Times are simulated."""
    outcome = simulate(problem, schedule)
    rows = {"compute": 1, "recompute": 1, "stall": 1, "out": 2, "in": 3}
    names = {1: "compute", 2: "to host", 3: "to device"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in names.items()
    ]
    level = planned_levels(problem, schedule)
    for span in outcome.spans:
        operation = span.lane in ("compute", "stall")
        what = f"operation {span.index}" if operation else problem.intervals[span.index].name
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": rows[span.lane],
                "name": what if span.lane == "compute" else f"{span.lane}: {what}",
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
        )
        if span.lane == "compute":
            sizes = {
                "planned": level[span.index],
                "without": problem.resident_bytes[span.index],
            }
            events.append(
                {"ph": "C", "pid": 1, "name": "bytes", "ts": span.start_s * 1e6, "args": sizes}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
