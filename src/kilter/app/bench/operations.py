"""`kilter bench operations`: clocks per unit operation against switch latency, all simulated."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kilter.app.bench.workloads import OPERATION_WORKLOADS, iteration
from kilter.app.cli.options import fraction, output_file, simulated
from kilter.app.cli.output import print_json, show_progress
from kilter.app.plan_operations import STRATEGIES, as_json, compare
from kilter.app.report import svg
from kilter.app.report.page import document, table
from kilter.app.report.svg import Frame, escape
from kilter.clocks.operation_costs import costs_of
from kilter.core.codec import write_atomically
from kilter.core.label import Label
from kilter.core.units import show_fraction, show_time
from kilter.device.sim.profile import Profile, load_profile

HELP = "clocks per unit operation against switch latency; every energy is simulated"
EPILOG = """\
ResNet-50, VGG-16 and a GPT of GPT-3-XL's size, from the shapes of their layers. A switch takes the
given time, in which nothing else runs; every strategy pays for its switches. A strategy is useless
from the latency on at which it saves no more than the best single setting, or breaks the bound.

examples:
  kilter bench operations
  kilter bench operations --devices sim:a100 --max-slowdown 5% --json
  kilter bench operations --html operations.html
"""

LATENCIES_S = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
DEVICES = ("rtx3080ti", "v100", "a100")
ELEMENT_BYTES = {"a100": 2, "h200": 2}
"""These profiles were fitted with bfloat16 FLOPs; the others with float32."""
_NAMES = {
    "default": "default",
    "best_static": "best single setting",
    "arithmetic_intensity": "by arithmetic intensity",
    "exhaustive": "exhaustive per operation",
    "kilter": "kilter",
}


_OF_STRATEGY = ("saving", "slowdown", "within_bound", "switches")


class OperationsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy on one problem."""

    device: str
    workload: str
    training: bool
    switch_latency_s: float
    strategy: str
    saving: float
    slowdown: float
    within_bound: bool
    switches: int


