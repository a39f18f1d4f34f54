"""How much of the time the GPU has nothing to do, and what the trace tells of the rest: where much
is idle, no clock is the problem."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kilter.core.events import Block, Sampled
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo
from kilter.core.trace import IterationTrace, Kind
from kilter.device.sim.cards import profile_of
from kilter.device.sim.profile import load_profile
from kilter.device.sim.work import default_cost, work_of

LEAN, DENSE = 14.0, 300.0
"""Both are FLOP per byte. The most arithmetic for each byte that a GPU can do at full bandwidth
lies between the two: 14 on a P100 (single precision), 15 to 37 on later ones in single precision,
295 on an H100 and 281 on a B200 with tensor cores (16 bits; the vendors' data sheets)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A share of the time, and where it was seen."""

    share: float
    waits_for_data: float | None
    """In this part of that share the program waits for its data loader; None: not known."""
    communication: float | None = None
    """In this share of the time collectives run and nothing else; None: not known."""
    memory: float | None = None
    """The memory alone would take this share of the busy time, by a model of the device."""
    lean: float | None = None
    """Operations of less than `LEAN` FLOP per byte take this share of the busy time; None: not
    known."""
    dense: float | None = None
    """Operations of more than `DENSE` take this share of it."""
    source: str
    """It is `trace`, `model` (of a simulated device) or `utilisation`."""
    label: Label


def idle_of(
    trace: IterationTrace | None,
    device: DeviceInfo,
    samples: Sequence[Sampled],
    blocks: Sequence[Block],
) -> Idle | None:
    """From the trace where there is one, else from the device's utilisation while it was observed;
    None if neither tells."""
    if trace is not None and trace.operations:
        if device.backend == "sim" and (name := profile_of(device.name)) is not None:
            return _modelled(trace, name)
        if trace.timeline == "gpu" and trace.iteration_s > 0.0:
            share = min(1.0, max(0.0, 1.0 - trace.busy_s / trace.iteration_s))
            found = _idle(trace, share, trace.iteration_s, "trace", trace.label)
            return replace(found, lean=_computing(trace, 0, LEAN), dense=_computing(trace, DENSE))
    if device.backend == "null" or not blocks:
        return None
    begin_s, end_s = blocks[0].device_begin_s, blocks[-1].device_end_s
    used = [
        sample.sm_utilisation
        for sample in samples
        if sample.sm_utilisation is not None and begin_s <= sample.device_t_s <= end_s
    ]
    if not used:
        return None
    share = 1.0 - statistics.fmean(used)
    return Idle(share=share, waits_for_data=None, source="utilisation", label=device.label)


def _computing(trace: IterationTrace, least: float, most: float = math.inf) -> float | None:
    """Share of the time of computing in operations whose FLOP per byte is within these."""
    moved = (Kind.GAP, Kind.DATA_WAIT, Kind.COPY, Kind.COLLECTIVE)
    computing = [op for op in trace.operations if op.kind not in moved]
    inside_s = sum(
        op.duration_s
        for op in computing
        if op.bytes_moved and least <= (op.flops or 0.0) / op.bytes_moved < most
    )
    all_s = sum(op.duration_s for op in computing)
    return inside_s / all_s if all_s > 0.0 else None


def _modelled(trace: IterationTrace, name: str) -> Idle | None:
    """On the simulated device at its default clocks."""
    profile = load_profile(name)
    try:
        cost = default_cost(work_of(trace, profile), profile)
    except ValueError:  # an iteration without any work
        return None
    moved_s = sum(
        op.duration_s for op in trace.operations if op.kind in (Kind.COPY, Kind.COLLECTIVE)
    )
    share = min(1.0, max(0.0, 1.0 - (cost.busy_s + moved_s) / cost.time_s))
    memory = min(1.0, cost.memory_s / cost.busy_s) if cost.busy_s > 0.0 else None
    return _idle(trace, share, cost.time_s, "model", Label.SIMULATED, memory)


def _idle(
    trace: IterationTrace,
    share: float,
    iteration_s: float,
    source: str,
    label: Label,
    memory: float | None = None,
) -> Idle:
    waits_s = sum(op.duration_s for op in trace.operations if op.kind is Kind.DATA_WAIT)
    collectives_s = sum(op.duration_s for op in trace.operations if op.kind is Kind.COLLECTIVE)
    return Idle(
        share=share,
        waits_for_data=min(1.0, waits_s / (share * iteration_s)) if share > 0.0 else 0.0,
        communication=min(1.0, collectives_s / iteration_s),
        memory=memory,
        source=source,
        label=label,
    )
