"""An iteration as a device sees it: arrays of FLOPs, bytes and times that no clock changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kilter.core.trace import IterationTrace, Kind
from kilter.device.sim.profile import Profile
from kilter.model.power import Power
from kilter.model.roofline import Array, Roofline

CLOCKLESS = (Kind.GAP, Kind.DATA_WAIT, Kind.COPY, Kind.COLLECTIVE)
"""Operations of these kinds keep the time they have in the trace: the host or a link decides it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One iteration. Compared and hashed by identity."""

    flops: Array
    """It has them per operation, as the roofline's time needs them: a kernel that reaches half of
    the peak counts double."""
    bytes_moved: Array
    floor_s: Array
    """The host takes this for the launches: an operation takes at least this."""
    fixed_s: float
    """Everything that no clock changes takes this."""
    switched_flops: float
    """The whole iteration has so many, as its energy needs them."""
    switched_bytes: float

    def __post_init__(self) -> None:
        if not self.fixed_s + np.sum(self.floor_s) + np.sum(self.flops + self.bytes_moved) > 0:
            raise ValueError("an iteration without any work takes no time and cannot be simulated")

    def scaled(self, flops_factor: float, bytes_factor: float) -> Work:
        """More or less of the same work; the host's part stays."""
        return replace(
            self,
            flops=self.flops * flops_factor,
            bytes_moved=self.bytes_moved * bytes_factor,
            switched_flops=self.switched_flops * flops_factor,
            switched_bytes=self.switched_bytes * bytes_factor,
        )


def work_of(trace: IterationTrace, profile: Profile) -> Work:
    """The work in a trace, as a device of this profile runs it.

    On a host's timeline an operation's time says nothing about the device, so its FLOPs, bytes and
    kernels alone count. On a GPU's timeline its time is a measurement: the work is stretched so
    that the device takes exactly that time at its default clocks, unless a limit holds it
    below them; FLOPs and bytes only say which clock it follows. An operation of which neither is
    known follows the SM clock there, so that a planner is not led to savings by ignorance.
    """
    roofline, sm_hz, memory_hz = profile.roofline, *profile.knobs.default_hz
    ops = [op for op in trace.operations if op.kind not in CLOCKLESS]
    fixed = [op for op in trace.operations if op.kind in CLOCKLESS]
    flops = np.array([op.flops or 0.0 for op in ops])
    moved = np.array([op.bytes_moved or 0.0 for op in ops])
    floor_s = np.array([op.kernels * roofline.launch_s for op in ops])
    switched_flops, switched_bytes = flops, moved
    if trace.timeline == "gpu":
        measured_s = np.array([op.duration_s for op in ops])
        unknown = (flops == 0) & (moved == 0)
        flops = np.where(unknown, roofline.flops_per_cycle * sm_hz * measured_s, flops)
        model_s = roofline.busy_s(flops, moved, sm_hz, memory_hz)
        stretch = np.divide(measured_s, model_s, out=np.zeros_like(model_s), where=model_s > 0)
        flops, moved, floor_s = flops * stretch, moved * stretch, np.zeros_like(floor_s)
        # A kernel slower than the roofline switches no more than it has to do, and none switches
        # more per second than the device can: a trace may come from a faster one.
        switched_flops = np.minimum(flops, switched_flops)
        switched_bytes = np.minimum(moved, switched_bytes)
    through_memory = (
        op.bytes_moved or 0.0 for op in fixed if op.kind in (Kind.COPY, Kind.COLLECTIVE)
    )
    return Work(
        flops=flops,
        bytes_moved=moved,
        floor_s=floor_s,
        fixed_s=sum(op.duration_s for op in fixed),
        switched_flops=float(np.sum(switched_flops)),
        switched_bytes=float(np.sum(switched_bytes)) + sum(through_memory),
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
    busy_s = float(np.sum(busy))
    time_s = float(np.sum(np.maximum(work.floor_s, busy))) + work.fixed_s
    waiting_j = time_s * power.waiting_w(sm_hz, memory_hz, temperature_c)
    work_j = power.work_j(work.switched_flops, work.switched_bytes, busy_s, sm_hz)
    return Cost(
        time_s=time_s,
        energy_j=float(waiting_j + work_j),
        busy_s=busy_s,
        memory_s=float(np.sum(work.bytes_moved) / roofline.bandwidth(sm_hz, memory_hz)),
    )


def default_cost(work: Work, profile: Profile) -> Cost:
    """At the clocks that a device of this profile has by default."""
    sm_hz, memory_hz = profile.knobs.default_hz
    return cost_of(work, profile.roofline, profile.power, sm_hz=sm_hz, memory_hz=memory_hz)