class Useless(msgspec.Struct, frozen=True, kw_only=True):
    """From which tested latency on a strategy is no better than the best single setting."""

    device: str
    workload: str
    training: bool
    strategy: str
    from_switch_latency_s: float | None
    """It is None if it is still better at the longest latency."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", nargs="+", type=simulated, metavar="sim:NAME", help="(all that were fitted)"
    )
    parser.add_argument("--max-slowdown", type=fraction, default=0.02, metavar="B", help="(2%%)")
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write a page with the plots"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    profiles = args.devices or [load_profile(name) for name in DEVICES]
    rows = list(_rows(profiles, args.max_slowdown))
    useless = list(_useless(rows))
    if args.html is not None:
        write_atomically(args.html, _page(rows, useless, args.max_slowdown).encode())
    if args.json:
        result: dict[str, Any] = {
            "max_slowdown": args.max_slowdown,
            "rows": msgspec.to_builtins(rows),
            "useless": msgspec.to_builtins(useless),
        }
        print_json("kilter.bench.operations/1", Label.SIMULATED, result)
    else:
        _tell(rows, useless)
    return 0


def _rows(profiles: Sequence[Profile], max_slowdown: float) -> Iterator[OperationsRow]:
    for profile in profiles:
        for workload, layers in OPERATION_WORKLOADS.items():
            for training in (True, False):
                show_progress(f"{profile.name} {workload}")
                bytes_ = ELEMENT_BYTES.get(profile.name, 4)
                trace = iteration(layers(), element_bytes=bytes_, training=training)
                costs = costs_of(profile, trace)
                for switch_s in LATENCIES_S:
                    found = compare(costs, switch_s=switch_s, max_slowdown=max_slowdown)
                    shown = as_json(costs, found, switch_s=switch_s, max_slowdown=max_slowdown)
                    for strategy in STRATEGIES:
                        yield OperationsRow(
                            device=profile.name,
                            workload=workload,
                            training=training,
                            switch_latency_s=switch_s,
                            strategy=strategy,
                            **{key: shown[strategy][key] for key in _OF_STRATEGY},
                        )
    show_progress()


def _useless(rows: Sequence[OperationsRow]) -> Iterator[Useless]:
    groups: dict[tuple[str, str, bool], dict[tuple[str, float], OperationsRow]] = {}
    for row in rows:
        group = groups.setdefault((row.device, row.workload, row.training), {})
        group[row.strategy, row.switch_latency_s] = row
    for (device, workload, training), group in groups.items():
        for strategy in ("arithmetic_intensity", "exhaustive", "kilter"):
            useful = [
                switch_s
                for switch_s in LATENCIES_S
                if group[strategy, switch_s].within_bound
                and group[strategy, switch_s].saving
                > group["best_static", switch_s].saving + 0.0005
            ]
            after = [s for s in LATENCIES_S if s > max(useful, default=-1.0)]
            yield Useless(
                device=device,
                workload=workload,
                training=training,
                strategy=strategy,
                from_switch_latency_s=after[0] if after else None,
            )


def _tell(rows: Sequence[OperationsRow], useless: Sequence[Useless]) -> None:
    print(f"{'device':<10} {'workload':<22} {'strategy':<24}", end="")
    print("".join(f"{_latency(s):>20}" for s in LATENCIES_S))
    lines: dict[tuple[str, str, bool, str], list[OperationsRow]] = {}
    for row in rows:
        key = (row.device, row.workload, row.training, row.strategy)
        lines.setdefault(key, []).append(row)
    for (device, workload, training, strategy), line in lines.items():
        if strategy == "default":
            continue
        name = f"{workload} {'training' if training else 'forward'}"
        cells = "".join(f"{_cell(row):>20}" for row in line)
        print(f"{device:<10} {name:<22} {_NAMES[strategy]:<24}{cells}")
    print("\nSaving / slowdown against the default [simulated]; ! breaks the bound.")
    print("Useless from this switch latency on:")
    for entry in useless:
        name = f"{entry.workload} {'training' if entry.training else 'forward'}"
        print(f"  {entry.device:<10} {name:<22} {_NAMES[entry.strategy]:<24} {_from(entry)}")


def _cell(row: OperationsRow) -> str:
    broken = "" if row.within_bound else "!"
    if row.slowdown > 1.0:
        return f"{1 + row.slowdown:.0f} x time {broken}"
    return f"{show_fraction(row.saving)} / {show_fraction(row.slowdown)}{broken}"


def _latency(switch_s: float) -> str:
    return show_time(switch_s) if switch_s else "0"


def _from(entry: Useless) -> str:
    if entry.from_switch_latency_s is None:
        return f"useful up to {_latency(LATENCIES_S[-1])}"
    if entry.from_switch_latency_s == 0.0:
        return "from 0"
    return f"from {_latency(entry.from_switch_latency_s)}"


# The page.

_STYLE = """<style>
.line { fill: none; stroke-width: 1.8 }
.line.kilter { stroke: var(--ours) }
.line.best_static { stroke: var(--base) }
.line.arithmetic_intensity { stroke: var(--trace) }
.line.exhaustive { stroke: var(--bound) }
.line.broken { stroke-dasharray: 3 4; opacity: .7 }
circle.kilter { fill: var(--ours) } circle.best_static { fill: var(--base) }
circle.arithmetic_intensity { fill: var(--trace) } circle.exhaustive { fill: var(--bound) }
</style>"""
_RANGES = {"saving": (-0.05, 0.25), "slowdown": (0.0, 0.3)}
"""What is drawn; values outside end at the edge."""


def _page(rows: Sequence[OperationsRow], useless: Sequence[Useless], max_slowdown: float) -> str:
    zero = [r for r in rows if r.switch_latency_s == 0.0 and r.strategy == "kilter"]
    real = [r for r in rows if r.switch_latency_s == 1e-2 and r.strategy == "kilter"]
    static = {
        (r.device, r.workload, r.training): r.saving
        for r in rows
        if r.switch_latency_s == 1e-2 and r.strategy == "best_static"
    }
    gained = max(r.saving - static[r.device, r.workload, r.training] for r in real)
    answer = (
        f"Clocks per operation could save up to {show_fraction(max(r.saving for r in zero))} if "
        f"switching were free; at 10 ms per switch they save at most {show_fraction(gained)} more "
        "than one setting for the whole iteration."
    )
    plots = "".join(
        f"<section><h2>{escape(f'{workload}, ' + ('training' if training else 'forward only'))}"
        f"</h2><p>Saving against the default, at most {show_fraction(max_slowdown)} slower; dashed "
        f"where the bound is broken. On sim:{escape(device)}.</p>"
        + "".join(
            f"<figure>{_plot(rows, device, workload, training, what)}"
            f"<figcaption>{what.capitalize()}</figcaption></figure>"
            for what in _RANGES
        )
        + "</section>"
        for device, workload, training in static
    )
    lines: dict[tuple[str, str], list[str]] = {}
    for entry in useless:
        name = f"{entry.workload}, {'training' if entry.training else 'forward only'}"
        lines.setdefault((entry.device, name), []).append(_from(entry))
    shown = [tuple(map(escape, (*key, *values))) for key, values in lines.items()]
    columns = (
        ("Device", ""),
        ("Workload", ""),
        ("By arithmetic intensity", "n"),
        ("Exhaustive per operation", "n"),
        ("kilter", "n"),
    )
    return document(
        "kilter bench operations",
        f"{_STYLE}<header><p class='kicker'>kilter bench operations "
        f"<span class='tag simulated'>simulated</span></p><h1>{escape(answer)}</h1></header>"
        f"<section><h2>Where each strategy becomes useless</h2><p>The tested switch latency from "
        f"which on it breaks the bound or saves no more than the best single setting.</p>"
        f"{table(columns, shown, 'Where each strategy becomes useless')}</section>{plots}",
    )


def _plot(
    rows: Sequence[OperationsRow], device: str, workload: str, training: bool, what: str
) -> str:
    least, most = _RANGES[what]
    frame = Frame(
        left=64.0, top=52.0, right=840.0, bottom=222.0, x_range=(0.0, 4.0), y_range=(least, most)
    )
    parts = [frame.grid(6, lambda value, decimals: f"{value * 100:.0f} %")]
    for place, switch_s in enumerate(LATENCIES_S):
        words = _latency(switch_s)
        parts.append(svg.text(frame.x(place), 242.0, words, "tick", anchor="middle"))
    parts.append(svg.text(frame.right, 262.0, "time of one switch", "title", anchor="end"))
    x = frame.left
    for strategy in STRATEGIES[1:]:
        line = [
            row
            for row in rows
            if (row.device, row.workload, row.training, row.strategy)
            == (device, workload, training, strategy)
        ]
        points = [
            (frame.x(i), frame.y(min(max(getattr(row, what), least), most)))
            for i, row in enumerate(line)
        ]
        for i in range(len(points) - 1):
            broken = "" if line[i].within_bound and line[i + 1].within_bound else " broken"
            parts.append(svg.path(points[i : i + 2], f"line {strategy}{broken}"))
        for (cx, cy), row in zip(points, line, strict=True):
            note = f"{_NAMES[strategy]}: {_cell(row)}, {row.switches} switches"
            parts.append(svg.dot(cx, cy, 4.0, strategy, note))
        parts.append(svg.dot(x + 4.0, 24.0, 4.0, strategy, _NAMES[strategy]))
        parts.append(svg.text(x + 14.0, 28.0, _NAMES[strategy], "tick"))
        x += 40.0 + svg.width(_NAMES[strategy])
    key = f"{device}-{workload}-{'training' if training else 'forward'}-{what}"
    title = f"{what.capitalize()} on {device}"
    description = f"{what.capitalize()} of each strategy against the time of one switch."
    return svg.picture(key, 860.0, 270.0, title, description, "".join(parts))
