"""What a run says in words: one line at the start, a few at the end, more on request.

Plain ASCII without colour: it goes to logs as often as to terminals, and what a script or a device
is called must not reach a terminal as control characters.
"""

from __future__ import annotations

import math
from pathlib import Path

from kilter.app.report import footprint, glossary, operation_run, section_run
from kilter.app.report import memory as memory_report
from kilter.app.report.bound import JobClass
from kilter.app.report.build import Report
from kilter.app.report.evidence import Arm, Probe
from kilter.app.report.memory import MemoryReport
from kilter.app.report.operations import OperationEnergy
from kilter.app.report.words import STAND_IN, Finding, allowed, ascii_line, wish
from kilter.clocks.plan.job_class import Bound
from kilter.core.events import Operated
from kilter.core.label import Label
from kilter.core.plan import ClocksMode
from kilter.core.reasons import CLOCKS_REFUSED, REHEARSAL_CUT
from kilter.core.trace import TraceFeatures
from kilter.core.units import (
    KWH_J,
    show_count,
    show_duration,
    show_energy,
    show_fraction,
    show_time,
)
from kilter.observe.sensor_record import DISAGREEMENT

NOTHING_SET = "nothing was set"
ACTED_ON = (Bound.INPUT, Bound.IDLE, Bound.THROTTLED, Bound.COMMUNICATION)
"""Jobs of these classes call for something else than the clocks: that is said at the end of a run
as well."""


def summary(report: Report, run_dir: str | Path | None) -> str:
    """The few lines at the end of a run; `run_dir` is None where no record of it is kept."""
    lines = inside(report)
    if not by_inside(report):
        lines += [headline(report), ending(report)]
    if report.blocks and report.goal.max_slowdown is not None:
        lines.insert(1, f"evidence: {evidence(report)}")
    if report.memory is not None:
        lines = _memory_lines(report, report.memory, lines)
    elif report.unseen is not None:
        lines = [headline(report)]
    if report.job.name in ACTED_ON:
        lines.insert(0, str(bound(report)))
    lines += [f"warning: {warning}" for warning in warnings(report)]
    lines += [f"refused: {refusal.what}: {refusal.reason}" for refusal in report.refused]
    lines += [f"an error of ours, {e.where}: {e.error}" for e in report.errors[:_MOST_ERRORS]]
    if (step := next_step(report)) is not None:
        lines.append(f"next: {step}")
    if run_dir is not None:
        page = Path(run_dir) / "report.html"
        words = ", ".join(glossary.used(" ".join(lines)))
        if page.exists() and words:
            lines.append(f"words: the end of the page explains {words}")
        lines.append(f"report: {page if page.exists() else f'kilter report {run_dir}'}")
    return "\n".join(f"kilter: {ascii_line(line)}".rstrip() for line in lines)


_MOST_ERRORS = 3


def _memory_lines(report: Report, memory: MemoryReport, clocks: list[str]) -> list[str]:
    """What became of memory, and after it the lines of the clocks, where they were asked for."""
    told = memory_report.lines(memory)
    if report.goal.max_slowdown is not None:
        return told + clocks
    if report.unseen is not None and memory.record.budget_bytes is None:
        return [*told, report.unseen]  # a share is taken after some iterations
    return told


def inside(report: Report) -> list[str]:
    """Of clocks inside the iteration; empty where nobody looked for any. What became of the whole
    job's clock stands below, where that was taken in their place."""
    simulated = any(device.backend == "sim" for device in report.devices)
    if (told := report.operation_clocks) is not None:
        return [
            operation_run.headline(told, simulated=simulated),
            *operation_run.details(told, simulated=simulated),
        ]
    if report.sections is None:
        return []
    return [
        section_run.headline(report.sections, simulated=simulated),
        *section_run.details(report.sections, simulated=simulated),
    ]


def by_inside(report: Report) -> bool:
    """Whether the clocks were those of sections or of operations, and not one clock for the whole
    job after all."""
    found = report.operation_clocks or report.sections
    return found is not None and found.instead is None


