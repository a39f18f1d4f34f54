"""A 1F1B pipeline with unequal stages, ours beside Perseus' optimum on the same table of stages."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from kilter.clocks.plan.pipeline import (
    PipelineSchedule,
    Stage,
    StagePass,
    evaluate,
    one_forward_one_backward,
    plan,
)
from kilter.device.sim.profile import Profile
from kilter.model.power import LEAKAGE_AT_C, capped_clock
from kilter.model.quiet_solver import quiet_solver

STAGES, MICRO_BATCHES, CLOCKS = 4, 16, 16
FORWARD_S = 0.05
"""Forward pass of the mean stage at the highest clock; the backward pass takes twice as long."""
INTENSITY = 250.0
"""The passes have so many FLOP per byte: large matrix products."""


def savings(profile: Profile, *, seed: int, max_slowdown: float) -> dict[str, tuple[float, float]]:
    """Policy -> saving and slowdown. `perseus` is missing without HiGHS (the `exact` extra)."""
    random = np.random.default_rng([seed, 29])
    stages, blocked_w = stage_table(profile, random.uniform(0.75, 1.25, STAGES).tolist())
    schedule = one_forward_one_backward(STAGES, MICRO_BATCHES)
    default = evaluate(stages, schedule, [0] * len(schedule.units), blocked_w)
    bound_s = default.iteration_s * (1.0 + max_slowdown)
    ours = plan(stages, schedule, blocked_w=blocked_w, max_slowdown=max_slowdown, each=True)
    found = {"kilter": (1 - ours.energy_j / default.energy_j, ours.iteration_s)}
    if importlib.util.find_spec("highspy") is not None:
        best_j = perseus_j(stages, schedule, blocked_w=blocked_w, bound_s=bound_s)
        found["perseus"] = (1 - best_j / default.energy_j, bound_s)
    return {
        policy: (saving, iteration_s / default.iteration_s - 1.0)
        for policy, (saving, iteration_s) in found.items()
    }


def stage_table(profile: Profile, sizes: Sequence[float]) -> tuple[list[Stage], float]:
    """Stages of these relative sizes, and the power of a GPU that waits. The highest clock is the
    one that the power limit leaves."""
    knobs, roofline, power = profile.knobs, profile.roofline, profile.power
    memory_hz = knobs.memory_clocks_hz[-1]
    top_hz = knobs.sm_highest_hz
    flops = FORWARD_S * roofline.flops_per_cycle * top_hz

    def cost(work: float, sm_hz: object) -> tuple[object, object]:
        clock: float = sm_hz  # type: ignore[assignment]
        time_s = roofline.busy_s(work, work / INTENSITY, clock, memory_hz)
        waiting_w = power.waiting_w(clock, memory_hz, LEAKAGE_AT_C)
        return time_s, waiting_w * time_s + power.work_j(work, work / INTENSITY, time_s, clock)

    def power_w(sm_hz: object) -> float:
        time_s, energy_j = cost(flops, sm_hz)
        return energy_j / time_s  # type: ignore[operator, no-any-return]

    limit_w = knobs.limit_highest_w * knobs.limit_kept
    own_hz = float(capped_clock(power_w, knobs.sm_lowest_hz, top_hz, limit_w))
    clocks = np.linspace(own_hz, max(knobs.sm_lowest_hz, 0.45 * own_hz), CLOCKS)

    def one(work: float) -> StagePass:
        time_s, energy_j = (np.asarray(values) for values in cost(work, clocks))
        return StagePass(time_s=tuple(time_s.tolist()), energy_j=tuple(energy_j.tolist()))

    stages = [Stage(forward=one(s * flops), backward=one(2 * s * flops)) for s in sizes]
    return stages, float(power.waiting_w(own_hz, memory_hz, LEAKAGE_AT_C))


def perseus_j(
    stages: Sequence[Stage], schedule: PipelineSchedule, *, blocked_w: float, bound_s: float
) -> float:
    """Least energy of an iteration within the bound, where each pass mixes its clocks freely: the
    linear programme to which Perseus' energy-optimal schedule is a solution, by HiGHS. A lower
    bound for every schedule whose passes keep one clock each."""
    model = quiet_solver()
    ends = [model.addVariable(lb=0.0, ub=bound_s) for _ in schedule.units]
    cost: Any = 0.0  # becomes a linear expression
    for end, unit, needs in zip(ends, schedule.units, schedule.needs, strict=True):
        work = stages[unit.stage].of(unit.kind)
        shares = [model.addVariable(lb=0.0, ub=1.0) for _ in work.time_s]
        model.addConstr(sum(shares) == 1)
        pairs = zip(shares, work.time_s, strict=True)
        time_s = sum(share * t for share, t in pairs)
        model.addConstr(end >= time_s)
        for n in needs:
            model.addConstr(end - ends[n] - time_s >= 0)
        cost += sum(
            share * (e - blocked_w * t)
            for share, t, e in zip(shares, work.time_s, work.energy_j, strict=True)
        )
    model.minimize(cost)
    return float(model.getObjectiveValue()) + blocked_w * len(stages) * bound_s
