"""`kilter learn`: fits the predictor of time and energy at every clock, and shows its errors."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kilter.app.cli.options import output_file
from kilter.app.cli.output import print_json, show_progress
from kilter.app.fields import taken
from kilter.app.learning import (
    TrainingPoint,
    errors_of,
    fit,
    need_sklearn,
    points_of_runs,
    points_of_table,
)
from kilter.clocks.plan.predictor import LearningError, Predictor
from kilter.core.codec import write_atomically
from kilter.core.errors import FileError, UsageError
from kilter.core.history import History, default_file
from kilter.core.label import Label
from kilter.core.past_run import PastRun
from kilter.core.units import show_count
from kilter.device.sim.replay import load_tables

HELP = """\
Fit a predictor of relative time and energy at every clock and power limit, by gradient boosting
with the constraints that time never rises and power never falls with a clock, and print how wrong
it is on workloads and GPUs that it was not fitted to.
"""

EPILOG = """\
TABLE is a CSV of measurements as `kilter bench clocks` reads it. --history adds what the governed
runs of this machine have compared (measured ones; --simulated takes those on simulated devices in
their place, and then no table). A run that is given the file (kilter run --predictor FILE) orders
its first probes by it. What is chosen is decided by measurement under the contract, whatever the
file says.

examples:
  kilter learn zeus_v100_a40.csv
  kilter learn a.csv b.csv --history --out predictor.json
  kilter run --predictor predictor.json train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", nargs="*", metavar="TABLE", help="clock tables (CSV)")
    parser.add_argument(
        "--history",
        nargs="?",
        const="",
        metavar="FILE",
        help="add the governed runs of this history (default: the user's own)",
    )
    parser.add_argument(
        "--simulated", action="store_true", help="of the history, the runs on simulated devices"
    )
    parser.add_argument("--out", type=output_file, metavar="FILE", help="write the predictor there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if not args.table and args.history is None:
        raise UsageError("nothing to learn from: name a TABLE, or add --history")
    if args.simulated and (args.table or args.history is None):
        raise UsageError("--simulated learns from --history alone: no measured table is mixed in")
    for table in args.table:
        if Path(table).is_dir():
            raise UsageError(
                f"{table}: is a directory; what a run compared: kilter learn --history"
            )
    points: list[TrainingPoint] = []
    sources = [Path(table).name for table in args.table]
    for table in args.table:
        show_progress(f"reading {table} ...")
        points += points_of_table(load_tables(table))
    label = Label.SIMULATED if args.simulated else Label.MEASURED
    if args.history is not None:
        kept, source = _kept_runs(args, label)
        points += points_of_runs(kept)
        sources.append(source)
    if args.table:
        label = Label.REPLAYED
    need_sklearn()
    errors = errors_of(points, show_progress)
    show_progress(f"fitting to {show_count(len(points), 'setting')} ...")
    predictor = fit(points, label=label, sources=sources, errors=errors)
    show_progress()
    if args.out is not None:
        write_atomically(args.out, msgspec.json.encode(predictor))
    if not args.json:
        print(_text(predictor, args.out))
        return 0
    found = taken(predictor, ("sources", "workloads", "rows", "errors", "why_not_used"))
    out = None if args.out is None else str(args.out)
    print_json("kilter.learn/1", predictor.label, found | {"out": out})
    return 0


def _kept_runs(args: argparse.Namespace, label: Label) -> tuple[Sequence[PastRun], str]:
    """The runs of this label in the history, and how they are named as a source."""
    file = Path(args.history) if args.history else default_file(os.environ)
    runs = History(file).runs(label)
    if not runs and not args.table:
        raise FileError(f"{file}: no {label.value} run is kept there")
    return runs, f"{show_count(len(runs), f'{label.value} run')} of {file.name}"


def _text(predictor: Predictor, out: Path | None) -> str:
    lines = [
        f"fitted to {show_count(predictor.rows, 'setting')} of "
        f"{show_count(predictor.workloads, 'workload')} "
        f"[{predictor.label.value}]: {', '.join(predictor.sources)}"
    ]
    errors: dict[str, LearningError] = {error.left_out: error for error in predictor.errors}
    for left_out, what in (("workload", "workload"), ("gpu", "GPU")):
        error = errors.get(left_out)
        lines.append(
            f"  {what} left out: not known: without any one {what} too few settings are left to "
            "learn from"
            if error is None
            else f"  {what} left out ({error.groups} in turn): relative time wrong by "
            f"{error.time * 100:.1f} % on average, energy by {error.energy * 100:.1f} % "
            f"(without a model {error.time_without * 100:.1f} and "
            f"{error.energy_without * 100:.1f} %)"
        )
    if predictor.why_not_used is not None:
        lines.append(f"  no run will use this model: {predictor.why_not_used}")
    if out is not None:
        use = "" if predictor.why_not_used else f"; use it with kilter run --predictor {out}"
        lines.append(f"{out}: written{use}")
    return "\n".join(lines)
