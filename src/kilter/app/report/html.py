"""The report as one page: inline style and inline SVG, no script, nothing fetched from anywhere.

The page forbids itself scripts and requests by its own content security policy, besides escaping
everything that comes from the run. Every plot is drawn twice, for wide and for narrow screens, so
that its text keeps its size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kilter.app.report import footprint, glossary, memory_plots, section_run, svg
from kilter.app.report import sections as section_page
from kilter.app.report.build import Report
from kilter.app.report.evidence import Probe, allowed_slowdown
from kilter.app.report.memory import Timeline, timeline
from kilter.app.report.operations import OperationEnergy
from kilter.app.report.page import definitions, document, section, table, tag, tile
from kilter.app.report.plots import iteration_times, power, signed, strip, trade_off
from kilter.app.report.summary import (
    ACTED_ON,
    NOTHING_SET,
    bound,
    by_inside,
    counted,
    doubt,
    ending,
    evidence,
    happened,
    interval,
    kind,
    less_one,
    machine,
    next_step,
    plain_name,
    result,
    use,
    verdict,
    whole_run,
)
from kilter.app.report.svg import escape
from kilter.app.report.words import STAND_IN, contract
from kilter.clocks.plan.sections import Analysis
from kilter.core.codec import write_atomically
from kilter.core.events import Decided
from kilter.core.label import Label
from kilter.core.plan import ClocksMode
from kilter.core.units import show_count, show_energy, show_fraction, show_pace, show_time

MOST_OPERATIONS = 12
WHERE_ENERGY_GOES = "Where the energy of an iteration goes"


def page(report: Report, memory: Timeline | None = None, windows: Analysis | None = None) -> str:
    """The whole page; `memory` is the pass that the memory plan was made for, `windows` what the
    profiler saw of the ranks' communication sections."""
    sections = [
        _head(report),
        _tiles(report),
        memory_plots.section(report.memory, memory),
        _communication(report, windows),
        trade_off(report),
        iteration_times(report),
        power(report),
        _footprint(report),
        _operations(report),
        _tried(report),
        _decisions(report),
        _effects(report),
        _method(report),
    ]
    sections.append(_words("\n".join(sections)))
    title = f"kilter: {report.run}"
    return document(title, "\n".join(filter(None, sections)))


def write(report: Report, run: Path, file: Path) -> Timeline | None:
    """The page of a run's folder; gives the pass of its memory plan, if it has one."""
    memory = timeline(run)
    write_atomically(
        file, page(report, memory, section_run.windows(run)).encode("utf-8", "replace")
    )
    return memory


def _words(page: str) -> str:
    """What the words of this page mean."""
    return section("Words", definitions(glossary.used(page).items()), key="words")


def _communication(report: Report, windows: Analysis | None) -> str:
    if report.sections is None:
        return ""
    found = report.sections.search
    return section_page.in_report(windows, section_run.answer(report.sections), found)


# The top: what a reader in a hurry takes away.


def _head(report: Report) -> str:
    command = escape(" ".join(report.command))
    alone = report.memory if report.goal.max_slowdown is None else None
    tagged = tag(report.label if alone is None else alone.label)
    device = STAND_IN if alone and alone.record.backend == "stand-in" else plain_name(report.device)
    findings = _findings(report)
    first = "" if report.job.name in ACTED_ON else f"<p class='finding'>{_class(report)}</p>"
    further = "".join(f"<p class='finding'>{finding}</p>" for finding in findings[1:])
    step = next_step(report)
    following = "" if step is None else f"<p class='next'>Next: {escape(step)}.</p>"
    unread = "".join(f"<p class='facts'>Warning: {escape(why)}.</p>" for why in report.unread)
    facts = (f"{device}; {report.ranks}", whole_run(report), machine(report))
    return (
        f"<header><p class='kicker'>kilter report {tagged}</p>"
        f"{first}<h1>{findings[0]}</h1>{further}{following}{unread}"
        f"<p class='lede'><code>{command}</code></p>"
        + "".join(f"<p class='facts'>{escape(fact)}</p>" for fact in facts)
        + "</header>"
    )


def _findings(report: Report) -> list[str]:
    """What a reader has to know, the first first, as HTML."""
    predicted = ""
    if report.saving is None and report.prediction is not None:
        label = report.prediction.label.value
        predicted = f" <span class='tag {label}'>predicted, {label}</span>"
    found = [f"{escape(_claim(report))}{predicted}"]
    if report.job.name in ACTED_ON:
        found.insert(0, _class(report))
    return found


def _class(report: Report) -> str:
    """What bounds the job, as HTML."""
    finding = bound(report)
    tagged = f" <span class='tag {finding.label}'>{finding.label}</span>" if finding.label else ""
    return f"{escape(_capital(finding.text))}{tagged}"


