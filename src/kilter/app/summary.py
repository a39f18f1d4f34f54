"""What a run says in words: one line at the start, a few at the end, more on request.

Plain ASCII without colour: it goes to logs as often as to terminals, and what a script or a device
is called must not reach a terminal as control characters.
"""

from __future__ import annotations

import math
from pathlib import Path

from kilter.app import memory_report
from kilter.app.evidence import Probe
from kilter.app.opening import STAND_IN, allowed, ascii_line, wish
from kilter.app.operations import OperationEnergy
from kilter.app.report import Report
from kilter.core.units import show_count, show_energy, show_fraction, show_time
from kilter.observe.sampler import DISAGREEMENT


def summary(report: Report, run_dir: str | Path) -> str:
    """The few lines at the end of a run."""
    lines = [headline(report), ending(report)]
    if report.blocks:
        lines.insert(1, f"evidence: {evidence(report)}")
    if report.memory is not None:
        told = [f"{name}: {text}" for name, text in memory_report.details(report.memory)]
        told.insert(0, memory_report.headline(report.memory))
        lines = told if report.goal.max_slowdown is None else told + lines
    if (doubts := doubt(report)) is not None:
        lines.append(f"warning: {doubts}")
    lines += [f"refused: {refusal.what}: {refusal.reason}" for refusal in report.refused]
    lines += [f"an error of ours, {e.where}: {e.error}" for e in report.errors[:_MOST_ERRORS]]
    page = Path(run_dir) / "report.html"
    lines.append(f"report: {page if page.exists() else f'kilter report {run_dir}'}")
    return "\n".join(f"kilter: {ascii_line(line)}" for line in lines)


_MOST_ERRORS = 3


def full(report: Report) -> str:
    """The text of `kilter report`."""
    label = report.label.value
    base, ours = report.baseline, report.governed
    stand_in = report.memory is not None and report.memory.backend == "stand-in"
    lines = [
        f"run      {report.run}: {' '.join(report.command)}",
        f"device   {STAND_IN if stand_in else report.device} [{label}]; {report.ranks}",
        f"goal     {wish(report.goal)}",
    ]
    if report.memory is not None:
        lines.append(memory_report.headline(report.memory).replace("memory:", "memory  "))
        lines += [f"  {name:<12}{text}" for name, text in memory_report.details(report.memory)]
    clocks = [
        f"result   {headline(report)}",
        f"default  {show_time(base.iteration_s)}, {show_energy(base.energy_j)} per iteration",
        f"governed {show_time(ours.iteration_s)}, {show_energy(ours.energy_j)} per iteration",
        f"evidence {evidence(report)}",
        f"end      {ending(report)}",
        f"energy   by {report.energy_method or 'unknown means (no end on record)'}",
    ]
    if report.memory is None or report.goal.max_slowdown is not None:
        lines += clocks
    if (doubts := doubt(report)) is not None:
        lines.append(f"warning  {doubts}")
    if report.mode != "govern":
        lines.append(f"mode     {report.mode}: {report.mode_reason}")
    lines += [f"refused  {refusal.what}: {refusal.reason}" for refusal in report.refused]
    lines += [f"error    {failure.where}: {failure.error}" for failure in report.errors]
    if report.probes:
        lines += ["", f"settings tried, relative to the default [{label}]:"]
        lines += [f"  {_probe(probe)}" for probe in report.probes]
    if report.operations:
        lines += ["", f"energy of one iteration, {report.operations_method}:"]
        for op in report.operations[:_MOST_OPERATIONS]:
            lines.append(
                f"  {show_fraction(op.share):>7}  {show_energy(op.energy_j):>8}  "
                f"{counted(op)} ({kind(op)})"
            )
    return "\n".join(ascii_line(line) for line in lines)


_MOST_OPERATIONS = 10


def counted(operation: OperationEnergy) -> str:
    """The name of an operation, with how many of them there are."""
    return operation.name if operation.names == 1 else f"{operation.name} x {operation.names}"


def kind(operation: OperationEnergy) -> str:
    """What an operation does, in words."""
    return "device idle" if operation.kind == "gap" else operation.kind.replace("_", " ")


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
    label = f"[{report.label.value}]"
    if report.goal.max_slowdown is None and report.goal.memory_budget is not None:
        return f"memory was left alone {label}"
    if report.saving is None and report.slowdown is None:
        if report.prediction is not None and report.choice.state == "predicted":
            expected = report.prediction
            energy = show_fraction(less_one(expected.energy_ratio), signed=True)
            time = show_fraction(expected.time_ratio - 1.0, signed=True)
            setting = "; ".join(expected.actions) or "the default"
            return (
                f"nothing was set; plan: {setting}, {energy} energy, {time} time "
                f"[predicted, {expected.label.value}]"
            )
        if report.mode == "observe" and report.choice.state == "undecided":
            return f"only watched: {_watched(report)} {label}"
        return f"no result: {report.choice.reason} {label}"
    if report.choice.setting == report.found:
        reason = report.choice.reason.removeprefix("the default stands: ")
        return f"the default stands: {reason} {label}"
    verb = "saved" if report.kept else "would save"
    saving = f"{show_fraction(report.saving)} energy{interval(report.saving_ci95)}"
    slowdown = f"slowdown {show_fraction(report.slowdown)}{interval(report.slowdown_ci95)}"
    if report.saving is None:
        return f"energy unknown, {slowdown}, {verdict(report)} {label}"
    return f"{verb} {saving}, {slowdown}, {verdict(report)} {label}"


def _watched(report: Report) -> str:
    if report.baseline.iteration_s is None:
        return f"{report.iterations} iterations"
    return f"{report.iterations} iterations of {show_time(report.baseline.iteration_s)}"


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
        text = f"{show_count(e.pairs, 'pair')} of blocks, {e.iterations} iterations"
    if report.rehearsed_share > 0.0:
        text += f" ({report.rehearsed_share * 100:.0f} % rehearsed after the script had ended)"
    if e.left_out:
        reasons = ", ".join(f"{count} {why}" for why, count in e.left_out.items())
        text += f"; blocks left out: {reasons}"
    return text


def ending(report: Report) -> str:
    """What was held, and whether the found setting is back."""
    asked = {block.setting for block in report.blocks}
    if report.mode == "govern":  # a block under it may never have come to its end
        asked |= {d.setting for d in report.decisions if d.state != "predicted"}
    if asked <= {report.found} and report.restored:
        return "nothing was set"
    held = f"held {report.choice.setting}" if report.kept else "held the default"
    if report.restored:
        return f"{held}; {report.found} restored"
    end = "no end on record" if report.restored is None else f"{report.found} NOT restored"
    if any(device.persistent for device in report.devices):
        end += "; run: kilter restore"
    return f"{held}; {end}"


def _probe(probe: Probe) -> str:
    time = show_fraction(probe.time_ratio - 1.0, signed=True)
    energy = show_fraction(less_one(probe.energy_ratio), signed=True)
    mark = "*" if probe.chosen else " "
    return (
        f"{mark} {probe.setting!s:<32} {probe.phase:<8} time {time:>8}  energy {energy:>8}  "
        f"{probe.pairs} pairs"
    )


def less_one(ratio: float | None) -> float | None:
    """A ratio to the default as a change."""
    return None if ratio is None else ratio - 1.0
