"""The plots of the report: sections of the page, each figure in a wide and a narrow form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

from kilter.app.report import svg
from kilter.app.report.build import Report, Series
from kilter.app.report.evidence import JUDGED, Probe, allowed_slowdown
from kilter.app.report.memory import how_kept
from kilter.app.report.page import section, tag
from kilter.app.report.summary import interval, less_one
from kilter.app.report.svg import NARROW, Frame, escape
from kilter.core.events import Block
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.core.units import MHZ, show_count, show_fraction, show_power, show_time

MOST_BLOCKS = 600
"""At most so many blocks are drawn; of more, every n-th."""


def strip(
    key: str, ends: tuple[float, float] | None, value: float | None, bound: float | None
) -> str:
    """The interval of a change on a line from zero, with the contract where there is one."""
    if ends is None or value is None or not all(map(math.isfinite, ends)):
        return ""
    low, high = min(0.0, ends[0]), max(0.0, ends[1], bound or 0.0)
    low, high = svg.padded((low, high), 0.12)
    frame = Frame(left=6, top=4, right=254, bottom=26, x_range=(low, high), y_range=(0.0, 1.0))
    y, zero = frame.y(0.5), frame.x(0.0)
    parts = [svg.line(frame.left, y, frame.right, y, "axis")]
    parts.append(svg.line(zero, y - 6, zero, y + 6, "axis"))
    words_begin = math.inf
    if bound is not None:
        x, words = frame.x(bound), f"contract {show_fraction(bound)}"
        words_begin = min(x, frame.right - svg.width(words))
        parts.append(svg.line(x, y - 10, x, y + 10, "bound"))
        parts.append(svg.text(words_begin, 42, words, "boundtext"))
    if zero + 8 < words_begin:
        parts.append(svg.text(zero, 42, "0", "tick", anchor="middle"))
    parts.append(svg.line(frame.x(ends[0]), y, frame.x(ends[1]), y, "whisker"))
    parts.append(svg.dot(frame.x(value), y, 5, "ours", signed(value)))
    description = f"{key} {signed(value)}{interval(ends)}"
    return svg.picture(
        f"strip-{key}", 260, 48, f"Interval of the change in {key}", description, "".join(parts)
    )


def figure(
    label: Label,
    key: str,
    title: str,
    lede: str,
    caption: str,
    draw: Callable[[float], tuple[float, str]],
    description: str,
) -> str:
    """A section with a plot; `draw` makes it for a width, and gives its height and its body."""
    drawings = svg.both_widths(key, title, description, draw)
    captioned = f"<figcaption>{escape(caption)} {tag(label)}</figcaption>"
    drawn = f"<figure>{drawings}{captioned}</figure>"
    return section(title, f"<p>{escape(lede)}</p>", drawn)


def trade_off(report: Report) -> str:
    """Energy over time of every setting tried, with the contract and the choice."""
    probes = [probe for probe in report.probes if probe.energy_ratio is not None]
    if not probes:
        return ""
    chosen = next((p for p in probes if p.chosen and p.phase == "confirm"), None)
    bound = allowed_slowdown(report.goal)

    def draw(width: float) -> tuple[float, str]:
        return _draw_trade_off(probes, chosen, bound, width)

    described = "; ".join(
        f"{p.setting} ({p.phase}): time {signed(p.time_ratio - 1)}, "
        f"energy {signed(less_one(p.energy_ratio))}"
        for p in probes
    )
    where = "on the simulated device" if report.label is Label.SIMULATED else "on the job"
    lede = f"Each point is a setting that was tried {where}, against the default beside it."
    if chosen is not None:
        lede += f" {chosen.setting} was chosen and then judged anew, on pairs of its own."
    return figure(
        report.label,
        "tradeoff",
        "Energy against time",
        lede,
        "Down is less energy, left is faster; labels are SM clocks, or what else was set. Open: a "
        "probe, from few pairs. Filled: judged, with 95 % interval.",
        draw,
        f"Relative to the default at 0, 0: {described}.",
    )


Point = tuple[Probe, float, float]
"""It is a probe with its changes of time and energy in percent."""


def _draw_trade_off(
    probes: Sequence[Probe], chosen: Probe | None, bound: float | None, width: float
) -> tuple[float, str]:
    height = 430.0 if width > NARROW else 380.0
    points = sorted(
        ((p, 100 * (p.time_ratio - 1), 100 * (less_one(p.energy_ratio) or 0.0)) for p in probes),
        key=lambda point: (point[0] is chosen, point[0].phase),
    )
    frame = _trade_off_frame(points, bound, width, height)
    axes = frame.axes(
        x_title="time per iteration, relative to the default",
        y_title="energy per iteration, relative to the default",
        x_text=_percent,
        y_text=_percent,
    )
    labels = svg.Labels(frame)
    zone = "" if bound is None else _contract_zone(frame, labels, 100 * bound)
    curve = _clock_curve(points)
    for probe, x, y in points:
        if _judged_twin(probe, probes):
            labels.avoid(frame.x(x), frame.y(y), 6.0)
        else:
            labels.mark(frame.x(x), frame.y(y))
        for (x1, y1), (x2, y2) in _whiskers(frame, probe, x, y):
            labels.avoid_line(x1, y1, x2, y2)
    labels.mark(frame.x(0.0), frame.y(0.0))
    line = [(frame.x(x), frame.y(y)) for x, y in curve]
    for (x1, y1), (x2, y2) in pairwise(line):
        labels.avoid_line(x1, y1, x2, y2)
    marks = [_mark(frame, probe, x, y, chosen) for probe, x, y in points]
    marks.append(svg.dot(frame.x(0.0), frame.y(0.0), 5, "base", "default"))
    words = _names(frame, labels, points, chosen)
    return height, "".join([zone, axes, svg.path(line, "curve"), *marks, *words])


def _trade_off_frame(
    points: Sequence[Point], bound: float | None, width: float, height: float
) -> Frame:
    """Around all points and the default; the contract only where it is near enough that it does
    not push them all into a corner."""
    xs, ys = [0.0, *(x for _, x, _ in points)], [0.0, *(y for _, _, y in points)]
    for probe, _, _ in points:
        if probe.chosen and probe.phase == "confirm":
            xs += [100 * (end - 1) for end in probe.time_ci95 or ()]
            ys += [100 * (end - 1) for end in probe.energy_ci95 or ()]
    if bound is not None and 100 * bound <= 2.5 * (max(xs) - min(xs)):
        xs.append(100 * bound)
    return Frame(
        left=58,
        top=34,
        right=width - 14,
        bottom=height - 50,
        x_range=svg.padded(xs, 0.12),
        y_range=svg.padded(ys, 0.12),
    )


def _contract_zone(frame: Frame, labels: svg.Labels, bound: float) -> str:
    """What is slower than the contract allows; or where that would begin, beyond the right edge."""
    if bound > frame.x_range[1]:
        words = f"contract {_percent(bound, 1)} \u2192"
        return labels.reserve(frame.right - svg.width(words), frame.top + 15, words, "boundtext")
    x, words = frame.x(bound), f"over {bound:.1f} %"
    inside = x + 6 + svg.width(words) <= frame.right
    labels.avoid_line(x, frame.top, x, frame.bottom)
    return (
        svg.rectangle(x, frame.top, frame.right - x, frame.bottom - frame.top, "zone")
        + svg.line(x, frame.top, x, frame.bottom, "bound")
        + labels.reserve(
            x + 6 if inside else x - 6 - svg.width(words), frame.top + 15, words, "boundtext"
        )
    )


def _clock_curve(points: Sequence[Point]) -> list[tuple[float, float]]:
    """From the default down through the settings that differ in the SM clock alone."""
    probes = [probe for probe, _, _ in points]
    alone = [
        (probe.setting.sm_clock_hz, (x, y))
        for probe, x, y in points
        if probe.setting.sm_clock_hz is not None
        and probe.setting == Setting(sm_clock_hz=probe.setting.sm_clock_hz)
        and not _judged_twin(probe, probes)
    ]
    return [(0.0, 0.0), *(point for _, point in sorted(alone, reverse=True))]


def _names(
    frame: Frame, labels: svg.Labels, points: Sequence[Point], chosen: Probe | None
) -> list[str]:
    """The chosen setting's name, and those of the others that find room beside their own mark."""
    probes, words = [probe for probe, _, _ in points], []
    for probe, x, y in reversed(points):
        left, top, name = frame.x(x), frame.y(y), _short(probe.setting)
        if probe is chosen:
            placed = (
                labels.put(left, top, text, "label strong", gap=gap)
                for gap in (9.0, 40.0, 70.0)
                for text in (f"chosen: {name}", name)
            )
            word = next((word for word in placed if word), "")
            words.append(word or labels.reserve(left + 9, top - 9, name, "label strong"))
        elif not _judged_twin(probe, probes):
            words.append(labels.put(left, top, name, "label"))
    words.append(labels.put(frame.x(0.0), frame.y(0.0), "default", "label"))
    return words