def _claim(report: Report) -> str:
    if report.goal.max_slowdown is None and report.memory is not None:
        return memory_plots.claim(report.memory)
    if report.choice.setting == report.found or report.slowdown is None:
        return _capital(result(report).text).replace(" -", " \u2212")
    time = show_pace(report.slowdown)
    if report.saving is None:
        return f"{_capital(time)}; energy unknown"
    would = "" if happened(report) else "Would take "
    if report.saving < 0.0:
        return f"{would}{show_fraction(-report.saving)} more energy per iteration, {time}"
    return f"{would}{show_fraction(report.saving)} less energy per iteration, {time}"


def _tiles(report: Report) -> str:
    if by_inside(report) or (report.goal.max_slowdown is None and report.memory is not None):
        return ""  # their own parts of the page tell
    base, ours = report.baseline, report.governed
    if report.slowdown is None or report.choice.setting == report.found:
        as_found = "per iteration, as found"
        terms = f"Goal: {contract(report.goal)}."
        tiles = [
            tile(report.label, "Energy", _energy(base.energy_j), as_found, _energy_method(report)),
            tile(report.label, "Time", _time(base.iteration_s), as_found, terms),
        ]
    else:
        less = None if report.saving is None else -report.saving
        ends = _negated(report.saving_ci95)
        tiles = [
            tile(
                report.label,
                "Energy per iteration",
                signed(less),
                _spread(ends),
                f"{_energy(base.energy_j)} by default, {_energy(ours.energy_j)} governed.",
                strip("energy", ends, less, None),
            ),
            tile(
                report.label,
                "Time per iteration",
                signed(report.slowdown),
                _spread(report.slowdown_ci95),
                f"{_time(base.iteration_s)} by default, {_time(ours.iteration_s)} "
                f"governed; {verdict(report)}.",
                strip("time", report.slowdown_ci95, report.slowdown, allowed_slowdown(report.goal)),
            ),
        ]
    tiles.append(_evidence_tile(report))
    return f"<section class='tiles' aria-label='Result'>{''.join(tiles)}</section>"


def _evidence_tile(report: Report) -> str:
    e = report.evidence
    if not e.pairs:
        value, spread = show_count(len(report.blocks), "block"), "nothing to compare with"
    else:
        value = show_count(e.pairs, "pair")
        rehearsed = " rehearsed" if report.rehearsed_share == 1.0 else ""
        spread = f"{e.iterations}{rehearsed} iterations; {report.iterations} of the script timed"
    return tile(report.label, "Evidence", value, spread, f"{_capital(evidence(report))}.")


def _spread(ends: tuple[float, float] | None) -> str:
    return interval(ends).strip(" ()").replace("-", "\u2212")


# Tables.


def _operations(report: Report) -> str:
    if not report.operations:
        # Without energy the table would be empty with a trace as well.
        if report.no_trace is None or report.baseline.energy_j is None:
            return ""
        why = f"<p>Its operations were not recorded: {escape(report.no_trace)}.</p>"
        return section(WHERE_ENERGY_GOES, why)
    told = ""
    if (features := report.features) is not None:
        told = f"<p>One iteration: {escape(use(features))}. {tag(features.label)}</p>"
    shown, rest = report.operations[:MOST_OPERATIONS], report.operations[MOST_OPERATIONS:]
    largest = shown[0].share
    rows = [_operation_row(counted(op), op, largest) for op in shown]
    for what in dict.fromkeys(op.kind for op in rest):
        group = [op for op in rest if op.kind == what]
        rows.append(_operation_row(f"{len(group)} more", _together(group), largest))
    return section(
        WHERE_ENERGY_GOES,
        f"<p>{escape(_capital(report.operations_method or ''))}. {tag(report.label)}</p>{told}",
        table(
            (
                ("Operation", "name"),
                ("Kind", ""),
                ("", "bar"),
                ("Energy", "n"),
                ("Share", "n"),
                ("FLOP per byte", "n wideonly"),
            ),
            rows,
            caption="Operations of one iteration under the default, by energy",
        ),
    )


def _footprint(report: Report) -> str:
    """Carbon and cost, where the user gave factors."""
    if report.footprint is None:
        return ""
    text = escape(_capital(footprint.sentence(report.footprint)))
    return section("Carbon and cost", f"<p>{text}.</p>", key="footprint")


def _together(group: Sequence[OperationEnergy]) -> OperationEnergy:
    """Operations of one kind that get no line of their own."""
    return replace(
        group[0],
        energy_j=math.fsum(op.energy_j for op in group),
        share=math.fsum(op.share for op in group),
        intensity_flop_per_byte=None,
    )


def _operation_row(name: str, op: OperationEnergy, largest: float) -> tuple[str, ...]:
    intensity = op.intensity_flop_per_byte
    return (
        escape(name),
        escape(kind(op)),
        f"<span style='width:{min(100 * op.share / largest, 100.0):.1f}%'></span>",
        _energy(op.energy_j),
        show_fraction(op.share),
        "" if intensity is None else f"{intensity:.3g}",
    )


