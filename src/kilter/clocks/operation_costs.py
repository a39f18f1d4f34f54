"""Time and energy of every unit operation at every clock pair of a simulated GPU, for planners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from kilter.clocks.plan.operations import Array, OperationsProblem, Path
from kilter.core.errors import PlanError
from kilter.core.setting import Setting
from kilter.core.trace import IterationTrace, Operation
from kilter.device.sim.profile import Profile
from kilter.device.sim.work import CLOCKLESS, cost_of, work_of
from kilter.model.power import LEAKAGE_AT_C, capped_clock

ClockPair = tuple[float | None, float | None]
"""The clock of the SMs, and that of the memory, are a pair; None: the default."""
MOST_PAIRS = 30
"""At most so many clock pairs are planned with: more cost time and save no more."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of a trace on a device; the first setting is the default. Simulated, warm."""

    settings: tuple[Setting, ...]
    operations: tuple[str, ...]
    time_s: Array
    energy_j: Array
    waiting_w: Array
    by_intensity: Path
    """The roofline alone gives each operation this setting (see `_by_intensity`)."""

    def problem(self, *, switch_s: float, max_slowdown: float) -> OperationsProblem:
        bound_s = (1.0 + max_slowdown) * float(self.time_s[:, 0].sum())
        return OperationsProblem(
            time_s=self.time_s,
            energy_j=self.energy_j,
            waiting_w=self.waiting_w,
            switch_s=switch_s,
            bound_s=bound_s,
        )


def costs_of(
    profile: Profile, trace: IterationTrace, clocks_hz: Sequence[ClockPair] | None = None
) -> Costs:
    """The tables of a trace. `PlanError` for a trace without work. The settings are pairs that the
    device supports, or these (but no SM clock above the default).

    The default SM clock is the highest that the power limit lets the whole iteration have. The
    limit acts on a mean over many operations, so a single one may draw more.
    """
    operations = [op for op in trace.operations if _takes_time(op, trace)]
    if not operations:
        raise PlanError("the trace has no operation that takes time; nothing can be planned")
    trace = replace(trace, operations=tuple(operations))
    settings, sm_hz, memory_hz = _settings(profile, trace, clocks_hz)
    works = [work_of(replace(trace, operations=(op,)), profile) for op in operations]

    def column(name: str) -> Array:
        return np.array([float(np.sum(getattr(work, name))) for work in works])[:, None]

    floor_s, fixed_s = column("floor_s"), column("fixed_s")
    busy_s = profile.roofline.busy_s(column("flops"), column("bytes_moved"), sm_hz, memory_hz)
    time_s = np.maximum(floor_s, busy_s) + fixed_s
    waiting_w = np.asarray(profile.power.waiting_w(sm_hz, memory_hz, LEAKAGE_AT_C))
    work_j = profile.power.work_j(column("switched_flops"), column("switched_bytes"), busy_s, sm_hz)
    return Costs(
        settings=settings,
        operations=tuple(op.name for op in operations),
        time_s=time_s,
        energy_j=waiting_w * time_s + work_j,
        waiting_w=waiting_w,
        by_intensity=_by_intensity(profile, operations, sm_hz, memory_hz),
    )


def _takes_time(op: Operation, trace: IterationTrace) -> bool:
    if trace.timeline == "gpu" or op.kind in CLOCKLESS:
        return op.duration_s > 0.0
    return bool(op.flops or op.bytes_moved or op.kernels)


def _settings(
    profile: Profile, trace: IterationTrace, clocks_hz: Sequence[ClockPair] | None
) -> tuple[tuple[Setting, ...], Array, Array]:
    """The default and pairs of clocks at and below it, with the clocks themselves."""
    knobs, top = profile.knobs, profile.knobs.memory_clocks_hz[-1]
    work = work_of(trace, profile)

    def power_w(sm_hz: object) -> float:
        cost = cost_of(
            work,
            profile.roofline,
            profile.power,
            sm_hz=float(sm_hz),  # type: ignore[arg-type]
            memory_hz=top,
            temperature_c=LEAKAGE_AT_C,
        )
        return cost.power_w

    limit_w = knobs.limit_highest_w * knobs.limit_kept
    own_hz = float(capped_clock(power_w, knobs.sm_lowest_hz, knobs.sm_highest_hz, limit_w))
    lower = [hz for hz in knobs.supported().sm_clocks_hz if hz < own_hz]
    each = max(2, MOST_PAIRS // len(knobs.memory_clocks_hz) - 1)
    places = np.unique(np.linspace(0, len(lower) - 1, min(each, len(lower))).round().astype(int))
    clocks = [own_hz, *(lower[i] for i in reversed(places))] if lower else [own_hz]
    pairs = [(sm, memory) for memory in reversed(knobs.memory_clocks_hz) for sm in clocks]
    if clocks_hz is not None:
        pairs = [
            (min(sm or own_hz, own_hz), memory or top) for sm, memory in ((None, None), *clocks_hz)
        ]
    settings = tuple(
        Setting(
            sm_clock_hz=None if sm == own_hz else sm,
            memory_clock_hz=None if memory == top else memory,
        )
        for sm, memory in pairs
    )
    return settings, np.array([sm for sm, _ in pairs]), np.array([memory for _, memory in pairs])


def _by_intensity(
    profile: Profile, operations: Sequence[Operation], sm_hz: Array, memory_hz: Array
) -> Path:
    """The strategy by arithmetic intensity (M. Blade and O. Kontola, Chalmers 2025): left of the
    roofline's ridge the SM clock falls until computing takes as long as the memory traffic, right
    of it the memory clock falls until the traffic takes as long as computing. Times are the two
    ideal ones; neither the bound nor the cost of switching is looked at."""
    roofline, path = profile.roofline, []
    for op in operations:
        if op.kind in CLOCKLESS or not (op.flops or op.bytes_moved):
            path.append(0)
            continue
        compute_s = (op.flops or 0.0) / (roofline.flops_per_cycle * sm_hz)
        memory_s = (op.bytes_moved or 0.0) / (roofline.bytes_per_memory_cycle * memory_hz)
        longest_s = max(compute_s[0], memory_s[0]) * (1.0 + 1e-9)
        legal = np.flatnonzero((compute_s <= longest_s) & (memory_s <= longest_s))
        least = legal[np.lexsort((memory_hz[legal], sm_hz[legal]))[0]]
        path.append(int(least))
    return np.array(path, dtype=np.intp)