def full(report: Report) -> str:
    """The text of `kilter report`."""
    label = report.label.value
    stand_in = report.memory is not None and report.memory.record.backend == "stand-in"
    alone = stand_in and report.goal.max_slowdown is None
    lines = [
        f"class    {bound(report)}",
        f"run      {report.run}: {' '.join(report.command)}",
        f"took     {whole_run(report)}",
        f"on       {machine(report)}",
        f"device   {STAND_IN if alone else plain_name(report.device)} [{label}]; {report.ranks}",
        f"goal     {wish(report.goal)}",
    ]
    if report.memory is not None:
        lines.append(memory_report.headline(report.memory).replace("memory:", "memory  "))
        lines += [f"  {name:<12} {text}" for name, text in memory_report.details(report.memory)]
    if report.memory is None or report.goal.max_slowdown is not None:
        lines += _clock_lines(report)
    if report.footprint is not None:
        lines.append(f"bill     {footprint.sentence(report.footprint)}")
    lines += [f"warning  {warning}" for warning in warnings(report)]
    if report.mode != ClocksMode.GOVERN:
        lines.append(f"mode     {report.mode}: {report.mode_reason}")
    lines += [f"refused  {refusal.what}: {refusal.reason}" for refusal in report.refused]
    lines += [f"error    {failure.where}: {failure.error}" for failure in report.errors]
    if (step := next_step(report)) is not None:
        lines.append(f"next     {step}")
    if report.probes:
        lines += ["", f"settings tried, relative to the default [{label}]:"]
        lines += [f"  {_probe(probe)}" for probe in report.probes]
    if report.features is not None:
        lines += ["", f"one iteration: {use(report.features)} [{report.features.label.value}]"]
    if report.operations:
        lines += ["", f"energy of one iteration, {report.operations_method}:"]
        lines += [_operation(op) for op in report.operations[:_MOST_OPERATIONS]]
    return "\n".join(ascii_line(line).rstrip() for line in lines)


def _clock_lines(report: Report) -> list[str]:
    told = inside(report)
    if by_inside(report):
        return told
    base, ours = report.baseline, report.governed
    lines = [*told, f"result   {headline(report)}"]
    if base.iteration_s is not None:
        lines.append(f"default  {per_iteration(base)}")
    if ours.iteration_s is not None and report.choice.setting != report.found:
        lines.append(f"governed {per_iteration(ours)}")
    if report.blocks:
        lines.append(f"evidence {evidence(report)}")
    lines.append(f"end      {ending(report)}")
    if report.energy_method is None:
        lines.append("energy   measured by unknown means: the record has no end")
    elif report.energy_method == "none":
        lines.append("energy   not measured")
    else:
        lines.append(f"energy   by {report.energy_method}")
    return lines


def per_iteration(arm: Arm) -> str:
    """`84.0 ms, 21.2 J per iteration`; without the energy where it is not known."""
    energy = "" if arm.energy_j is None else f", {show_energy(arm.energy_j)}"
    return f"{show_time(arm.iteration_s)}{energy} per iteration"


def _operation(op: OperationEnergy) -> str:
    return (
        f"  {show_fraction(op.share):>7}  {show_energy(op.energy_j):>8}  {counted(op)} ({kind(op)})"
    )


def whole_run(report: Report) -> str:
    """`400 iterations in 12.3 s, 3.42 kJ (0.0010 kWh) with everything around them`."""
    text = (
        f"{show_count(report.iterations, 'timed iteration')} in {show_duration(report.duration_s)}"
    )
    if report.energy_j is not None:
        text += f", {show_energy(report.energy_j)} ({report.energy_j / KWH_J:.2g} kWh)"
        text += " on the device, with everything around the iterations"
    return text


def machine(report: Report) -> str:
    """Host, versions and the configuration file, as far as the record knows them."""
    known = (("", report.host), ("torch ", report.torch), ("driver ", report.driver))
    facts = [f"{name}{value}" for name, value in known if value is not None]
    options = [] if report.config is None else [f"options of {report.config}"]
    return ", ".join([*facts, f"kilter {report.kilter}", report.wall_time, *options])


def plain_name(device: str) -> str:
    """Without the word that the label beside it says again."""
    return device.removesuffix(" (simulated)")


_MOST_OPERATIONS = 10


def counted(operation: OperationEnergy) -> str:
    """The name of an operation, with how many of them there are."""
    return operation.name if operation.names == 1 else f"{operation.name} x {operation.names}"


