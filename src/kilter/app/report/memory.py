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
from kilter.core.events import Fitted, Moved
from kilter.core.label import Label
from kilter.core.plan import MemoryBudget, MoveData, Plan
from kilter.core.trace import IterationTrace
from kilter.core.units import show_bytes, show_fraction, show_time
from kilter.memory.plan.problem import Link, Problem, problem_of
from kilter.memory.plan.simulate import Move, Schedule, Span, simulate

MOST_KINDS = 4
"""Kinds of passes that get a line of their own."""
BEYOND = 0.1
"""Of an iteration: what takes longer than planned by more than that is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One rank's card."""

    rank: int
    budget_bytes: int | None
    peak_before_bytes: int | None
    peak_bytes: int | None


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a memory budget, on rank 0's card. `None` is unknown, never zero."""

    label: Label
    """Of all that is not said to be simulated: measured on a GPU; a stand-in is a simulation."""
    backend: str
    goal: MemoryBudget
    budget_bytes: int | None
    budget: str
    """Where the budget comes from."""
    applied: bool
    feasible: bool | None
    """There is a plan within the budget; None: none was asked for, or it is not known."""
    within: bool | None
    """The measured peak is within the budget."""
    peak_before_bytes: int | None
    peak_before_seen: bool
    """False: something was away all the time, and is counted in."""
    peak_bytes: int | None
    """The largest of all kinds of passes, as they run now."""
    most_bytes: int
    """The largest since the budget is in force; 0: not known."""
    least_bytes: int | None
    iteration_before_s: float | None
    """With everything kept and without us; None where the budget did not allow it."""
    iteration_s: float | None
    pass_before_s: float | None
    pass_s: float | None
    """Forward and backward: as observed, and under the plan (simulated)."""
    bound_s: float | None
    stall_s: float | None
    recompute_s: float | None
    pass_out_bytes: int | None
    pass_in_bytes: int | None
    hidden: float | None
    host_bytes: int
    swapped: int | None
    recomputed: int | None
    kept: int | None
    passes: int
    planned: int
    deviations: int
    late: int
    spilled: int
    waited_s: float | None
    """For which the device stood still for copies in a pass under the plan; None: not timed."""
    hastened: int
    """Loads that start earlier than planned, since the device had waited for them."""
    recomputations: int = msgspec.field(name="remade")
    """Of tensors, over all passes."""
    out_bytes: int
    in_bytes: int
    """Activations, optimizer state and weights, over all passes."""
    consumed: int
    """Buckets of gradients that were used up in backward, over all passes."""
    state: str
    """What became of gradients and optimizer state; empty if they were left alone."""
    plans: tuple[Fitted, ...]
    """In the order in which they came into force."""
    in_force: tuple[Fitted, ...]
    """Those that rule now, one for each kind of pass, the largest first."""
    ranks: tuple[RankMemory, ...]

    @property
    def slowdown(self) -> float | None:
        """Measured: iterations under the plan against the plain ones. Not on a stand-in, where the
        CPU that computes also copies and spoils."""
        if self.backend == "stand-in" or not self.iteration_s or not self.iteration_before_s:
            return None
        return self.iteration_s / self.iteration_before_s - 1.0

    @property
    def pass_slowdown(self) -> float | None:
        """Simulated: forward and backward under the plan against everything kept."""
        if not self.pass_s or not self.pass_before_s:
            return None
        return self.pass_s / self.pass_before_s - 1.0

    @property
    def moved(self) -> str:
        """What really moved, over all passes; empty if nothing did."""
        parts = []
        if self.out_bytes or self.in_bytes:
            parts.append(f"{show_bytes(self.out_bytes)} out and {show_bytes(self.in_bytes)} in")
        if self.recomputations:
            parts.append(f"{self.recomputations} tensors recomputed")
        if self.consumed:
            parts.append(f"{self.consumed} buckets of gradients used up in backward")
        return ", ".join(parts)

    @property
    def moves_nothing(self) -> bool:
        """The job fits as it is: no plan moves anything, and nothing ever moved."""
        if self.feasible is not True or self.peak_before_bytes is None or self.moved:
            return False
        plans = self.in_force or self.plans[-1:]
        if any(plan.swapped or plan.recomputed for plan in plans):
            return False
        return self.budget_bytes is None or self.peak_before_bytes <= self.budget_bytes


