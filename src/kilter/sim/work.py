"""An iteration as a device sees it: arrays of FLOPs, bytes and times that no clock changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kilter.core.trace import IterationTrace, Kind
from kilter.model.power import Power
from kilter.model.roofline import Array, Quantity, Roofline

CLOCKLESS = (Kind.GAP, Kind.DATA_WAIT, Kind.COPY, Kind.COLLECTIVE)
"""Kinds that keep the time they have in the trace: the host or a link decides it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One iteration, one entry per operation. Compared and hashed by identity."""

    flops: Array
    bytes_moved: Array
    floor_s: Array
    """Host time of the launches: an operation takes at least this."""
    fixed_s: float
    """Time of everything that no clock changes."""
    fixed_bytes: float
    """Bytes that copies and collectives move through the memory in that time."""
    activity: float = 1.0
    """Switching per FLOP relative to the device's own benchmark (see `Power.work_j`)."""

    def __post_init__(self) -> None:
        if not self.fixed_s + np.sum(self.floor_s) + np.sum(self.flops + self.bytes_moved) > 0:
            raise ValueError("an iteration without any work takes no time and cannot be simulated")

    def scaled(self, flops_factor: float, bytes_factor: float) -> Work:
        """More or less of the same work; the host's part stays."""
        return replace(
            self, flops=self.flops * flops_factor, bytes_moved=self.bytes_moved * bytes_factor
        )


def work_of(trace: IterationTrace, roofline: Roofline, *, sm_hz: float, memory_hz: float) -> Work:
    """The work in a trace.

    On a host's timeline an operation's time says nothing about the device, so its FLOPs, bytes and
    kernels alone count. On a GPU's timeline its time is a measurement: the work is scaled so that
    the device takes exactly that time at the given (default) clocks, and FLOPs and bytes only say
    which clock it follows. An operation of which neither is known follows the SM clock there, so
    that a planner is not led to savings by ignorance.
    """
    ops = [op for op in trace.operations if op.kind not in CLOCKLESS]
    fixed = [op for op in trace.operations if op.kind in CLOCKLESS]
    flops = np.array([op.flops or 0.0 for op in ops])
    bytes_moved = np.array([op.bytes_moved or 0.0 for op in ops])
    floor_s = np.array([op.kernels * roofline.launch_s for op in ops])
    if trace.timeline == "gpu":
        measured_s = np.array([op.duration_s for op in ops])
        unknown = (flops == 0) & (bytes_moved == 0)
        flops = np.where(unknown, measured_s * sm_hz * roofline.flops_per_cycle, flops)
        model_s = roofline.busy_s(flops, bytes_moved, sm_hz, memory_hz)
        scale = np.divide(measured_s, model_s, out=np.zeros_like(model_s), where=model_s > 0)
        flops, bytes_moved, floor_s = flops * scale, bytes_moved * scale, np.zeros_like(floor_s)
    return Work(
        flops=flops,
        bytes_moved=bytes_moved,
        floor_s=floor_s,
        fixed_s=sum(op.duration_s for op in fixed),
        fixed_bytes=sum(
            op.bytes_moved or 0.0 for op in fixed if op.kind in (Kind.COPY, Kind.COLLECTIVE)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one iteration at fixed clocks."""

    time_s: float
    energy_j: float
    busy_s: float
    """A kernel is resident."""
    memory_s: float
    """The memory alone would take this long."""

    @property
    def power_w(self) -> float:
        return self.energy_j / self.time_s


def cost_of(
    work: Work,
    roofline: Roofline,
    power: Power,
    *,
    sm_hz: float,
    memory_hz: float,
    temperature_c: float | None = None,
) -> Cost:
    """Time and energy of one iteration, summed over its operations."""
    busy = roofline.busy_s(work.flops, work.bytes_moved, sm_hz, memory_hz)
    work_s = float(np.sum(np.maximum(work.floor_s, busy)))
    busy_s = float(np.sum(busy))
    moved = float(np.sum(work.bytes_moved))
    flops = float(np.sum(work.flops))
    time_s = work_s + work.fixed_s
    waiting_j = time_s * power.waiting_w(sm_hz, memory_hz, temperature_c)
    work_j = power.work_j(flops, moved, busy_s, sm_hz, activity=work.activity)
    energy_j: Quantity = waiting_j + work_j + power.joule_per_byte * work.fixed_bytes
    return Cost(
        time_s=time_s,
        energy_j=float(energy_j),
        busy_s=busy_s,
        memory_s=moved / float(roofline.bandwidth(sm_hz, memory_hz)),
    )