def kind(operation: OperationEnergy) -> str:
    """What an operation does, in words."""
    return "device idle" if operation.kind == "gap" else operation.kind.replace("_", " ")


def use(features: TraceFeatures) -> str:
    """How an iteration uses the GPU, by its trace."""
    intensity = features.flop_per_byte
    return (
        f"{features.kernels_per_s:,.0f} kernels per second; the GPU idles "
        f"{show_fraction(features.host_gap)} of the time; exposed communication takes "
        f"{show_fraction(features.exposed_communication)}"
        + ("" if intensity is None else f"; {intensity:.3g} FLOP per byte")
    )


def bound(report: Report) -> Finding:
    """What bounds the job, with the evidence."""
    job = report.job
    label = "" if job.label is None else job.label.value
    if job.name is Bound.UNKNOWN:
        return Finding(f"the class of the job is unknown: {job.evidence}", label)
    return Finding(f"{job.name.value}: {job.evidence}", label)


def next_step(report: Report) -> str | None:
    """What to do where nothing was saved, or only on paper; None where there is nothing to do."""
    persistent = any(device.persistent for device in report.devices)
    if persistent and report.restored is False:
        return "run: kilter restore"
    if persistent and report.restored is None and report.mode == ClocksMode.GOVERN:
        return "the watcher puts the GPU back; to be sure: kilter restore"
    if report.unseen is not None or report.goal.max_slowdown is None or report.errors:
        return None
    failed = report.outcome not in (None, "finished", "raised KeyboardInterrupt")
    if failed and report.slowdown is None:
        return "mend the script, then run it again"
    if report.job.name in (Bound.INPUT, Bound.IDLE):
        return _how_to_feed(report.job)
    simulated = any(device.backend == "sim" for device in report.devices)
    codes = {refusal.code for refusal in report.refused}
    if REHEARSAL_CUT in codes and simulated:
        return "give the rehearsal more time: --rehearse 60s"
    if report.mode == ClocksMode.SHADOW and not simulated and CLOCKS_REFUSED in codes:
        return "kilter doctor says how to allow it"
    if simulated and report.saving:
        return "run it so on a real GPU: nothing is saved on a simulated one"
    return None


def _how_to_feed(job: JobClass) -> str:
    if job.name is Bound.INPUT:
        return "feed the GPU: the program waits for its data (more loader workers, prefetching)"
    return "feed the GPU: larger batches, torch.compile or CUDA graphs, data loaded ahead"


def warnings(report: Report) -> list[str]:
    """What to know before the report is relied on."""
    doubts = doubt(report)
    return [*report.unread, *([] if doubts is None else [doubts])]


def doubt(report: Report) -> str | None:
    """A warning if the two ways to measure energy do not agree."""
    apart = report.energy_disagreement
    if apart is None or abs(apart) <= DISAGREEMENT:
        return None
    return (
        f"the integral of power is {apart:+.1%} off the energy counter: "
        "one of them is wrong by as much; savings, which are ratios, suffer less"
    )


def headline(report: Report) -> str:
    """What came of it, in one sentence with intervals, contract and label."""
    return str(result(report))


def result(report: Report) -> Finding:
    """What came of it."""
    label = report.label.value
    if report.unseen is not None:
        return Finding(report.unseen)
    found = report.operation_clocks or report.sections
    if found is not None and by_inside(report):
        simulated = report.label is Label.SIMULATED or found.search is None
        label = Label.SIMULATED.value if simulated else label
        if isinstance(found, Operated):
            return Finding(operation_run.answer(found), label)
        return Finding(section_run.answer(found), label)
    if report.goal.max_slowdown is None and report.goal.memory_budget is not None:
        return Finding(_no_memory_record(report))
    if report.saving is None and report.slowdown is None:
        return _without_result(report)
    if report.choice.setting == report.found:
        return Finding(report.choice.reason, label)
    slowdown = f"slowdown {show_fraction(report.slowdown)}{interval(report.slowdown_ci95)}"
    if report.saving is None:
        return Finding(f"energy unknown, {slowdown}, {verdict(report)}", label)
    saving = f"{show_fraction(report.saving)} energy{interval(report.saving_ci95)}"
    verb = "saved" if happened(report) else "would save"
    return Finding(f"{verb} {saving}, {slowdown}, {verdict(report)}", label)


