"""The report as one page: inline style and inline SVG, no script, nothing fetched from anywhere.

The page forbids itself scripts and requests by its own content security policy, besides escaping
everything that comes from the run. Every plot is drawn twice, for wide and for narrow screens, so
that its text keeps its size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from kilter.app import svg
from kilter.app.report import JUDGED, OperationEnergy, Probe, Report, Series
from kilter.app.summary import contract, ending, evidence, headline, interval, verdict
from kilter.app.svg import Frame, escape
from kilter.core.events import Block
from kilter.core.label import Label
from kilter.core.plan import Goal
from kilter.core.setting import Setting
from kilter.core.units import MHZ, show_energy, show_fraction, show_power, show_time
from kilter.plan.guard import Contract

WIDE, NARROW = 860.0, 400.0
"""Widths for which plots are drawn, in pixels."""

MOST_OPERATIONS = 12
MOST_BLOCKS = 600
"""Blocks drawn; of more, every n-th."""


def page(report: Report) -> str:
    """The whole page."""
    sections = [
        _head(report),
        _tiles(report),
        _trade_off(report),
        _iteration_times(report),
        _power(report),
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
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


# The top: what a reader in a hurry takes away.


def _head(report: Report) -> str:
    command = escape(" ".join(report.command))
    facts = [report.device, report.ranks, report.wall_time, f"kilter {report.kilter}"]
    return (
        f"<header><p class='kicker'>kilter report {_label(report)}</p>"
        f"<h1>{escape(_claim(report))}</h1><p class='lede'><code>{command}</code></p>"
        f"<p class='facts'>{' &middot; '.join(escape(fact) for fact in facts)}</p></header>"
    )


def _claim(report: Report) -> str:
    if report.choice.setting == report.found or report.slowdown is None:
        text = headline(report).rpartition(" [")[0]
        return text[:1].upper() + text[1:]
    time = _faster_or_slower(report.slowdown)
    if report.saving is None:
        return f"{time}; energy unknown"
    if report.saving < 0.0:
        return f"{show_fraction(-report.saving)} more energy per iteration, {time}"
    would = "" if report.mode == "govern" else "Would take "
    return f"{would}{show_fraction(report.saving)} less energy per iteration, {time}"


def _faster_or_slower(slowdown: float) -> str:
    word = "slower" if slowdown >= 0.0 else "faster"
    return f"{show_fraction(abs(slowdown))} {word}"


def _tiles(report: Report) -> str:
    base, ours = report.baseline, report.governed
    bound = _bound(report.goal)
    tiles = [
        _tile(
            "Energy per iteration",
            _signed(None if report.saving is None else -report.saving),
            interval(_negated(report.saving_ci95)).strip(" ()"),
            f"{show_energy(base.energy_j)} by default, {show_energy(ours.energy_j)} governed",
            _strip("saving", report.saving_ci95, report.saving, None),
            report,
        ),
        _tile(
            "Time per iteration",
            _signed(report.slowdown),
            interval(report.slowdown_ci95).strip(" ()"),
            f"{show_time(base.iteration_s)} by default, {show_time(ours.iteration_s)} governed. "
            f"{_capital(verdict(report))}.",
            _strip("slowdown", report.slowdown_ci95, report.slowdown, bound),
            report,
        ),
        _tile(
            "Evidence",
            f"{report.evidence.pairs} pairs",
            f"{report.evidence.iterations} of {report.iterations + report.rehearsed_iterations} "
            "iterations",
            f"{_capital(evidence(report))}.",
            "",
            report,
        ),
    ]
    return f"<section class='tiles' aria-label='Result'>{''.join(tiles)}</section>"


def _tile(name: str, value: str, spread: str, text: str, strip: str, report: Report) -> str:
    return (
        f"<div class='tile'><h2>{escape(name)}</h2>"
        f"<p class='value'>{escape(value)} {_label(report)}</p>"
        f"<p class='spread'>{escape(spread)}</p>{strip}<p>{escape(text)}</p></div>"
    )


def _strip(
    key: str, ends: tuple[float, float] | None, value: float | None, bound: float | None
) -> str:
    """The interval on a line from zero, with the contract where there is one."""
    if ends is None or value is None or not all(map(math.isfinite, ends)):
        return ""
    low, high = min(0.0, ends[0]), max(ends[1], bound or 0.0)
    low, high = svg.padded((low, high), 0.12)
    frame = Frame(left=6, top=4, right=254, bottom=26, x_range=(low, high), y_range=(0.0, 1.0))
    y = frame.y(0.5)
    parts = [svg.line(frame.left, y, frame.right, y, "axis")]
    parts.append(svg.line(frame.x(0.0), y - 6, frame.x(0.0), y + 6, "axis"))
    parts.append(svg.text(frame.x(0.0), 42, "0", "tick", anchor="middle"))
    if bound is not None:
        x = frame.x(bound)
        parts.append(svg.line(x, y - 10, x, y + 10, "bound"))
        parts.append(
            svg.text(x, 42, f"contract {show_fraction(bound)}", "boundtext", anchor="end")
            if x > 130
            else svg.text(x, 42, f"contract {show_fraction(bound)}", "boundtext")
        )
    parts.append(svg.line(frame.x(ends[0]), y, frame.x(ends[1]), y, "whisker"))
    parts.append(svg.dot(frame.x(value), y, 5, "ours", show_fraction(value)))
    description = f"{key} {show_fraction(value)}{interval(ends)}"
    return svg.picture(
        f"strip-{key}", 260, 48, f"Interval of the {key}", description, "".join(parts)
    )


# Plots.


def _figure(
    report: Report,
    key: str,
    title: str,
    lede: str,
    caption: str,
    draw: Callable[[float], tuple[float, str]],
    description: str,
) -> str:
    drawings = []
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        height, body = draw(width)
        drawing = svg.picture(f"{key}-{name}", width, height, title, description, body)
        drawings.append(f"<div class='{name}'>{drawing}</div>")
    return (
        f"<section><h2>{escape(title)}</h2><p>{escape(lede)}</p><figure>{''.join(drawings)}"
        f"<figcaption>{escape(caption)} {_label(report)}</figcaption></figure></section>"
    )


def _trade_off(report: Report) -> str:
    probes = [probe for probe in report.probes if probe.energy_ratio is not None]
    if not probes:
        return ""
    chosen = next((p for p in probes if p.chosen and p.phase == "confirm"), None)
    bound = _bound(report.goal)

    def draw(width: float) -> tuple[float, str]:
        return _draw_trade_off(probes, chosen, bound, width)

    described = "; ".join(
        f"{p.setting} ({p.phase}): time {_signed(p.time_ratio - 1)}, "
        f"energy {_signed(_less_one(p.energy_ratio))}"
        for p in probes
    )
    lede = "Each point is a setting that was tried on the job, against the default beside it."
    if chosen is not None:
        lede += f" {chosen.setting} was chosen and then judged anew, on pairs of its own."
    return _figure(
        report,
        "tradeoff",
        "Energy against time",
        lede,
        "Down is less energy, left is faster. Open: a probe, from few pairs. Filled: judged, with "
        "95 % interval.",
        draw,
        f"Relative to the default at 0, 0: {described}.",
    )


def _draw_trade_off(
    probes: Sequence[Probe], chosen: Probe | None, bound: float | None, width: float
) -> tuple[float, str]:
    height = 430.0 if width > NARROW else 380.0
    points = [(100 * (p.time_ratio - 1), 100 * (_less_one(p.energy_ratio) or 0.0)) for p in probes]
    xs, ys = [0.0, *(x for x, _ in points)], [0.0, *(y for _, y in points)]
    if bound is not None:
        xs.append(100 * bound)
    frame = Frame(
        left=58,
        top=34,
        right=width - 14,
        bottom=height - 50,
        x_range=svg.padded(xs, 0.10),
        y_range=svg.padded(ys, 0.12),
    )
    parts = []
    if bound is not None:
        x = frame.x(100 * bound)
        parts.append(svg.rectangle(x, frame.top, frame.right - x, frame.bottom - frame.top, "zone"))
    parts.append(
        frame.axes(
            x_title="time per iteration, relative to the default",
            y_title="energy per iteration, relative to the default",
            x_text=_percent,
            y_text=_percent,
        )
    )
    labels = svg.Labels(frame)
    if bound is not None:
        x = frame.x(100 * bound)
        parts.append(svg.line(x, frame.top, x, frame.bottom, "bound"))
        labels.avoid(x, frame.bottom - 8, 1)
        parts.append(
            svg.text(x + 6, frame.bottom - 8, f"slower than {show_fraction(bound)}", "boundtext")
        )
    curve = sorted(
        [
            (p.setting.sm_clock_hz, point)
            for p, point in zip(probes, points, strict=True)
            if p.setting.sm_clock_hz is not None
            and not _judged_twin(p, probes)
            and p.setting == Setting(sm_clock_hz=p.setting.sm_clock_hz)
        ],
        reverse=True,
    )
    line = [(0.0, 0.0), *(point for _, point in curve)]
    parts.append(svg.path([(frame.x(x), frame.y(y)) for x, y in line], "curve"))
    drawn = sorted(
        zip(probes, points, strict=True), key=lambda item: (item[0] is chosen, item[0].phase)
    )
    for _, (x, y) in drawn:
        labels.avoid(frame.x(x), frame.y(y), 6)
    labels.avoid(frame.x(0.0), frame.y(0.0), 6)
    marks, words = [], []
    for probe, (x, y) in drawn:
        marks.append(_mark(frame, probe, x, y, chosen))
    marks.append(svg.dot(frame.x(0.0), frame.y(0.0), 5, "base", "default"))
    words.append(labels.put(frame.x(0.0), frame.y(0.0), "default", "label"))
    for probe, (x, y) in reversed(drawn):
        if not _judged_twin(probe, probes):
            style = "label strong" if probe is chosen else "label"
            text = f"chosen: {probe.setting}" if probe is chosen else str(probe.setting)
            words.append(labels.put(frame.x(x), frame.y(y), text, style))
    return height, "".join(parts + marks + words)


def _judged_twin(probe: Probe, probes: Sequence[Probe]) -> bool:
    """A probe whose setting was later judged: the judged point stands for it."""
    return probe.phase == "probe" and any(
        p.setting == probe.setting and p.phase == "confirm" for p in probes
    )


def _mark(frame: Frame, probe: Probe, x: float, y: float, chosen: Probe | None) -> str:
    note = (
        f"{probe.setting}, {probe.phase}: time {_signed(probe.time_ratio - 1)}, energy "
        f"{_signed(_less_one(probe.energy_ratio))}, {probe.pairs} pairs"
    )
    left, top = frame.x(x), frame.y(y)
    parts = []
    if probe.phase == "confirm":
        style = "whisker" if probe is chosen else "whisker muted"
        for ends, across in ((probe.time_ci95, True), (probe.energy_ci95, False)):
            if ends is None:
                continue
            a, b = (100 * (end - 1) for end in ends)
            if across:
                a, b = max(a, frame.x_range[0]), min(b, frame.x_range[1])
                parts.append(svg.line(frame.x(a), top, frame.x(b), top, style))
            else:
                a, b = max(a, frame.y_range[0]), min(b, frame.y_range[1])
                parts.append(svg.line(left, frame.y(a), left, frame.y(b), style))
        parts.append(svg.dot(left, top, 6, "ours" if probe is chosen else "judged", note))
    else:
        parts.append(svg.dot(left, top, 4.5, "probe", note))
    return "".join(parts)


def _iteration_times(report: Report) -> str:
    clean = [block for block in report.blocks if block.clean]
    if len(clean) < 2:
        return ""

    def draw(width: float) -> tuple[float, str]:
        return _draw_iteration_times(report, clean, width)

    base, ours = report.baseline.iteration_s, report.governed.iteration_s
    lede = (
        "Blocks of the default and of the candidate take turns, so that whatever else changes "
        "on the machine falls on both alike."
    )
    left_out = len(report.blocks) - len(clean)
    every = _thinning(report)
    thinned = f" One block in {every} is drawn." if every > 1 else ""
    return _figure(
        report,
        "times",
        "Iteration time, block by block",
        lede,
        "Each point is the median of one block of iterations. Crosses are blocks that do not "
        f"count ({left_out}); the lines are the means of the pairs that were judged.{thinned}",
        draw,
        f"{len(report.blocks)} blocks. Default {show_time(base)}, governed {show_time(ours)}.",
    )


def _draw_iteration_times(
    report: Report, clean: Sequence[Block], width: float
) -> tuple[float, str]:
    wide = width > NARROW
    height = 360.0 if wide else 330.0
    times = [block.iteration_s for block in clean]
    unit, factor = _time_unit(max(times))
    bound = _bound(report.goal)
    base_s, ours_s = report.baseline.iteration_s, report.governed.iteration_s
    lines: list[tuple[float, str, str]] = []
    if base_s is not None:
        lines.append((base_s, "default", "base"))
        if bound is not None:
            lines.append((base_s * (1 + bound), "contract", "bound"))
    if ours_s is not None and report.choice.setting != report.found:
        lines.append((ours_s, "governed", "ours"))
    spread = [factor * t for t in [*times, *(value for value, _, _ in lines)]]
    numbers = [block.number for block in report.blocks]
    frame = Frame(
        left=58,
        top=52,
        right=width - (112 if wide else 78),
        bottom=height - 50,
        x_range=svg.padded([min(numbers), max(numbers)], 0.02),
        y_range=svg.padded(spread),
    )
    parts = [_phases(report.blocks, frame)]
    parts.append(
        frame.axes(
            x_title="block",
            y_title=f"iteration time, {unit}",
            x_text=_plain,
            y_text=_plain,
        )
    )
    places = svg.spread(
        [frame.y(factor * value) for value, _, _ in lines],
        30,
        frame.top,
        frame.bottom,
    )
    for (value, name, style), place in zip(lines, places, strict=True):
        y = frame.y(factor * value)
        parts.append(svg.line(frame.left, y, frame.right, y, f"mean {style}"))
        parts.append(svg.path([(frame.right, y), (frame.right + 8, place)], f"leader {style}"))
        parts.append(svg.text(frame.right + 11, place, name, f"label {style}text"))
        shown = f"{factor * value:.4g} {unit}"
        parts.append(svg.text(frame.right + 11, place + 14, shown, f"label {style}text"))
    blocks = report.blocks[:: _thinning(report)]
    radius = 3.6 if len(blocks) < 200 else 2.4
    parts += [_block(block, report, frame, factor, unit, radius) for block in blocks]
    return height, "".join(parts)


def _thinning(report: Report) -> int:
    """Every how many-th block is drawn."""
    return math.ceil(len(report.blocks) / MOST_BLOCKS)


def _block(
    block: Block, report: Report, frame: Frame, factor: float, unit: str, radius: float
) -> str:
    value = factor * block.iteration_s
    note = f"block {block.number}, {block.phase}, {block.setting}: {value:.4g} {unit}"
    if block.rehearsed:
        note += ", rehearsed"
    x = frame.x(block.number)
    if not block.clean:
        low, high = frame.y_range
        y = frame.y(min(max(value, low), high))
        reason = escape(f"{note}; left out: {block.why_not}")
        shape = f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"
        return f'<path d="{shape}" class="cross"><title>{reason}</title></path>'
    if block.arm == "baseline":
        style = "base"
    else:
        style = "ours" if block.setting == report.choice.setting else "probe"
    return svg.dot(x, frame.y(value), radius, style, note)


def _phases(blocks: Sequence[Block], frame: Frame) -> str:
    """A band above the plot that names the phases, and a shade where the job was rehearsed."""
    parts = []
    for phase, group in groupby(blocks, key=lambda block: block.phase):
        run = list(group)
        begin, end = frame.x(run[0].number - 0.5), frame.x(run[-1].number + 0.5)
        begin, end = max(begin, frame.left), min(end, frame.right)
        if phase in JUDGED:
            parts.append(
                svg.rectangle(begin, frame.top, end - begin, frame.bottom - frame.top, "judgedzone")
            )
        parts.append(svg.line(begin + 1, frame.top - 4, end - 1, frame.top - 4, "band"))
        if end - begin > 8 + len(phase) * svg.FONT_SIZE * svg.TEXT_WIDTH:
            parts.append(
                svg.text((begin + end) / 2, frame.top - 10, phase, "tick", anchor="middle")
            )
    rehearsed = [block.number for block in blocks if block.rehearsed]
    if rehearsed:
        x = max(frame.x(min(rehearsed) - 0.5), frame.left)
        parts.append(svg.line(x, frame.top, x, frame.bottom, "cut"))
        if frame.right - x > 80:
            parts.append(svg.text(x + 5, frame.bottom - 7, "rehearsed", "tick"))
    return "".join(parts)


def _power(report: Report) -> str:
    series = [s for s in report.series if any(p is not None for p in s.power_w)]
    if not series or max(len(s.device_t_s) for s in series) < 2:
        return ""

    def draw(width: float) -> tuple[float, str]:
        return _draw_power(report, series, width)

    powers = [p for s in series for p in s.power_w if p is not None]
    devices = "one line per device" if len(series) > 1 else series[0].device
    return _figure(
        report,
        "power",
        "Power and clock over the run",
        "What the device's own sensors said.",
        f"Board power and SM clock, {devices}; each point is a mean over a short stretch. "
        "Shaded: the chosen setting was held.",
        draw,
        f"Power between {show_power(min(powers))} and {show_power(max(powers))}.",
    )


def _draw_power(report: Report, series: Sequence[Series], width: float) -> tuple[float, str]:
    clocks = [c / MHZ for s in series for c in s.sm_clock_hz if c is not None]
    split, height = 250.0, (420.0 if clocks else 300.0)
    end_s = max(s.device_t_s[-1] - s.begin_s for s in series if s.device_t_s)
    unit, factor = next((u, 1 / size) for u, size in _CLOCK_UNITS if end_s >= 10 * size or u == "s")
    x_range = (0.0, factor * end_s)
    powers = [p for s in series for p in s.power_w if p is not None]
    upper = Frame(
        left=58,
        top=34,
        right=width - 14,
        bottom=split,
        x_range=x_range,
        y_range=(0.0, 1.1 * max(powers) or 1.0),
    )
    whose = "the device's virtual time" if report.label is Label.SIMULATED else "time"
    x_title = f"{whose} since the start, {unit}"
    parts = [_held(report, upper, factor)]
    parts.append(
        upper.axes(
            x_title=x_title, y_title="power, W", x_text=_plain, y_text=_plain, x_labels=not clocks
        )
    )
    parts += [_trace(upper, one, one.power_w, factor, 1.0, "trace") for one in series]
    if clocks:
        lower = Frame(
            left=58,
            top=split + 38,
            right=width - 14,
            bottom=height - 50,
            x_range=x_range,
            y_range=svg.padded(clocks, 0.15),
        )
        parts.append(_held(report, lower, factor))
        parts.append(
            lower.axes(x_title=x_title, y_title="SM clock, MHz", x_text=_plain, y_text=_plain)
        )
        parts += [
            _trace(lower, one, one.sm_clock_hz, factor, 1 / MHZ, "trace clock") for one in series
        ]
    return height, "".join(parts)


_CLOCK_UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))


def _trace(
    frame: Frame,
    series: Series,
    values: Sequence[float | None],
    t_factor: float,
    factor: float,
    style: str,
) -> str:
    points = [
        None
        if value is None
        else (frame.x(t_factor * (t - series.begin_s)), frame.y(factor * value))
        for t, value in zip(series.device_t_s, values, strict=True)
    ]
    return svg.path(points, style)


def _held(report: Report, frame: Frame, factor: float) -> str:
    """Shade where a setting was held (and compared with the default now and then)."""
    parts = []
    begin_s = report.series[0].begin_s
    for phase, group in groupby(report.blocks, key=lambda block: block.phase):
        run = list(group)
        if phase == "hold" and any(block.setting != report.found for block in run):
            a = frame.x(min(factor * (run[0].device_begin_s - begin_s), frame.x_range[1]))
            b = frame.x(min(factor * (run[-1].device_end_s - begin_s), frame.x_range[1]))
            parts.append(svg.rectangle(a, frame.top, b - a, frame.bottom - frame.top, "judgedzone"))
    return "".join(parts)


# Tables.


def _operations(report: Report) -> str:
    if not report.operations:
        return ""
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
        f"<p>{escape(_capital(report.operations_method or ''))}. {_label(report)}</p>"
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
        f"<tr><td class='name'>{escape(op.name)}</td><td>{escape(op.kind.replace('_', ' '))}</td>"
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
        role = "judged" if probe.phase == "confirm" else escape(probe.phase)
        if probe.chosen and probe.phase == "confirm":
            name, role = f"<strong>{name}</strong>", "judged, chosen"
        rows.append(
            f"<tr><td>{name}</td><td>{role}</td>"
            f"<td class='n'>{_signed(probe.time_ratio - 1)}</td>"
            f"<td class='n faint'>{_ends(probe.time_ci95)}</td>"
            f"<td class='n'>{_signed(_less_one(probe.energy_ratio))}</td>"
            f"<td class='n faint'>{_ends(probe.energy_ci95)}</td>"
            f"<td class='n'>{probe.pairs}</td></tr>"
        )
    return (
        f"<section><h2>Settings tried</h2><p>Relative to the default. {_label(report)}</p>"
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
        f"<td class='n'>{_signed(_less_one(decision.time_ratio))}</td>"
        f"<td class='n'>{_signed(_less_one(decision.energy_ratio))}</td>"
        f"<td class='reason'>{escape(decision.reason)}</td></tr>"
        for decision in report.decisions
    ]
    return (
        f"<section><h2>Decisions</h2><p>In order; the last one rules. {_label(report)}</p>"
        + _table(
            ("At (real time)", "State", "Setting", "Time expected", "Energy expected", "Reason"),
            rows,
            numeric=(0, 3, 4),
            caption="Decisions with their reasons",
        )
        + "</section>"
    )


def _effects(report: Report) -> str:
    entries = [
        ("Found", str(report.found)),
        ("Set", str(report.choice.setting) if report.kept else "the default stands"),
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
        (
            "Energy",
            _ENERGY.get(
                report.energy_method or "", report.energy_method or "unknown: the record has no end"
            ),
        ),
        ("Intervals", report.interval_method),
        ("Contract", contract(report.goal)),
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
                f"time {_signed(expected.time_ratio - 1)}, "
                f"energy {_signed(_less_one(expected.energy_ratio))} predicted; {expected.reason}",
            )
        )
    if report.overhead is not None:
        hook = show_time(report.overhead.hook_per_iteration_s)
        entries.append(
            (
                "Cost of kilter itself",
                f"{hook} per iteration in the job's path; "
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


def _table(
    heads: Sequence[str], rows: Iterable[str], *, numeric: Sequence[int], caption: str
) -> str:
    cells = "".join(
        f"<th scope='col'{' class=n' if i in numeric else ''}>{escape(head)}</th>"
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


def _label(report: Report) -> str:
    value = report.label.value
    return f"<span class='tag {value}'>{value}</span>"


def _bound(goal: Goal) -> float | None:
    """The slowdown that a safe setting stays below."""
    if goal.max_slowdown is None:
        return None
    return math.expm1(Contract(max_slowdown=goal.max_slowdown).bound)


def _signed(value: float | None) -> str:
    return show_fraction(value, signed=True).replace("-", "\u2212")


def _plain(value: float) -> str:
    return f"{value:g}"


def _percent(value: float) -> str:
    return f"{value:+g} %".replace("-", "\u2212") if value else "0"


def _ends(ends: tuple[float, float] | None) -> str:
    if ends is None or not all(map(math.isfinite, ends)):
        return ""
    return f"{100 * (ends[0] - 1):+.1f} to {100 * (ends[1] - 1):+.1f}".replace("-", "\u2212")


def _negated(ends: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if ends is None else (-ends[1], -ends[0])


def _less_one(ratio: float | None) -> float | None:
    return None if ratio is None else ratio - 1.0


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _time_unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return unit, 1.0 / size
    return "us", 1e6


_STYLE = """
:root{--bg:#fff;--ink:#191c20;--muted:#59626d;--grid:#e6e9ed;--axis:#9aa3ad;--panel:#f5f7f9;
--ours:#0b7a57;--base:#7b8591;--bound:#b4430b;--zone:#b4430b12;--judged:#0b7a570f;--trace:#2f5fb3}
@media(prefers-color-scheme:dark){:root{--bg:#131619;--ink:#e9ebee;--muted:#9ca6b1;--grid:#282e34;
--axis:#5f6a75;--panel:#1b1f24;--ours:#41cf9b;--base:#8d98a5;--bound:#f0935a;--zone:#f0935a17;
--judged:#41cf9b12;--trace:#7fa8ee}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:924px;margin:0 auto;padding:40px 32px 72px}
h1{font-size:34px;line-height:1.2;letter-spacing:-.015em;font-weight:650;margin:.15em 0 .4em}
h2{font-size:20px;line-height:1.3;font-weight:650;margin:0 0 .3em}
p{margin:0 0 .7em}section{margin-top:52px}
.kicker{color:var(--muted);font-size:14px;margin:0}
.lede code,code{font:14px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;
overflow-wrap:anywhere}
.facts{color:var(--muted);font-size:14px}
.tag{display:inline-block;font-size:12px;font-weight:600;line-height:1;padding:3px 7px;
border:1px solid currentColor;border-radius:9px;color:var(--muted);vertical-align:middle;
letter-spacing:0;white-space:nowrap}
.tag.measured{color:var(--ours)}.tag.simulated{color:var(--bound)}.tag.replayed{color:var(--trace)}
.tiles{display:grid;grid-template-columns:repeat(3,1fr);gap:16px;margin-top:30px}
.tile{background:var(--panel);border-radius:10px;padding:18px 20px 10px;font-size:14px}
.tile h2{font-size:14px;font-weight:600;color:var(--muted)}
.tile .value{font-size:30px;line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:0;
font-variant-numeric:tabular-nums}
.tile .spread{font-variant-numeric:tabular-nums;margin-bottom:8px}
.tile p:last-child{color:var(--muted)}.tile svg{max-width:260px;margin:2px 0 8px}
figure{margin:14px 0 0}figcaption{color:var(--muted);font-size:14px;margin-top:6px}
svg{display:block;width:100%;height:auto;overflow:visible}.narrow{display:none}
svg text{font-size:13px;fill:var(--ink);font-variant-numeric:tabular-nums}
svg .tick{fill:var(--muted);font-size:12px}svg .title{fill:var(--muted);font-size:13px}
svg .strong{font-weight:650;fill:var(--ours)}
svg .boundtext{fill:var(--bound);font-size:12px}svg .ourstext{fill:var(--ours);font-weight:600}
svg .basetext{fill:var(--muted)}svg .label{font-size:13px}
.grid{stroke:var(--grid)}.axis{stroke:var(--axis)}.band{stroke:var(--axis);stroke-width:1.5}
.bound{stroke:var(--bound);stroke-width:1.5;stroke-dasharray:5 4}
.zone{fill:var(--zone)}.judgedzone{fill:var(--judged)}
.curve{fill:none;stroke:var(--base);stroke-width:1.5;opacity:.55}
.whisker{stroke:var(--ours);stroke-width:2.5;stroke-linecap:round}.whisker.muted{stroke:var(--base)}
circle.ours{fill:var(--ours);stroke:var(--bg);stroke-width:1}
circle.base{fill:var(--base);stroke:var(--bg);stroke-width:1}
circle.probe{fill:var(--bg);stroke:var(--ours);stroke-width:1.6}
circle.judged{fill:var(--base);stroke:var(--ours);stroke-width:1.6}
.cross{stroke:var(--axis);stroke-width:1.4;fill:none}
.mean{stroke-width:1.3;opacity:.9}.mean.ours,.leader.ours{stroke:var(--ours)}
.mean.base,.leader.base{stroke:var(--base)}.leader{fill:none;stroke-width:1;stroke-dasharray:none}
.leader.bound{stroke-dasharray:none;stroke-width:1}
.cut{stroke:var(--axis);stroke-dasharray:2 3}
.trace{fill:none;stroke:var(--trace);stroke-width:1.6;stroke-linejoin:round}
.trace.clock{stroke:var(--ours)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th{text-align:left;font-weight:600;color:var(--muted);white-space:nowrap}
th,td{padding:6px 14px 6px 0;border-bottom:1px solid var(--grid);vertical-align:top}
td{white-space:nowrap}td.reason{white-space:normal;min-width:240px}
td.name{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:13px;
white-space:normal;overflow-wrap:anywhere;min-width:150px}
.n{text-align:right}.faint{color:var(--muted)}
td.bar{width:26%;min-width:90px;vertical-align:middle}
td.bar span{display:block;height:12px;border-radius:2px;background:var(--trace)}
dl{display:grid;grid-template-columns:minmax(120px,max-content) 1fr;gap:8px 24px;margin:0;
font-size:15px}
dt{color:var(--muted);max-width:230px;overflow-wrap:anywhere}dd{margin:0;overflow-wrap:anywhere}
@media(max-width:700px){main{padding:24px 16px 48px}h1{font-size:27px}section{margin-top:40px}
.tiles{grid-template-columns:1fr}.wide{display:none}.narrow{display:block}
dl{grid-template-columns:1fr;gap:2px}dd{margin-bottom:10px}}
@media print{main{max-width:none;padding:0}section,.tile{break-inside:avoid}}
""".replace("\n", "")