def memory_report(
    goal: MemoryBudget | None, ranks: Sequence[tuple[int, Sequence[Fitted], Sequence[Moved]]]
) -> MemoryReport | None:
    """From the events of each rank. None if memory was left alone, or nothing was met."""
    if goal is None or not ranks or not ranks[0][2]:
        return None
    _, plans, moved = ranks[0]
    last = moved[-1]
    in_force = _in_force(plans, last)
    plan = in_force[0] if in_force else None
    feasible = all(p.feasible for p in in_force) if in_force else None
    if plan is None and None not in (last.least_bytes, last.budget_bytes):
        feasible = False if last.least_bytes > last.budget_bytes else None  # type: ignore[operator]
    within = None
    if last.applied and last.peak_bytes is not None and last.budget_bytes is not None:
        within = last.peak_bytes <= last.budget_bytes
    return MemoryReport(
        label=Label.MEASURED if last.backend == "cuda" else Label.SIMULATED,
        backend=last.backend,
        goal=goal,
        budget_bytes=last.budget_bytes,
        budget=last.budget,
        applied=last.applied,
        feasible=feasible,
        within=within,
        peak_before_bytes=last.plain_peak_bytes,
        peak_before_seen=last.plain_peak_seen,
        peak_bytes=last.peak_bytes,
        most_bytes=last.most_bytes,
        least_bytes=last.least_bytes,
        iteration_before_s=last.plain_iteration_s,
        iteration_s=last.iteration_s,
        pass_before_s=None if plan is None else plan.compute_s,
        pass_s=None if plan is None else plan.iteration_s,
        bound_s=last.bound_s,
        stall_s=None if plan is None else plan.stall_s,
        recompute_s=None if plan is None else plan.recompute_s,
        pass_out_bytes=None if plan is None else plan.out_bytes,
        pass_in_bytes=None if plan is None else plan.in_bytes,
        hidden=None if plan is None else plan.hidden,
        host_bytes=last.host_bytes if last.applied or plan is None else plan.host_bytes,
        swapped=None if plan is None else plan.swapped,
        recomputed=None if plan is None else plan.recomputed,
        kept=None if plan is None else plan.kept,
        passes=last.passes,
        planned=last.planned,
        deviations=last.deviations,
        late=last.late,
        spilled=last.spilled,
        waited_s=last.waited_s,
        hastened=last.hastened,
        recomputations=last.recomputed,
        out_bytes=last.out_bytes,
        in_bytes=last.in_bytes,
        consumed=last.consumed,
        state=last.state,
        plans=tuple(plans),
        in_force=in_force,
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
    )


def _in_force(plans: Sequence[Fitted], last: Moved) -> tuple[Fitted, ...]:
    """The plan of each kind of pass, the largest first. A record without them: of the largest."""
    largest = max((plan.peak_before_bytes for plan in plans), default=0)
    found = [plans[number] for number in last.in_force if number < len(plans)]
    if not found:
        found = [plan for plan in plans if plan.peak_before_bytes == largest][-1:]
    return tuple(sorted(found, key=lambda plan: -plan.peak_before_bytes))


# In words


def headline(memory: MemoryReport) -> str:
    """What came of it, in one sentence."""
    return f"memory: {result(memory)}"


def result(memory: MemoryReport) -> Finding:
    """What came of it."""
    label = memory.label.value
    before, budget = show_bytes(memory.peak_before_bytes), show_bytes(memory.budget_bytes)
    if memory.budget_bytes is None:
        moved = memory.moved or "nothing was moved"
        return Finding(f"no budget ({memory.budget}); peak {before}, {moved}", label)
    if memory.moves_nothing:
        return Finding(f"the job fits: peak {before} within {budget}, nothing was moved", label)
    if memory.feasible is False:
        least = show_bytes(memory.least_bytes)
        did = "; data were offloaded on demand" if memory.spilled else ""
        return Finding(f"{budget} cannot be met, {least} is the least that is possible{did}", label)
    if memory.feasible is None:
        return Finding(f"no plan yet: peak {before}, budget {budget}", label)
    if not memory.applied:
        planned = show_bytes(memory.plans[-1].peak_bytes)
        moved = memory.moved or "nothing was moved"
        return Finding(f"peak {before} would be {planned}; {moved}", Label.SIMULATED.value)
    after = show_bytes(memory.peak_bytes)
    over = "" if memory.within is not False else f", OVER the budget of {budget}"
    return Finding(f"peak {before} -> {after}{over}{_slower(memory)}", label)


def _slower(memory: MemoryReport) -> str:
    if memory.slowdown is None:
        return ""
    return f", iteration {show_fraction(memory.slowdown, signed=True)}"


def details(memory: MemoryReport) -> list[tuple[str, str]]:
    """Name and text of what else a reader may ask."""
    lines = []
    if memory.budget_bytes is not None:
        lines.append(("budget", f"{show_bytes(memory.budget_bytes)}: {memory.budget}"))
    if memory.backend == "stand-in":
        counted = "no GPU: a stand-in on the CPU that counts what autograd keeps, nothing else"
        lines.append(("device", counted))
    if not memory.peak_before_seen and memory.peak_before_bytes is not None:
        text = f"{show_bytes(memory.peak_before_bytes)} counted: parts were away on demand"
        lines.append(("peak before", f"{text} from the first iteration on"))
    if memory.applied and memory.most_bytes > (memory.peak_bytes or memory.most_bytes):
        text = f"{show_bytes(memory.most_bytes)} in passes before the present plans were in force"
        lines.append(("highest peak", text))
    if memory.moves_nothing or memory.budget_bytes is None:
        return lines + _ranks(memory)
    lines.append(("time", _time(memory)))
    lines += _beyond(memory)
    lines += [(_name(memory, plan), _each_pass(plan)) for plan in memory.in_force[:MOST_KINDS]]
    if memory.applied:
        lines.append(("all passes", memory.moved or "nothing was moved"))
    if memory.state:
        lines.append(("the rest", memory.state))
    if memory.host_bytes:
        pinned = "pinned " if memory.backend == "cuda" else ""
        lines.append(("host", f"{show_bytes(memory.host_bytes)} of {pinned}host memory"))
    if memory.applied:
        counts = f"{memory.passes} passes, {memory.planned} under a plan; "
        counts += f"{memory.deviations} deviations, {memory.late} late, {memory.spilled} on demand"
        lines.append(("passes", counts))
    if memory.waited_s is not None:
        waits = f"{show_time(memory.waited_s)} a pass [{memory.label.value}]"
        if memory.hastened:
            waits += f"; {memory.hastened} loads start earlier than planned, since they were late"
        lines.append(("waits for copies", waits))
    return lines + _ranks(memory)


