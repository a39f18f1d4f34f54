"""The report as one page: inline style and inline SVG, no script, nothing fetched from anywhere.

The page forbids itself scripts and requests by its own content security policy, besides escaping
everything that comes from the run. Every plot is drawn twice, for wide and for narrow screens, so
that its text keeps its size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib import resources

from kilter.app import memory_plots
from kilter.app.evidence import allowed_slowdown
from kilter.app.memory_report import Timeline
from kilter.app.opening import STAND_IN, contract
from kilter.app.operations import OperationEnergy
from kilter.app.plots import iteration_times, power, signed, strip, tag, trade_off
from kilter.app.report import Report
from kilter.app.summary import (
    counted,
    doubt,
    ending,
    evidence,
    headline,
    interval,
    kind,
    less_one,
    verdict,
)
from kilter.app.svg import escape
from kilter.core.units import show_count, show_energy, show_fraction, show_pace, show_time

MOST_OPERATIONS = 12


def page(report: Report, memory: Timeline | None = None) -> str:
    """The whole page; `memory` is the pass that the memory plan was made for."""
    sections = [
        _head(report),
        _tiles(report),
        memory_plots.section(report.memory, memory),
        trade_off(report),
        iteration_times(report),
        power(report),
        _operations(report),
        _tried(report),
        _decisions(report),
        _effects(report),
        _method(report),
    ]
    title = f"kilter: {report.run}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


def _style() -> str:
    return resources.files("kilter.app").joinpath("report.css").read_text(encoding="utf-8")


# The top: what a reader in a hurry takes away.


def _head(report: Report) -> str:
    command = escape(" ".join(report.command))
    predicted = ""
    if report.saving is None and report.prediction is not None:
        label = report.prediction.label.value
        predicted = f" <span class='tag {label}'>predicted, {label}</span>"
    alone = report.memory if report.goal.max_slowdown is None else None
    tagged = tag(report) if alone is None else memory_plots.tag(alone.label)
    device = STAND_IN if alone and alone.backend == "stand-in" else report.device
    facts = [device, report.ranks, report.wall_time, f"kilter {report.kilter}"]
    return (
        f"<header><p class='kicker'>kilter report {tagged}</p>"
        f"<h1>{escape(_claim(report))}{predicted}</h1><p class='lede'><code>{command}</code></p>"
        f"<p class='facts'>{' &middot; '.join(escape(fact) for fact in facts)}</p></header>"
    )


def _claim(report: Report) -> str:
    if report.goal.max_slowdown is None and report.memory is not None:
        return memory_plots.claim(report.memory)
    if report.choice.setting == report.found or report.slowdown is None:
        text = headline(report).rpartition(" [")[0]
        return _capital(text).replace(" -", " \u2212")
    time = show_pace(report.slowdown)
    if report.saving is None:
        return f"{_capital(time)}; energy unknown"
    if report.saving < 0.0:
        return f"{show_fraction(-report.saving)} more energy per iteration, {time}"
    would = "" if report.kept else "Would take "
    return f"{would}{show_fraction(report.saving)} less energy per iteration, {time}"


def _tiles(report: Report) -> str:
    if report.goal.max_slowdown is None and report.memory is not None:
        return ""  # the memory section has its own
    base, ours = report.baseline, report.governed
    compared = report.evidence.pairs > 0
    tiles = [
        _tile(
            report,
            "Evidence",
            show_count(report.evidence.pairs, "pair")
            if compared
            else show_count(len(report.blocks), "block"),
            f"{report.evidence.iterations} of {report.iterations + report.rehearsed_iterations} "
            "iterations"
            if compared
            else "nothing to compare with",
            f"{_capital(evidence(report))}.",
        )
    ]
    if report.slowdown is None or report.choice.setting == report.found:
        as_found = "per iteration, as found"
        terms = f"Goal: {contract(report.goal)}."
        tiles = [
            _tile(report, "Energy", show_energy(base.energy_j), as_found, _energy_method(report)),
            _tile(report, "Time", show_time(base.iteration_s), as_found, terms),
            *tiles,
        ]
    else:
        tiles = [
            _tile(
                report,
                "Energy per iteration",
                signed(None if report.saving is None else -report.saving),
                _spread(_negated(report.saving_ci95)),
                f"{show_energy(base.energy_j)} by default, {show_energy(ours.energy_j)} governed.",
                strip("saving", report.saving_ci95, report.saving, None),
            ),
            _tile(
                report,
                "Time per iteration",
                signed(report.slowdown),
                _spread(report.slowdown_ci95),
                f"{show_time(base.iteration_s)} by default, {show_time(ours.iteration_s)} "
                f"governed; {verdict(report)}.",
                strip(
                    "slowdown", report.slowdown_ci95, report.slowdown, allowed_slowdown(report.goal)
                ),
            ),
            *tiles,
        ]
    return f"<section class='tiles' aria-label='Result'>{''.join(tiles)}</section>"


def _spread(ends: tuple[float, float] | None) -> str:
    return interval(ends).strip(" ()").replace("-", "\u2212")


def _tile(report: Report, name: str, value: str, spread: str, text: str, drawing: str = "") -> str:
    return (
        f"<div class='tile'><h2>{escape(name)}</h2>"
        f"<p class='value'>{escape(value)} {tag(report)}</p>"
        f"<p class='spread'>{escape(spread)}</p>{drawing}<p>{escape(text)}</p></div>"
    )


# Tables.


def _operations(report: Report) -> str:
    if not report.operations:
        # Without energy the table would be empty with a trace as well.
        if report.no_trace is None or report.baseline.energy_j is None:
            return ""
        return (
            "<section><h2>Where the energy of an iteration goes</h2>"
            f"<p>Its operations were not recorded: {escape(report.no_trace)}.</p></section>"
        )
    shown = report.operations[:MOST_OPERATIONS]
    largest = shown[0].share
    rows = [_operation_row(op, largest) for op in shown]
    rest = report.operations[MOST_OPERATIONS:]
    if rest:
        rows.append(
            f"<tr><td>{len(rest)} more</td><td></td><td></td>"
            f"<td class='n'>{show_energy(math.fsum(op.energy_j for op in rest))}</td>"
            f"<td class='n'>{show_fraction(math.fsum(op.share for op in rest))}</td><td></td></tr>"
        )
    return (
        "<section><h2>Where the energy of an iteration goes</h2>"
        f"<p>{escape(_capital(report.operations_method or ''))}. {tag(report)}</p>"
        + _table(
            ("Operation", "Kind", "", "Energy", "Share", "FLOP per byte"),
            rows,
            numeric=(3, 4, 5),
            caption="Operations of one iteration under the default, by energy",
        )
        + "</section>"
    )


def _operation_row(op: OperationEnergy, largest: float) -> str:
    intensity = op.intensity_flop_per_byte
    shown = "" if intensity is None else f"{intensity:.3g}"
    return (
        f"<tr><td class='name'>{escape(counted(op))}</td>"
        f"<td>{escape(kind(op))}</td>"
        f"<td class='bar'><span style='width:{100 * op.share / largest:.1f}%'></span></td>"
        f"<td class='n'>{show_energy(op.energy_j)}</td>"
        f"<td class='n'>{show_fraction(op.share)}</td><td class='n'>{shown}</td></tr>"
    )


def _tried(report: Report) -> str:
    if not report.probes:
        return ""
    rows = []
    for probe in report.probes:
        name = escape(probe.setting)
        role = "judged, not taken" if probe.phase == "confirm" else escape(probe.phase)
        if probe.chosen and probe.phase == "confirm":
            name, role = f"<strong>{name}</strong>", "judged, chosen"
        rows.append(
            f"<tr><td>{name}</td><td>{role}</td>"
            f"<td class='n'>{signed(probe.time_ratio - 1)}</td>"
            f"<td class='n faint'>{_ends(probe.time_ci95)}</td>"
            f"<td class='n'>{signed(less_one(probe.energy_ratio))}</td>"
            f"<td class='n faint'>{_ends(probe.energy_ci95)}</td>"
            f"<td class='n'>{probe.pairs}</td></tr>"
        )
    return (
        f"<section><h2>Settings tried</h2><p>Relative to the default. {tag(report)}</p>"
        + _table(
            ("Setting", "Role", "Time", "95 %", "Energy", "95 %", "Pairs"),
            rows,
            numeric=(2, 3, 4, 5, 6),
            caption="Settings tried, with time and energy relative to the default",
        )
        + "</section>"
    )


def _decisions(report: Report) -> str:
    if not report.decisions:
        return ""
    rows = [
        f"<tr><td class='n'>{decision.t_s:.1f} s</td><td>{escape(decision.state)}</td>"
        f"<td>{escape(decision.setting)}</td>"
        f"<td class='reason'>{escape(decision.reason)}</td></tr>"
        for decision in report.decisions
    ]
    return (
        f"<section><h2>Decisions</h2><p>In order; the last one rules. {tag(report)}</p>"
        + _table(
            ("At (real time)", "State", "Setting", "Reason"),
            rows,
            numeric=(0,),
            caption="Decisions with their reasons",
        )
        + "</section>"
    )


def _effects(report: Report) -> str:
    entries = [
        ("Found", str(report.found)),
        ("At the end", ending(report)),
    ]
    entries += [(f"Refused: {r.what}", r.reason) for r in report.refused]
    entries += [(f"Error of ours: {e.where}", e.error) for e in report.errors]
    if not report.refused:
        entries.append(("Refused", "nothing"))
    return f"<section><h2>Set, restored, refused</h2>{_list(entries)}</section>"


def _method(report: Report) -> str:
    mode = {"govern": "settings are changed and judged", "shadow": "nothing is set"}
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
        ("Choice", report.choice.reason),
    ]
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
        hook = show_time(report.overhead.hook_per_iteration_s)
        entries.append(
            (
                "Cost of kilter itself",
                f"{hook} per iteration in the job's path, the observation's share included; "
                f"{show_time(report.overhead.sampler_s)} in the sampler's thread",
            )
        )
    return f"<section><h2>How this was measured</h2>{_list(entries)}</section>"


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


def _table(
    heads: Sequence[str], rows: Iterable[str], *, numeric: Sequence[int], caption: str
) -> str:
    cells = "".join(
        f"<th scope='col' class='{'n' if i in numeric else 'bar' if not head else ''}'>"
        f"{escape(head)}</th>"
        for i, head in enumerate(heads)
    )
    return (
        f"<div class='scroll' tabindex='0'><table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _list(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(_capital(text))}</dd>" for name, text in entries
    )
    return f"<dl>{items}</dl>"


# Numbers and words.


def _ends(ends: tuple[float, float] | None) -> str:
    if ends is None or not all(map(math.isfinite, ends)):
        return ""
    return f"{100 * (ends[0] - 1):+.1f} to {100 * (ends[1] - 1):+.1f}".replace("-", "\u2212")


def _negated(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if ends is None else (-ends[1], -ends[0])


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
