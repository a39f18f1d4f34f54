"""What bounds a job: the reason why a clock helps or does not, from what its run recorded.

The order of the rules is the order of the causes. A GPU that waits for copies, is throttled or has
nothing to do says nothing about its kernels; only a busy one is bound by communication, by memory
or by compute. Where the record does not tell, the answer is unknown. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kilter.app.report.evidence import Probe
from kilter.app.report.idle import DENSE, LEAN, Idle
from kilter.app.report.memory import MemoryReport
from kilter.app.report.section_run import SectionsReport
from kilter.clocks.plan.job_class import (
    FEWEST_READINGS,
    FOLLOWS,
    HELD_DOWN,
    IDLE_TOLD,
    IGNORES,
    Bound,
)
from kilter.core.events import Block, Sampled
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo, Setting, Throttle
from kilter.core.units import show_clock
from kilter.model.intervals import union
from kilter.model.stats import mean_of_known


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClass:
    """What bounds a job, and how that is known."""

    name: Bound
    evidence: str
    label: Label | None
    """Where the evidence comes from; None where there is none."""
    share: float | None = None
    """What the evidence measures, between 0 and 1: of the time, of the readings, or of a change of
    the clock that the time follows."""


STALLED_SHARE = 0.1
"""Share of an iteration in waits for copies from which on offloading bounds the job."""
COMMUNICATES = 0.2
"""With less than this share of an iteration in exposed communication, other things bound the job
more."""
UNIT_BOUND = 0.6
"""A unit bounds the work from this share of its peak on (the guide of NVIDIA Nsight Compute)."""
LOWER_CLOCK = 0.95
"""A clock nearer to the default's than this share cannot be told from noise."""

_LIMITS = {
    Throttle.POWER_CAP.value: "its power cap",
    Throttle.THERMAL.value: "its temperature",
    Throttle.HARDWARE.value: "its hardware",
}


def job_class(
    *,
    device: DeviceInfo,
    label: Label,
    idle: Idle | None,
    samples: Sequence[Sampled],
    blocks: Sequence[Block],
    probes: Sequence[Probe],
    found: Setting,
    memory: MemoryReport | None,
    sections: SectionsReport | None,
) -> JobClass:
    """The first class whose evidence is there. `label` is that of the blocks' times."""
    default = _at_default(samples, blocks, found)
    return (
        _offloading(memory)
        or _throttled(default, device.label)
        or _starved(idle)
        or _communication(idle, sections)
        or _clock(idle, probes, default, found, label)
        or _by_units(default, device.label)
        or _modelled(idle)
        or _by_intensity(idle)
        or JobClass(name=Bound.UNKNOWN, evidence=_why_unknown(device, idle, blocks), label=None)
    )


def _at_default(
    samples: Sequence[Sampled], blocks: Sequence[Block], found: Setting
) -> list[Sampled]:
    """Readings within blocks under the found setting."""
    windows = union(
        (block.device_begin_s, block.device_end_s) for block in blocks if block.setting == found
    )
    found_in, place = [], 0
    for sample in sorted(samples, key=lambda sample: sample.device_t_s):
        while place < len(windows) and windows[place][1] < sample.device_t_s:
            place += 1
        if place < len(windows) and windows[place][0] <= sample.device_t_s:
            found_in.append(sample)
    return found_in


def _offloading(memory: MemoryReport | None) -> JobClass | None:
    if memory is None or memory.plan is None or not memory.record.out_bytes:
        return None
    record, plan = memory.record, memory.plan
    if record.backend == "cuda" and record.waited_s is not None and record.iteration_s:
        share, label = record.waited_s / record.iteration_s, Label.MEASURED
    elif plan.iteration_s > 0.0:
        share, label = plan.stall_s / plan.iteration_s, Label.SIMULATED
    else:
        return None
    if share < STALLED_SHARE:
        return None
    share = min(1.0, share)
    text = f"the GPU waits for copies to and from the host {_percent(share)} of an iteration"
    return JobClass(name=Bound.OFFLOADING, evidence=text, label=label, share=share)


def _throttled(default: Sequence[Sampled], label: Label) -> JobClass | None:
    reasons = [sample.throttle for sample in default if sample.throttle is not None]
    if len(reasons) < FEWEST_READINGS:
        return None
    counts = {name: sum(name in each for each in reasons) for name in _LIMITS}
    name = max(counts, key=lambda name: counts[name])
    share = counts[name] / len(reasons)
    if share < HELD_DOWN:
        return None
    clock = _mean_clock(default)
    at = "" if clock is None else f", at {show_clock(clock)} on average"
    text = (
        f"{_LIMITS[name]} holds the clock down in {_percent(share)} of {len(reasons)} readings at "
        f"the default{at}"
    )
    return JobClass(name=Bound.THROTTLED, evidence=text, label=label, share=share)