def _short(setting: Setting) -> str:
    """What is set; of the SM clock alone, its value alone."""
    alone = setting == Setting(sm_clock_hz=setting.sm_clock_hz)
    return str(setting).removeprefix("SM ") if alone else str(setting)


def _judged_twin(probe: Probe, probes: Sequence[Probe]) -> bool:
    """A probe whose setting was later judged: the judged point stands for it."""
    return probe.phase == "probe" and any(
        p.setting == probe.setting and p.phase == "confirm" for p in probes
    )


def _mark(frame: Frame, probe: Probe, x: float, y: float, chosen: Probe | None) -> str:
    note = (
        f"{probe.setting}, {probe.phase}: time {signed(probe.time_ratio - 1)}, energy "
        f"{signed(less_one(probe.energy_ratio))}, {show_count(probe.pairs, 'pair')}"
    )
    style = "whisker" if probe is chosen else "whisker muted"
    lines = [
        svg.line(x1, y1, x2, y2, style) for (x1, y1), (x2, y2) in _whiskers(frame, probe, x, y)
    ]
    kind = "probe" if probe.phase != "confirm" else "ours" if probe is chosen else "judged"
    radius = 4.5 if kind == "probe" else 6.0
    return "".join(lines) + svg.dot(frame.x(x), frame.y(y), radius, kind, note)


