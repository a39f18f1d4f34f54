"""A memory plan as it goes into the record and the files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilter.core.events import Fitted
from kilter.core.label import Label
from kilter.core.memory_record import PlanFigures
from kilter.core.plan import Effect, MoveData, Plan
from kilter.core.trace import IterationTrace
from kilter.core.units import MIB
from kilter.memory.engine.engine import PassPlan
from kilter.memory.plan.choose import MemoryPlan
from kilter.memory.plan.problem import Problem


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """A pass as it was observed, and the plan for it."""

    trace: IterationTrace
    plan: Plan


def fitted(plan: MemoryPlan, *, t_s: float, kept: int) -> Fitted:
    """The event: this plan is in force from here on."""
    return Fitted(
        t_s=t_s,
        hidden=plan.hidden,
        swapped=plan.swapped,
        recomputed=plan.recomputed,
        kept=kept,
        **{name: getattr(plan, name) for name in PlanFigures.__struct_fields__},
    )


def schedule_of(
    planned: PassPlan,
    *,
    problem: Problem,
    intervals: Sequence[int],
    device: str,
    reason: str,
) -> PlannedPass:
    """What is written down: `problem` is what a reader makes of the trace, and `intervals` says
    which of its intervals each one of the plan is."""
    plan = planned.plan
    moves = [(intervals[move.interval], move.release, move.load) for move in plan.schedule.moves]
    link = problem.link
    return PlannedPass(
        trace=planned.record.trace(device=device, segments=planned.segments),
        plan=Plan(
            planner=plan.planner,
            actions=(),
            effect=Effect(
                time_ratio=plan.iteration_s / plan.compute_s if plan.compute_s else 1.0,
                peak_bytes=plan.peak_bytes,
            ),
            reason=reason,
            label=Label.SIMULATED,
            memory=MoveData(
                budget_bytes=plan.budget_bytes,
                min_bytes=MIB,
                link=(
                    link.to_host_bytes_per_s,
                    link.to_device_bytes_per_s,
                    link.both_bytes_per_s,
                    link.latency_s,
                ),
                moves=tuple(sorted(moves)),
                recomputed=tuple(sorted(intervals[index] for index in plan.schedule.recomputed)),
            ),
        ),
    )