def happened(report: Report) -> bool:
    """The saving was had: on a real device, under a setting that was held. What was rehearsed on a
    simulated device would be saved."""
    return report.kept and report.label is Label.MEASURED


def _no_memory_record(report: Report) -> str:
    if report.outcome is None:
        return "what became of the memory budget is not on record: the record has no end"
    return "memory was left alone"


def _without_result(report: Report) -> Finding:
    label = report.label.value
    if report.prediction is not None and report.choice.state == "predicted":
        expected = report.prediction
        energy = show_fraction(less_one(expected.energy_ratio), signed=True)
        time = show_fraction(expected.time_ratio - 1.0, signed=True)
        setting = "; ".join(expected.actions) or "the default"
        text = f"nothing was set; plan: {setting}, {energy} energy, {time} time"
        return Finding(text, f"predicted, {expected.label.value}")
    if report.mode == ClocksMode.OBSERVE and report.choice.state == "undecided":
        return Finding(f"only watched: {_watched(report)}", label)
    return Finding(f"no result: {report.choice.reason}", label)


def _watched(report: Report) -> str:
    count = show_count(report.iterations, "timed iteration")
    if report.baseline.iteration_s is None:
        return count
    return f"{count} of {show_time(report.baseline.iteration_s)}"


def verdict(report: Report) -> str:
    """The contract, and where the interval of the slowdown lies."""
    if report.contract is None:
        return "no contract"
    terms = f"the contract of {allowed(report.contract)}"
    if report.slowdown_ci95 is None:
        return terms
    if report.within_contract is None:
        return f"the interval reaches beyond {terms}"
    return f"all of it {'within' if report.within_contract else 'beyond'} {terms}"


def interval(ends: tuple[float, float] | None) -> str:
    """` (95 %: 11.9 to 13.0 %)`, or that there is none."""
    if ends is None or not all(map(math.isfinite, ends)):
        return " (no interval)"
    return f" (95 %: {show_fraction(ends[0]).removesuffix(' %')} to {show_fraction(ends[1])})"


def evidence(report: Report) -> str:
    """How much the numbers rest on."""
    e = report.evidence
    if not e.pairs:
        text = f"no pairs, {show_count(len(report.blocks), 'block')}"
    else:
        text = f"{show_count(e.pairs, 'pair')} of blocks, {show_count(e.iterations, 'iteration')}"
    if report.rehearsed_share > 0.0:
        text += f" ({report.rehearsed_share * 100:.0f} % rehearsed after the script had ended)"
    if e.left_out:
        reasons = ", ".join(f"{count} {why}" for why, count in e.left_out.items())
        text += f"; blocks left out: {reasons}"
    return text


def ending(report: Report) -> str:
    """What was held, and whether the found setting is back."""
    if report.mode != ClocksMode.GOVERN and report.restored:
        return NOTHING_SET
    asked = {block.setting for block in report.blocks}
    if report.mode == ClocksMode.GOVERN:  # a block under it may never have come to its end
        asked |= {d.setting for d in report.decisions if d.state != "predicted"}
    if asked <= {report.found} and report.restored:
        return NOTHING_SET
    held = "held the default"
    if report.kept:
        held = f"held {report.choice.setting} ({report.choice.reason})"
    if any(device.backend == "sim" for device in report.devices):
        held = f"on the simulated device: {held}"
    if report.restored:
        return f"{held}; {report.found} restored"
    end = f"{report.found} NOT restored"
    if report.restored is None:
        end = "no end on record: its process still runs, or was killed or terminated"
    return f"{held}; {end}"


def _probe(probe: Probe) -> str:
    time = show_fraction(probe.time_ratio - 1.0, signed=True)
    energy = show_fraction(less_one(probe.energy_ratio), signed=True)
    mark = "*" if probe.chosen else " "
    return (
        f"{mark} {probe.setting!s:<32} {probe.phase:<8} time {time:>8}  energy {energy:>8}  "
        f"{show_count(probe.pairs, 'pair')}"
    )


def less_one(ratio: float | None) -> float | None:
    """A ratio to the default as a change."""
    return None if ratio is None else ratio - 1.0
