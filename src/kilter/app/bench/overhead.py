"""`kilter bench overhead`: what watching costs a job, measured side by side."""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kilter.app.cli.options import fraction, positive
from kilter.app.cli.output import print_json
from kilter.app.report import build as report
from kilter.clocks.controller import FIRST_BLOCK
from kilter.connect.script import find_program
from kilter.core.errors import KilterError, UsageError
from kilter.core.label import Label
from kilter.core.units import show_time
from kilter.observe.trace_source import OPENS_AT

HELP = "What a session costs an unmodified training script: alternating runs with and without."
EPILOG = """\
Every run is a process of its own with the same stopwatch (one time per optimizer step). Steady
state is all steps after the first block may begin; the observation window, which --dry-run opens
and a governed run without --trace does not, is the steps around the one at which it opens, compared
with the same run's steady state. Nothing is set (--dry-run).

examples:
  kilter bench overhead examples/train_gpt.py --steps 150
  kilter bench overhead --repeats 3 --json train_resnet50.py --steps 200
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """One process. Times are the script's own, by the stopwatch."""

    arm: str
    steps: int
    iteration_s: float
    """It is the mean over the steady state."""
    window_s: float
    """It is the mean over the `FIRST_BLOCK` steps from the one before the profiler is prepared."""
    slowest_s: float
    """It is the longest step of those."""
    kilter_iteration_s: float | None
    """What the session itself measured (median of its baseline blocks)."""
    hook_cost_s: float | None
    """We take this time in the program's thread per iteration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=2, metavar="N", help="runs per arm (2)")
    parser.add_argument("--device", default="auto", help="auto (default), nvml, sim:NAME or null")
    parser.add_argument(
        "--bar", type=fraction, default=0.005, metavar="F", help="bar for the steady state (0.5%%)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("command", nargs=argparse.PARSER, metavar="SCRIPT", help="with its ARGS")


def run(args: argparse.Namespace) -> int:
    find_program(args.command)  # so that a missing script is said here, and not by every process
    runs: list[TimedRun] = []
    with tempfile.TemporaryDirectory(prefix="kilter-bench-") as scratch:
        for number in range(args.repeats):
            # plain, kilter, kilter, plain, ...: a slow trend of the machine cancels
            arms = ("plain", "kilter") if number % 2 == 0 else ("kilter", "plain")
            for arm in arms:
                print(f"run {number + 1} of {args.repeats}, {arm} ...", file=sys.stderr)
                place = Path(scratch, f"{number}-{arm}")
                runs.append(_measure(arm, args.command, args.device, place))
    plain = statistics.fmean(r.iteration_s for r in runs if r.arm == "plain")
    ours = statistics.fmean(r.iteration_s for r in runs if r.arm == "kilter")
    steady = ours / plain - 1
    window = statistics.fmean(r.window_s / r.iteration_s for r in runs if r.arm == "kilter") - 1
    hooks = [r.hook_cost_s for r in runs if r.hook_cost_s is not None]
    own = [r.kilter_iteration_s / r.iteration_s - 1 for r in runs if r.kilter_iteration_s]
    document = {
        "command": args.command,
        "device": args.device,
        "plain_iteration_s": plain,
        "kilter_iteration_s": ours,
        "steady_overhead": steady,
        "steady_spread": _spread(runs),
        "window_overhead": window,
        "window_iterations": FIRST_BLOCK,
        "hook_cost_s": statistics.fmean(hooks) if hooks else None,
        "own_clock_difference": statistics.fmean(own) if own else None,
        "bar": args.bar,
        "runs": runs,
    }
    if args.json:
        print_json("kilter.bench.overhead/1", Label.MEASURED, document)
        return 0
    print(f"plain      {show_time(plain)} per iteration")
    print(f"kilter     {show_time(ours)} per iteration")
    verdict = "met" if steady < args.bar else "missed"
    print(
        f"steady     {steady * 100:+.2f} % (runs of one arm differ by "
        f"{_spread(runs) * 100:.2f} %; bar {args.bar * 100:g} %: {verdict})"
    )
    print(f"window     {window * 100:+.1f} % over {FIRST_BLOCK} iterations")
    if hooks:
        print(f"hooks      {show_time(statistics.fmean(hooks))} per iteration, window included")
    if own:
        print(f"own clock  kilter's iteration time differs by {statistics.fmean(own) * 100:+.2f} %")
    return 0


def _spread(runs: list[TimedRun]) -> float:
    """Largest relative difference between runs of the same arm."""
    spreads = []
    for arm in ("plain", "kilter"):
        times = [r.iteration_s for r in runs if r.arm == arm]
        spreads.append(max(times) / min(times) - 1)
    return max(spreads)


def _measure(arm: str, command: list[str], device: str, place: Path) -> TimedRun:
    place.mkdir()
    file = place / "times"
    if arm == "kilter":
        options = ["--dry-run", "--max-slowdown", "2%", "--device", device, "--out", f"{place}/run"]
        command = ["-m", "kilter", "run", *options, *command]
    done = subprocess.run(
        [sys.executable, "-m", "kilter.connect.stopwatch", str(file), *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise KilterError(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    times = [float(line) for line in file.read_text().split()]
    steady_from = OPENS_AT + FIRST_BLOCK
    if len(times) < steady_from + 20:
        raise UsageError(
            f"{command[0]} made {len(times)} optimizer steps; at least {steady_from + 20} are "
            "needed: give it more"
        )
    steps = [b - a for a, b in itertools.pairwise(times)]
    observed = steps[OPENS_AT - 2 : OPENS_AT - 2 + FIRST_BLOCK]
    found = report.build(place / "run") if arm == "kilter" else None
    return TimedRun(
        arm=arm,
        steps=len(times),
        iteration_s=statistics.fmean(steps[steady_from:]),
        window_s=statistics.fmean(observed),
        slowest_s=max(observed),
        kilter_iteration_s=found.baseline.iteration_s if found else None,
        hook_cost_s=found.overhead.hook_per_iteration_s if found and found.overhead else None,
    )