def _whiskers(
    frame: Frame, probe: Probe, x: float, y: float
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The intervals of a judged setting, as far as they are inside the plot."""
    if probe.phase != "confirm":
        return []
    found = []
    if probe.time_ci95 is not None:
        a, b = (_inside(100 * (end - 1), frame.x_range) for end in probe.time_ci95)
        found.append(((frame.x(a), frame.y(y)), (frame.x(b), frame.y(y))))
    if probe.energy_ci95 is not None:
        a, b = (_inside(100 * (end - 1), frame.y_range) for end in probe.energy_ci95)
        found.append(((frame.x(x), frame.y(a)), (frame.x(x), frame.y(b))))
    return found


def _inside(value: float, ends: tuple[float, float]) -> float:
    return min(max(value, ends[0]), ends[1])


FEWEST_BLOCKS = 6
"""Fewer points of the default alone show nothing that a number does not."""


def iteration_times(report: Report) -> str:
    """Iteration time of both arms over the blocks."""
    clean = [block for block in report.blocks if block.clean]
    tried = any(block.setting != report.found for block in report.blocks)
    if len(clean) < (2 if tried else FEWEST_BLOCKS):
        return ""

    def draw(width: float) -> tuple[float, str]:
        return _draw_iteration_times(report, clean, width)

    base, ours = (
        svg.micro(show_time(arm.iteration_s)) for arm in (report.baseline, report.governed)
    )
    lede = "The clocks as they were found: no other setting was tried."
    if report.memory is not None and _governs_memory(report):
        lede += how_kept(report.memory)
    if tried:
        lede = (
            "Blocks of the default and of the candidate take turns, so that whatever else changes "
            "on the machine falls on both alike."
        )
    left_out = len(report.blocks) - len(clean)
    judged = report.choice.setting != report.found
    means = "the pairs that were judged" if judged else f"the blocks of {_default_name(report)}"
    every = _thinning(report)
    thinned = f" One block in {every} is drawn." if every > 1 else ""
    return figure(
        report.label,
        "times",
        "Iteration time, block by block",
        lede,
        "Each point is the median of one block of iterations. Crosses are blocks that do not "
        f"count ({left_out}); lines are the means of {means}.{thinned}",
        draw,
        f"{show_count(len(report.blocks), 'block')}. {_default_name(report).capitalize()} {base}"
        + (f", governed {ours}." if judged else "."),
    )


def _governs_memory(report: Report) -> bool:
    memory = report.memory
    return memory is not None and memory.record.applied and not memory.moves_nothing


def _default_name(report: Report) -> str:
    """Under a memory budget it is not the job's default that was timed."""
    return "default clocks" if _governs_memory(report) else "default"


def _draw_iteration_times(
    report: Report, clean: Sequence[Block], width: float
) -> tuple[float, str]:
    wide = width > NARROW
    height = 360.0 if wide else 330.0
    times = [block.iteration_s for block in clean]
    unit, factor = _time_unit(max(times))
    bound = allowed_slowdown(report.goal)
    base_s, ours_s = report.baseline.iteration_s, report.governed.iteration_s
    lines: list[tuple[float, str, str]] = []
    if base_s is not None:
        lines.append((base_s, _default_name(report), "base"))
        if bound is not None:
            lines.append((base_s * (1 + bound), "contract", "bound"))
    if ours_s is not None and report.choice.setting != report.found:
        lines.append((ours_s, "governed", "ours"))
    spread = [factor * t for t in [*times, *(value for value, _, _ in lines)]]
    numbers = [block.number for block in report.blocks]
    frame = Frame(
        left=58,
        top=64,
        right=width - 11 - max((svg.width(name) for _, name, _ in lines), default=84.0) - 8,
        bottom=height - 50,
        x_range=svg.padded([min(numbers), max(numbers)], 0.02),
        y_range=svg.padded(spread),
    )
    parts = [_phases(report.blocks, frame)]
    parts.append(
        frame.axes(
            x_title="block",
            y_title=f"iteration time, {unit}",
            lift=38,
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
        y = min(max(frame.y(min(max(value, low), high)), frame.top + 6), frame.bottom - 6)
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
        if phase in JUDGED and any(block.arm == "candidate" for block in run):
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
            parts.append(svg.text(x + 5, frame.top + 14, "rehearsed", "tick"))
    return "".join(parts)


def power(report: Report) -> str:
    """Power over the device's time, with the clock beneath."""
    series = [s for s in report.series if any(p is not None for p in s.power_w)]
    if not series or max(len(s.device_t_s) for s in series) < 2:
        return ""

    def draw(width: float) -> tuple[float, str]:
        return _draw_power(report, series, width)

    powers = [p for s in series for p in s.power_w if p is not None]
    held = any(b.phase == "hold" and b.setting != report.found for b in report.blocks)
    held_text = " Shaded: a setting was held." if held else ""
    devices = "one line per device" if len(series) > 1 else series[0].device
    return figure(
        report.label,
        "power",
        "Power and clock over the run",
        "What the simulated device's sensors would have said."
        if any(device.backend == "sim" for device in report.devices)
        else "What the device's own sensors said.",
        f"Board power and SM clock, {devices}; points are means over short stretches.{held_text}",
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
    parts.append(upper.axes(x_title=x_title, y_title="power, W", x_labels=not clocks))
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
        parts.append(lower.axes(x_title=x_title, y_title="SM clock, MHz"))
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


def signed(value: float | None) -> str:
    """`+1.2 %`, with a true minus sign."""
    return show_fraction(value, signed=True).replace("-", "\u2212")


def _percent(value: float, decimals: int) -> str:
    return f"{value:+.{decimals}f} %".replace("-", "\u2212") if value else "0"


def _time_unit(seconds: float) -> tuple[str, float]:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return unit, 1.0 / size
    return "\u00b5s", 1e6