def _tried(report: Report) -> str:
    if not report.probes:
        return ""
    return section(
        "Settings tried",
        f"<p>Relative to the default. {tag(report.label)}</p>",
        table(
            (
                ("Setting", ""),
                ("Role", ""),
                ("Time", "n"),
                ("95 %", "n faint wideonly"),
                ("Energy", "n"),
                ("95 %", "n faint wideonly"),
                ("Pairs", "n"),
            ),
            [_probe_row(probe) for probe in report.probes],
            caption="Settings tried, with time and energy relative to the default",
        ),
    )


def _probe_row(probe: Probe) -> tuple[str, ...]:
    name = escape(probe.setting)
    role = "judged, not taken" if probe.phase == "confirm" else escape(probe.phase)
    if probe.chosen and probe.phase == "confirm":
        name, role = f"<strong>{name}</strong>", "judged, chosen"
    return (
        name,
        role,
        signed(probe.time_ratio - 1),
        _ends(probe.time_ci95),
        signed(less_one(probe.energy_ratio)),
        _ends(probe.energy_ci95),
        str(probe.pairs),
    )


def _decisions(report: Report) -> str:
    if not report.decisions:
        return ""
    rows = [
        (
            f"{decision.t_s:.1f} s",
            f"{escape(decision.state)} {tag(_decided_by(report, decision))}",
            escape(decision.setting),
            escape(decision.reason),
        )
        for decision in report.decisions
    ]
    columns = (("At (real time)", "n"), ("State", ""), ("Setting", ""), ("Reason", "reason"))
    return section(
        "Decisions",
        "<p>In order; the last one rules. The label says where the numbers come from that each one "
        "rests on.</p>",
        table(columns, rows, "Decisions with their reasons"),
    )


def _decided_by(report: Report, decision: Decided) -> Label:
    """A prediction is a simulation, also where everything else was measured."""
    return Label.SIMULATED if decision.state == "predicted" else report.label


def _effects(report: Report) -> str:
    entries = [
        ("Found", str(report.found)),
        ("At the end", "as found" if ending(report) == NOTHING_SET else ending(report)),
    ]
    entries += [(f"Refused: {r.what}", r.reason) for r in report.refused]
    entries += [(f"Error of ours: {e.where}", e.error) for e in report.errors]
    if not report.refused:
        entries.append(("Refused", "nothing"))
    return section("Set, restored, refused", _list(entries))


def _method(report: Report) -> str:
    mode = {
        ClocksMode.GOVERN: "settings are changed and judged",
        ClocksMode.SHADOW: "planning only",
    }
    entries = [
        ("Numbers", f"{report.label.value}: {_LABELS[report.label.value]}"),
    ]
    if report.goal.max_slowdown is not None:
        entries += [
            ("Energy", _energy_method(report)),
            ("Intervals", report.interval_method),
            ("Contract", contract(report.goal)),
        ]
    entries += [
        ("Mode", f"{report.mode} ({mode.get(report.mode, 'watching only')}): {report.mode_reason}"),
        ("Ranks", report.ranks),
        ("Outcome", report.outcome or "the record has no end: the run was killed, or goes on"),
    ]
    if not by_inside(report):
        entries.append(("Choice", report.choice.reason))
    if report.prediction is not None:
        expected = report.prediction
        entries.append(
            (
                f"Plan ({expected.label.value})",
                f"{'; '.join(expected.actions) or 'the default'}: "
                f"time {signed(expected.time_ratio - 1)}, "
                f"energy {signed(less_one(expected.energy_ratio))} predicted; {expected.reason}",
            )
        )
    if report.overhead is not None:
        hook = _time(report.overhead.hook_per_iteration_s)
        entries.append(
            (
                "Cost of kilter itself",
                f"{hook} per iteration in the job's path, the observation's share included; "
                f"{_time(report.overhead.sampler_s)} in the sampler's thread",
            )
        )
    return section("How this was measured", _list(entries))


_LABELS = {
    "measured": "read on the device that did the work",
    "replayed": "looked up in a table of somebody's measurements",
    "simulated": "computed by a model of the device; no such device did the work",
}

_ENERGY = {
    "counter": "difference of the device's energy counter",
    "power integral": "integral of the device's power sensor over time",
    "model": "computed by the simulated device's power model",
    "none": "not measured",
}


def _energy_method(report: Report) -> str:
    method = report.energy_method
    if method is None:
        return "How it was measured is unknown: the record has no end."
    doubts = doubt(report)
    warning = f" Warning: {doubts}." if doubts else ""
    return f"{_capital(_ENERGY.get(method, method))}.{warning}"


def _list(named: Iterable[tuple[str, str]]) -> str:
    return definitions((name, _capital(text)) for name, text in named)


# Numbers and words.


def _energy(joules: float | None) -> str:
    return svg.micro(show_energy(joules))


def _time(seconds: float | None) -> str:
    return svg.micro(show_time(seconds))


def _ends(ends: tuple[float, float] | None) -> str:
    if ends is None or not all(map(math.isfinite, ends)):
        return ""
    return f"{100 * (ends[0] - 1):+.1f} to {100 * (ends[1] - 1):+.1f}".replace("-", "\u2212")


def _negated(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if ends is None else (-ends[1], -ends[0])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
