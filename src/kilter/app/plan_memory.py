"""`kilter plan memory TRACE`: what is offloaded, when it is prefetched, and what is recomputed.

All planners work on the same problem and the event simulator judges each; every predicted number is
labelled simulated. `--chrome FILE` writes the schedule as a Chrome trace with the memory level
before and after, for Perfetto.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from kilter.app.cli.options import gigabytes_per_s, output_file, size
from kilter.app.cli.output import print_json
from kilter.app.fields import taken
from kilter.app.report.memory import chrome_of
from kilter.core import codec
from kilter.core.errors import PlanError, UsageError
from kilter.core.plan import MemoryBudget
from kilter.core.trace import IterationTrace
from kilter.core.units import MIB, show_bytes, show_fraction, show_time
from kilter.memory.plan.choose import PLANNERS, MemoryPlan, plan
from kilter.memory.plan.problem import H200_PCIE5, Link, Problem, problem_of

HELP = "what to offload, recompute and keep, so that an iteration fits a memory budget"
EPILOG = """\
The link's rates default to those measured on one H200 with PCIe 5 x16; give your machine's own.

examples:
  kilter plan memory runs/ID/trace.json --memory-budget 24GiB
  kilter plan memory trace.json --memory-budget 60% --planner exact --json
  kilter plan memory trace.json --memory-budget 60% --chrome schedule.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", type=Path, help="trace.json of a run")
    parser.add_argument(
        "--memory-budget", required=True, metavar="B", help="24GiB, or 60%% of the trace's peak"
    )
    parser.add_argument(
        "--planner", choices=list(PLANNERS), default="mix", help="how to plan (mix)"
    )
    add_link_arguments(parser)
    parser.add_argument(
        "--min-bytes",
        type=size,
        default=MIB,
        metavar="N",
        help="tensors smaller than this stay on the device (1MiB)",
    )
    parser.add_argument(
        "--chrome", type=output_file, metavar="FILE", help="write a Chrome trace here"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """The table of the link, in GB/s."""
    rates = (
        ("--to-host", H200_PCIE5.to_host_bytes_per_s, "rate of copies from device to host alone"),
        (
            "--to-device",
            H200_PCIE5.to_device_bytes_per_s,
            "rate of copies from host to device alone",
        ),
        (
            "--both",
            H200_PCIE5.both_bytes_per_s,
            "sum of both rates while copies run in both directions",
        ),
    )
    for option, rate, meaning in rates:
        parser.add_argument(
            option,
            type=gigabytes_per_s,
            default=rate,
            metavar="GB/s",
            help=f"{meaning} ({rate / 1e9:g})",
        )


def link_of(args: argparse.Namespace) -> Link:
    """The link that the arguments describe."""
    return Link(
        to_host_bytes_per_s=args.to_host,
        to_device_bytes_per_s=args.to_device,
        both_bytes_per_s=args.both,
        latency_s=H200_PCIE5.latency_s,
    )


def run(args: argparse.Namespace) -> int:
    trace = codec.load(args.trace, IterationTrace)
    link = link_of(args)
    whole = problem_of(trace, link=link, budget_bytes=1, min_bytes=args.min_bytes)
    if not whole.compute_s:
        raise PlanError("no operation of the trace takes time, so that no copy can be planned")
    budget_bytes = budget_of(args.memory_budget, whole.peak_bytes)
    problem = problem_of(trace, link=link, budget_bytes=budget_bytes, min_bytes=args.min_bytes)
    found = answer(problem, args.planner)
    if args.chrome is not None:
        chosen = plan(problem, args.planner)
        if not chosen.feasible:
            raise PlanError("there is no feasible schedule to draw")
        drawn = chrome_of(problem, chosen.schedule)
        codec.write_atomically(args.chrome, msgspec.json.encode(drawn))
    if args.json:
        print_json("kilter.plan-memory/1", found.pop("label"), found)
    else:
        _tell(found, problem)
    return 0 if found["feasible"] else 1


def budget_of(text: str, peak_bytes: int) -> int:
    """`24GiB`, or a share of the peak without a plan: `60%`."""
    budget = MemoryBudget.parse(text)
    if budget.share is not None:
        return int(budget.share * peak_bytes)
    if budget.size_bytes is None:
        raise UsageError("--memory-budget auto: a trace has no card; give a size or a share")
    return budget.size_bytes


def answer(problem: Problem, planner: str) -> dict[str, Any]:
    """The JSON object: the chosen planner's plan, and beside it what every planner makes of it."""
    has_solver = importlib.util.find_spec("highspy") is not None
    if planner == "exact" and not has_solver:
        raise UsageError("the exact planner needs HiGHS: pip install 'kilter[exact]'")
    plans = {
        name: plan(problem, name, bound=has_solver, clock=time.perf_counter)
        for name in PLANNERS
        if has_solver or name != "exact"
    }
    chosen = plans[planner]
    moves = {move.interval: move for move in chosen.schedule.moves}
    recomputed = frozenset(chosen.schedule.recomputed)
    swap, recompute, keep = [], [], []
    for index, interval in enumerate(problem.intervals):
        entry = taken(interval, ("name", "size_bytes", "after", "before", "tensors"))
        if index in moves:
            swap.append(entry | {"release": moves[index].release, "load": moves[index].load})
        elif index in recomputed:
            recompute.append(entry | {"recompute_s": interval.recompute_s})
        else:
            keep.append(entry)
    return {
        "label": chosen.label,
        **_numbers(chosen),
        "budget_bytes": problem.budget_bytes,
        "peak_before_bytes": problem.peak_bytes,
        "compute_s": problem.compute_s,
        "host_bytes": chosen.host_bytes,
        "hidden": chosen.hidden,
        "link": asdict(problem.link),
        "actions": {"swap": swap, "recompute": recompute, "keep": keep},
        **{name: _numbers(value) for name, value in plans.items()},
        **({} if has_solver else {"exact": None}),
    }


def _numbers(value: MemoryPlan) -> dict[str, Any]:
    names = ("feasible", "peak_bytes", "iteration_s", "bound_s", "planner", "solve_s", "stall_s")
    moved = ("recompute_s", "out_bytes", "in_bytes", "swapped", "recomputed")
    return taken(value, names + moved)


def _tell(found: dict[str, Any], problem: Problem) -> None:
    before, budget = show_bytes(problem.peak_bytes), show_bytes(problem.budget_bytes)
    print(f"peak    {before} -> {show_bytes(found['peak_bytes'])} (budget {budget})")
    slowdown = found["iteration_s"] / problem.compute_s - 1
    print(
        f"time    {show_time(found['iteration_s'])} ({show_fraction(slowdown, signed=True)}), "
        f"bound {show_time(found['bound_s'])} [{found['label'].value}]"
    )
    swapped, recomputed, kept = (
        sum(entry["tensors"] for entry in found["actions"][action])
        for action in ("swap", "recompute", "keep")
    )
    print(
        f"actions {swapped} offloaded, {recomputed} recomputed, {kept} kept; "
        f"{show_bytes(found['out_bytes'])} out, {show_fraction(found['hidden'])} hidden, "
        f"{show_bytes(found['host_bytes'])} of host memory"
    )
    for name in PLANNERS:
        other = found[name]
        if other is None:
            print(f"{name:<9} needs: pip install 'kilter[exact]'")
            continue
        print(
            f"{name:<9} {show_time(other['iteration_s']):>9}  planned in "
            f"{show_time(other['solve_s'])}{'' if other['feasible'] else '  does not fit'}"
        )