def _starved(idle: Idle | None) -> JobClass | None:
    if idle is None or idle.share < IDLE_TOLD:
        return None
    idles = "would idle" if idle.label is Label.SIMULATED else "idles"
    text = f"the GPU {idles} {_percent(idle.share)} of the time"
    waits = idle.waits_for_data
    if waits is not None and waits > 0.5:
        text += f", and the program waits for its data in {_percent(waits)} of that"
        name = Bound.INPUT
    else:
        name = Bound.IDLE
    return JobClass(name=name, evidence=f"{text}: feed it", label=idle.label, share=idle.share)


def _communication(idle: Idle | None, sections: SectionsReport | None) -> JobClass | None:
    if sections is not None:
        share, label = max(r.sections.exposed_share for r in sections.ranks), Label.MEASURED
    elif idle is not None and idle.communication is not None:
        share, label = idle.communication, idle.label
    else:
        return None
    if share < COMMUNICATES:
        return None
    text = f"exposed communication takes {_percent(share)} of an iteration"
    return JobClass(name=Bound.COMMUNICATION, evidence=text, label=label, share=share)


def _clock(
    idle: Idle | None,
    probes: Sequence[Probe],
    default: Sequence[Sampled],
    found: Setting,
    label: Label,
) -> JobClass | None:
    """How the time of a busy GPU follows the SM clock, as blocks at a lower one have shown."""
    top_hz = found.sm_clock_hz or _mean_clock(default)
    if top_hz is None:
        return None
    tried = [
        (probe.setting.sm_clock_hz, probe.time_ratio)
        for probe in probes
        if probe.setting.sm_clock_hz is not None
        and probe.setting == found.with_(sm_clock_hz=probe.setting.sm_clock_hz)
        and 0.0 < probe.setting.sm_clock_hz <= LOWER_CLOCK * top_hz
    ]
    if not tried:
        return None
    clock_hz, time_ratio = min(tried)
    follows = math.log(time_ratio) / math.log(top_hz / clock_hz)
    text = (
        f"{_percent(1.0 - clock_hz / top_hz)} less SM clock changes the time of an iteration by "
        f"{100 * (time_ratio - 1.0):+.1f} %"
    )
    share = min(1.0, max(0.0, follows))
    if follows >= FOLLOWS:
        return JobClass(name=Bound.COMPUTE, evidence=text, label=label, share=share)
    if follows <= IGNORES and idle is not None:  # else the GPU may be idle, and not busy
        text += ", and the GPU is busy"
        return JobClass(name=Bound.MEMORY, evidence=text, label=label, share=share)
    return None


def _by_units(default: Sequence[Sampled], label: Label) -> JobClass | None:
    """The busiest unit, on GPUs that tell how busy each is."""
    known = [sample.activity for sample in default if sample.activity is not None]
    units = (
        (Bound.MEMORY, "memory's bandwidth is used", [unit.dram for unit in known]),
        (Bound.COMPUTE, "tensor pipes' cycles are used", [unit.tensor for unit in known]),
    )
    rows = []
    for name, what, values in units:
        shares = [share for share in values if share is not None]
        if len(shares) >= FEWEST_READINGS:
            rows.append((statistics.fmean(shares), name, f"of the {what}, by the GPU's counters"))
    if not rows:
        return None
    share, name, text = max(rows, key=lambda row: row[0])
    if share < UNIT_BOUND:
        return None
    return JobClass(name=name, evidence=f"{_percent(share)} {text}", label=label, share=share)


def _modelled(idle: Idle | None) -> JobClass | None:
    if idle is None or idle.memory is None:
        return None
    text = f"the memory alone would take {_percent(idle.memory)} of the busy time"
    name = Bound.MEMORY if idle.memory >= 0.5 else Bound.COMPUTE
    return JobClass(name=name, evidence=text, label=idle.label, share=idle.memory)


def _by_intensity(idle: Idle | None) -> JobClass | None:
    """What bounds most of the busy time on any GPU, where no clock could be tried."""
    if idle is None or idle.lean is None or idle.dense is None:
        return None
    rows = ((Bound.MEMORY, idle.lean, "below", LEAN), (Bound.COMPUTE, idle.dense, "above", DENSE))
    name, share, side, limit = max(rows, key=lambda row: row[1])
    if share < 0.5:
        return None
    text = (
        f"{_percent(share)} of the busy time is in operations {side} {limit:g} FLOP per byte, and "
        "no lower SM clock is on record"
    )
    return JobClass(name=name, evidence=text, label=idle.label, share=share)


def _why_unknown(device: DeviceInfo, idle: Idle | None, blocks: Sequence[Block]) -> str:
    if device.backend == "null":
        return "no GPU was seen"
    if not blocks:
        return "no block of iterations is on record"
    if idle is None:
        return "no trace could be read, and no utilisation of the GPU in a block is on record"
    if idle.lean is not None and idle.dense is not None:
        return (
            "the GPU is busy, no lower SM clock is on record, and neither operations below "
            f"{LEAN:g} FLOP per byte ({_percent(idle.lean)} of the busy time) nor above {DENSE:g} "
            f"({_percent(idle.dense)}) prevail"
        )
    return "the GPU is busy, and no lower SM clock on record tells with what"


def _mean_clock(samples: Sequence[Sampled]) -> float | None:
    return mean_of_known(sample.sm_clock_hz or None for sample in samples)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