def _name(memory: MemoryReport, plan: Fitted) -> str:
    """What a line about one kind of pass is called."""
    if len(memory.in_force) == 1:
        return "each pass"
    return f"passes of {show_bytes(plan.peak_before_bytes)}"


def _each_pass(plan: Fitted) -> str:
    moved = f"{show_bytes(plan.out_bytes)} out and {show_bytes(plan.in_bytes)} in"
    return (
        f"{plan.swapped} tensors offloaded, {plan.recomputed} recomputed, {plan.kept} kept; "
        f"{moved}, {show_fraction(plan.hidden)} of it hidden [simulated]"
    )


def _time(memory: MemoryReport) -> str:
    parts = []
    if memory.iteration_s is not None and memory.backend != "stand-in":
        before = ""
        if memory.iteration_before_s is not None:
            before = f"{show_time(memory.iteration_before_s)} -> "
        after = show_time(memory.iteration_s)
        parts.append(f"iteration {before}{after} [{memory.label.value}]")
    if memory.pass_s is not None:
        bound = "" if memory.bound_s is None else f", bound {show_time(memory.bound_s)}"
        change = show_fraction(memory.pass_slowdown, signed=True)
        parts.append(
            f"forward and backward {show_time(memory.pass_before_s)} -> "
            f"{show_time(memory.pass_s)} ({change}){bound} [simulated]"
        )
    return "; ".join(parts) or "unknown"


def _beyond(memory: MemoryReport) -> list[tuple[str, str]]:
    """What an iteration takes longer than the plan accounts for, where that is a lot."""
    before_s, after_s = memory.iteration_before_s, memory.iteration_s
    if memory.backend == "stand-in" or before_s is None or after_s is None:
        return []
    if memory.pass_s is None or memory.pass_before_s is None:
        return []
    beyond_s = (after_s - before_s) - (memory.pass_s - memory.pass_before_s)
    if beyond_s < BEYOND * before_s:
        return []
    text = (
        f"{show_time(beyond_s)} an iteration are not in the plan, which counts the device's time "
        "alone: the host is likely late in issuing what moves and what is recomputed; larger "
        "batches, or fewer waits for the device (.item(), print), give it time"
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
    """Of each operation."""
    end_s: float
    before_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    backward_from: int
    """First operation of backward."""
    spans: tuple[Span, ...]
    device: str


def timeline(run: str | Path) -> Timeline | None:
    """From the files of a run; None if it has no memory plan. `FileError` if one is malformed."""
    trace, plan = Path(run) / "trace.json", Path(run) / "plan.json"
    if not trace.exists() or not plan.exists():
        return None
    return timeline_of(codec.load(trace, IterationTrace), codec.load(plan, Plan))


def timeline_of(trace: IterationTrace, plan: Plan) -> Timeline | None:
    """The plan's schedule on the trace's memory, by the event simulator."""
    memory, moved = trace.memory or trace, plan.memory
    if moved is None or not memory.data:
        return None
    problem, schedule = problem_and_schedule(memory, moved)
    outcome = simulate(problem, schedule)
    starts_s = tuple(span.start_s for span in outcome.spans if span.lane == "compute")
    away = {move.interval: (move.release, move.load) for move in schedule.moves}
    due = problem.deadlines(frozenset(schedule.recomputed))
    away |= {i: (problem.intervals[i].after + 1, due[i]) for i in schedule.recomputed}
    count = len(problem.operation_s)
    kinds = [operation.kind.value for operation in memory.operations]
    return Timeline(
        problem=problem,
        schedule=schedule,
        starts_s=starts_s,
        end_s=outcome.iteration_s,
        before_bytes=problem.resident_bytes,
        after_bytes=tuple(int(level) for level in problem.profile(away)),
        backward_from=kinds.index("backward") if "backward" in kinds else count,
        spans=outcome.spans,
        device=memory.device,
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


def chrome_of(found: Timeline) -> dict[str, Any]:
    """The pass as a Chrome trace."""
    from kilter.app.plan_memory import chrome_of_schedule

    return chrome_of_schedule(found.problem, found.schedule)
