"""The memory part of the page: what came of the budget, and one pass with its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kilter.app.report import page, svg
from kilter.app.report.memory import (
    MemoryReport,
    Timeline,
    beside_plans,
    details,
    result,
    without_plan,
)
from kilter.app.report.page import definitions, table, tag, tile
from kilter.app.report.plots import figure, signed
from kilter.app.report.svg import NARROW, Frame, escape
from kilter.core.label import Label
from kilter.core.units import (
    GIB,
    KIB,
    MIB,
    show_bytes,
    show_count,
    show_fraction,
    show_pace,
    show_time,
)

LANES = (
    ("compute", "compute"),
    ("recompute", "recompute"),
    ("stall", "waits"),
    ("out", "offload"),
    ("in", "prefetch"),
)
"""Each lane of the simulator has its name in the picture, from top to bottom."""
LANE, LANE_STEP = 13.0, 21.0
"""A bar, and a lane, have these heights in pixels."""
COLUMN = 1.5
"""Levels are drawn as the highest in a column of so many pixels."""
APART = 0.7
"""Bars of one lane that are closer than so many pixels are drawn as one."""


def section(memory: MemoryReport | None, found: Timeline | None) -> str:
    """Tiles, the picture of a pass, and the rest in words. Empty without a memory budget."""
    if memory is None:
        return ""
    drawn = "" if found is None else _picture(memory, found)
    numbers = definitions((name[:1].upper() + name[1:], text) for name, text in details(memory))
    return (
        f"<section class='tiles' aria-label='Memory'>{_tiles(memory)}</section>{drawn}"
        f"{_kinds(memory)}{page.section('Memory in numbers', numbers)}"
    )


def claim(memory: MemoryReport) -> str:
    """The headline of a page that is about memory alone."""
    record = memory.record
    if record.applied and memory.feasible and not memory.moves_nothing and record.peak_bytes:
        before, after = show_bytes(record.plain_peak_bytes), show_bytes(record.peak_bytes)
        change = memory.pass_slowdown if memory.slowdown is None else memory.slowdown
        time = "" if change is None else f", {show_pace(change)}{beside_plans(memory)}"
        over = ""
        if memory.within is False:
            over = f", over the budget of {show_bytes(record.budget_bytes)}"
        return f"{after} of memory instead of {before}{over}{time}"
    text = result(memory).text
    return text[:1].upper() + text[1:]


def _tiles(memory: MemoryReport) -> str:
    record = memory.record
    before = show_bytes(record.plain_peak_bytes)
    peak = record.peak_bytes
    spread, value = f"{before} with everything kept", show_bytes(peak)
    if peak is None:
        value, spread = before, "with everything kept"
    budget = f"Budget {show_bytes(record.budget_bytes)}: {record.budget}."
    peak_tile = tile(memory.label, "Peak memory", value, spread, budget)
    return peak_tile + _time_tile(memory) + _offloaded_tile(memory)


def _time_tile(memory: MemoryReport) -> str:
    """What an iteration takes, measured, or else a pass by its plan; empty if neither is known."""
    record, plan = memory.record, memory.plan
    known, change = memory.slowdown is not None, memory.slowdown
    if record.own_checkpointing and not known:
        if record.iteration_s is None:
            return ""
        took = (
            "An iteration with the model's own checkpointing; with everything kept: not measured."
        )
        return tile(memory.label, "Time per iteration", show_time(record.iteration_s), "", took)
    bound = "" if record.bound_s is None else f"bound {show_time(record.bound_s)} a pass"
    if known:
        times = (
            f"{show_time(record.plain_iteration_s)} with everything kept, "
            f"{show_time(record.iteration_s)} under the plan."
        )
        if memory.unplanned_share:
            times += f" {without_plan(memory)}."
        return tile(memory.label, "Time per iteration", signed(change), bound, times)
    if plan is None:
        return ""
    times = (
        f"Forward and backward {show_time(plan.compute_s)} with everything kept, "
        f"{show_time(plan.iteration_s)} under the plan."
    )
    return tile(Label.SIMULATED, "Time of a pass", signed(memory.pass_slowdown), bound, times)


def _offloaded_tile(memory: MemoryReport) -> str:
    """What the largest pass offloads by its plan; without one what all passes have offloaded."""
    record, plan = memory.record, memory.plan
    host = f"{show_bytes(memory.host_bytes)} of host memory."
    if plan is None:
        copied = f"{show_bytes(record.in_bytes)} copied back"
        return tile(
            memory.label, "Offloaded in all passes", show_bytes(record.out_bytes), copied, host
        )
    copied = (
        f"{show_bytes(plan.in_bytes)} copied back; "
        f"{show_fraction(plan.hidden)} of the copies hidden behind compute"
    )
    counts = (
        f"{show_count(plan.swapped, 'tensor')} offloaded, {plan.recomputed} recomputed, "
        f"{plan.kept} kept; "
    )
    offloaded = show_bytes(plan.out_bytes)
    return tile(Label.SIMULATED, "Offloaded in a pass", offloaded, copied, counts + host)


def _kinds(memory: MemoryReport) -> str:
    """Passes of other shapes have plans of their own: the last one for each plain peak."""
    plans = {plan.peak_before_bytes: plan for plan in memory.in_force}
    if len(plans) < 2:
        return ""
    rows = [
        (
            show_bytes(before),
            show_bytes(plan.peak_bytes),
            "yes" if memory.fits(plan) else "no",
            str(plan.swapped),
            str(plan.recomputed),
            signed(plan.iteration_s / plan.compute_s - 1) if plan.compute_s else "",
        )
        for before, plan in sorted(plans.items(), reverse=True)
    ]
    heads = ("Peak as it is", "Under its plan", "Fits", "Offloaded", "Recomputed", "Time")
    columns = [(head, "" if head == "Fits" else "n") for head in heads]
    return page.section(
        "Kinds of passes",
        f"<p>{len(plans)} kinds of iterations differ in their peak; each has its own plan, which "
        "serves smaller ones too where sizes keep changing or layers are left out at random. "
        f"{tag(Label.SIMULATED)}</p>",
        table(columns, rows, "Plans by kind of pass"),
    )


def _picture(memory: MemoryReport, found: Timeline) -> str:
    def draw(width: float) -> tuple[float, str]:
        return _draw(found, width)

    beside = " Kept is meant beside the model's own checkpointing, which is on."
    beside *= memory.record.own_checkpointing
    before, after = max(found.before_bytes), max(found.after_bytes)
    swapped = len(found.schedule.moves)
    recomputed = found.problem.tensors(found.schedule.recomputed)
    return figure(
        Label.SIMULATED,
        "memory",
        "Device memory over one pass, and the schedule",
        "Forward (light), then backward (dark); beneath them what is recomputed, where compute "
        "waits, and the copies to the host (offload) and back (prefetch).",
        "Operation times, sizes and levels are those observed in the first iterations; the "
        "schedule is the one in force, run by the event simulator. Grey is drawn at the times of "
        f"the plan.{beside} memory.chrome.json beside this page has every move, for Perfetto.",
        draw,
        f"Peak {show_bytes(before)} with everything kept, {show_bytes(after)} under the plan, "
        f"budget {show_bytes(found.problem.budget_bytes)}; {show_count(swapped, 'tensor')} "
        f"offloaded, {recomputed} recomputed in {show_time(found.end_s)}.",
    )


def _draw(found: Timeline, width: float) -> tuple[float, str]:
    wide = width > NARROW
    legend, top = svg.legend(
        (
            ("kept", f"everything kept, peak {show_bytes(max(found.before_bytes))}", False),
            ("planned", f"under the plan, {show_bytes(max(found.after_bytes))}", True),
            ("bound", f"the plan's budget {show_bytes(found.problem.budget_bytes)}", False),
        ),
        width,
    )
    top += 20  # the title of the axis
    lanes = [(lane, name) for lane, name in LANES if any(s.lane == lane for s in found.spans)]
    level_bottom = top + (250.0 if wide else 210.0)
    time, factor = ("s", 1.0) if found.end_s >= 1.0 else ("ms", 1e3)
    unit, size = _unit(max(found.before_bytes))
    highest = max(*found.before_bytes, found.problem.budget_bytes) / size
    left, right = 82.0, width - 14
    x_range = (0.0, factor * found.end_s)
    upper = Frame(
        left=left,
        top=top,
        right=right,
        bottom=level_bottom,
        x_range=x_range,
        y_range=(0.0, 1.06 * highest),
    )
    bottom = level_bottom + 16 + LANE_STEP * len(lanes)
    lower = Frame(
        left=left, top=level_bottom, right=right, bottom=bottom, x_range=x_range, y_range=(0.0, 1.0)
    )
    budget = upper.y(found.problem.budget_bytes / size)
    parts = [
        legend,
        upper.axes(x_title="", y_title=f"device memory, {unit}", x_labels=False),
        _levels(upper, found, found.after_bytes, factor, size, "planned", closed=True),
        _levels(upper, found, found.before_bytes, factor, size, "kept"),
        svg.line(left, budget, right, budget, "bound"),
    ]
    for number, (lane, name) in enumerate(lanes):
        y = level_bottom + 14 + LANE_STEP * number
        parts.append(svg.text(left - 8, y + LANE - 2.5, name, "tick", anchor="end"))
        parts += _bars(lower, found, lane, y, factor)
    parts.append(lower.x_axis(f"time in the pass, {time}"))
    return bottom + 46, "".join(parts)


def _levels(
    frame: Frame,
    found: Timeline,
    levels: Sequence[int],
    factor: float,
    size: float,
    style: str,
    *,
    closed: bool = False,
) -> str:
    """Steps; within a column of pixels the highest one."""
    starts = [frame.x(factor * start_s) for start_s in found.starts_s]
    points: list[tuple[float, float] | None] = []
    for _, group in groupby(
        zip(starts, levels, strict=True), key=lambda item: int(item[0] / COLUMN)
    ):
        column = list(group)
        x, y = column[0][0], frame.y(max(level for _, level in column) / size)
        if points and points[-1] is not None:
            points.append((x, points[-1][1]))
        points.append((x, y))
    last = points[-1]
    assert last is not None
    points.append((frame.x(factor * found.end_s), last[1]))
    if closed:
        points += [(frame.x(factor * found.end_s), frame.bottom), (starts[0], frame.bottom)]
    return svg.path(points, style)


@dataclass(slots=True)
class _Bar:
    begin: float
    end: float
    notes: list[str]
    style: str


def _bars(frame: Frame, found: Timeline, lane: str, y: float, factor: float) -> Iterable[str]:
    bars: list[_Bar] = []
    for span in sorted((s for s in found.spans if s.lane == lane), key=lambda s: s.start_s):
        begin, end = frame.x(factor * span.start_s), frame.x(factor * span.end_s)
        style = lane
        if lane == "compute":
            style = "backward" if span.index >= found.backward_from else "forward"
        note = style
        if lane in ("out", "in", "recompute"):
            interval = found.problem.intervals[span.index]
            note = f"{interval.name}, {show_bytes(interval.size_bytes)}"
        if bars and begin - bars[-1].end < APART and bars[-1].style == style:
            bars[-1].end = max(bars[-1].end, end)
            bars[-1].notes.append(note)
        else:
            bars.append(_Bar(begin, end, [note], style))
    for bar in bars:
        note = bar.notes[0] if len(set(bar.notes)) == 1 else f"{len(bar.notes)} tensors"
        yield (
            f'<rect x="{bar.begin:.1f}" y="{y:.1f}" width="{max(bar.end - bar.begin, 0.8):.1f}" '
            f'height="{LANE:g}" class="lane {bar.style}"><title>{escape(note)}</title></rect>'
        )


def _unit(size_bytes: int) -> tuple[str, float]:
    for unit, size in (("GiB", GIB), ("MiB", MIB)):
        if size_bytes >= size:
            return unit, float(size)
    return "KiB", float(KIB)
