"""A memory plan as it goes into the record and the files of a run."""

from __future__ import annotations

from dataclasses import dataclass

from kilter.core.events import Fitted
from kilter.core.label import Label
from kilter.core.memory_record import PlanFigures
from kilter.core.plan import Effect, MoveData, Plan
from kilter.core.trace import IterationTrace
from kilter.core.units import MIB
from kilter.memory.engine.engine import PassPlan
from kilter.memory.plan.choose import MemoryPlan
from kilter.memory.plan.problem import problem_of


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """A pass as it was observed, and the plan for it."""

    trace: IterationTrace
    plan: Plan
    kept: int
    """So many tensors that could move stay on the device."""


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
    device: str,
    reason: str,
) -> PlannedPass:
    """What is written down. A reader makes the intervals of the plan out of the trace, and others
    behind them."""
    plan, problem, link = planned.plan, planned.problem, planned.problem.link
    trace = planned.record.trace(
        device=device, segments=planned.segments, planned=(problem, planned.numbers)
    )
    min_bytes = min([MIB, *(interval.size_bytes for interval in problem.intervals)])
    read = problem_of(trace, link=link, budget_bytes=plan.budget_bytes, min_bytes=min_bytes)
    return PlannedPass(
        trace=trace,
        kept=read.tensors(range(len(read.intervals))) - plan.swapped - plan.recomputed,
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
                min_bytes=min_bytes,
                link=(
                    link.to_host_bytes_per_s,
                    link.to_device_bytes_per_s,
                    link.both_bytes_per_s,
                    link.latency_s,
                ),
                moves=tuple(sorted((m.interval, m.release, m.load) for m in plan.schedule.moves)),
                recomputed=tuple(sorted(plan.schedule.recomputed)),
            ),
        ),
    )
