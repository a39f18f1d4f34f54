"""`kilter plan operations TRACE`: clocks for every unit operation, with what switching costs."""

from __future__ import annotations

import argparse
import math
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kilter.app.cli.options import fraction, simulated
from kilter.app.cli.output import print_json
from kilter.clocks.operation_costs import Costs, costs_of
from kilter.clocks.plan.operations import Assignment, Planned, assignment, by_operation, plan
from kilter.core import codec
from kilter.core.errors import FileError, PlanError, UsageError
from kilter.core.label import Label
from kilter.core.trace import IterationTrace
from kilter.core.units import show_count, show_fraction, show_time
from kilter.observe.flops import torch_flops
from kilter.observe.kineto import read_kineto

HELP = "clocks for every unit operation of an iteration"
EPILOG = """\
Least energy within the slowdown bound over the operations in their order and all clock pairs, when
each switch of clocks takes S seconds in which nothing else runs. Held against the best single
setting, against each operation's clocks by its arithmetic intensity, and against the best clocks of
each operation by itself; both of these pay for their switches as well. Everything is simulated.

examples:
  kilter plan operations runs/ID/trace.json --device sim:a100
  kilter plan operations trace.json --device sim:rtx3080ti --switch-latency-s 0 --json
  kilter plan operations trace.json --device sim:v100 --switch-latency-s inf --max-slowdown 5%
"""

STRATEGIES = ("default", "best_static", "arithmetic_intensity", "exhaustive", "kilter")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, help="trace.json of a run, or a Kineto trace"
    )
    parser.add_argument("--device", type=simulated, required=True, metavar="sim:NAME")
    parser.add_argument(
        "--switch-latency-s",
        type=float,
        metavar="S",
        help="time of one switch; inf: never (the 95th percentile of the device's)",
    )
    parser.add_argument("--max-slowdown", type=fraction, default=0.02, metavar="B", help="(2%%)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    switch_s = args.device.switch.p95_s if args.switch_latency_s is None else args.switch_latency_s
    if not switch_s >= 0.0:
        raise UsageError(f"--switch-latency-s {switch_s}: a switch takes 0 s or more")
    costs = costs_of(args.device, load_trace(args.trace))
    begin = time.perf_counter()
    found = compare(costs, switch_s=switch_s, max_slowdown=args.max_slowdown)
    plan_s = time.perf_counter() - begin
    if args.json:
        result = as_json(costs, found, switch_s=switch_s, max_slowdown=args.max_slowdown)
        result |= {"device": args.device.name, "plan_s": plan_s}
        print_json("kilter.plan.operations/1", Label.SIMULATED, result)
    else:
        _tell(costs, found, switch_s)
    return 0


def load_trace(path: Path) -> IterationTrace:
    """A trace of kilter's, or a Kineto trace; `FileError` names what is wrong with the file."""
    try:
        with open(path, "rb") as file:
            head = file.read(1 << 16)
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from error
    ours = head.lstrip()[:1] == b"{" and b'"schema"' in head and b'"traceEvents"' not in head
    if ours:
        return codec.load(path, IterationTrace)

    def warn(text: str) -> None:
        print(f"kilter plan: warning: {path}: {text}", file=sys.stderr)

    trace = read_kineto(path, flops=torch_flops() if find_spec("torch") else None, warn=warn)
    if trace.timeline == "host" and not any(op.flops or op.bytes_moved for op in trace.operations):
        raise PlanError(
            f"{path}: tells neither kernels nor FLOPs nor bytes, so that what a clock costs is "
            "unknown: profile with ProfilerActivity.CUDA, or with record_shapes=True (counting "
            "FLOPs needs torch here)"
        )
    return trace


class ComparedPlans(msgspec.Struct, frozen=True, kw_only=True):
    """All strategies on one problem."""

    assignments: dict[str, Assignment]
    planned: Planned


def compare(costs: Costs, *, switch_s: float, max_slowdown: float) -> ComparedPlans:
    """Every strategy of `STRATEGIES` on the same tables."""
    problem = costs.problem(switch_s=switch_s, max_slowdown=max_slowdown)
    planned = plan(problem)
    default = np.zeros(len(costs.operations), dtype=np.intp)
    paths = {
        "default": assignment(problem, default),
        "best_static": planned.static,
        "arithmetic_intensity": assignment(problem, costs.by_intensity),
        "exhaustive": by_operation(problem, max_slowdown),
        "kilter": planned.best,
    }
    return ComparedPlans(assignments=paths, planned=planned)


def as_json(
    costs: Costs, found: ComparedPlans, *, switch_s: float, max_slowdown: float
) -> dict[str, Any]:
    """The fields that `--json` prints; null where a plan that switches would never end."""
    rows = {
        name: _row(found.assignments[name], found.assignments["default"], max_slowdown)
        for name in STRATEGIES
    }
    best = found.planned.best
    rows["kilter"] |= {
        "gap": found.planned.gap,
        "settings": [
            msgspec.to_builtins(costs.settings[k]) | {"operations": int(count)}
            for k, count in zip(*np.unique(best.path, return_counts=True), strict=True)
        ],
        "plan": _stretches(costs, best),
    }
    return {
        "operations": len(costs.operations),
        "settings": len(costs.settings),
        "switch_latency_s": switch_s if math.isfinite(switch_s) else None,
        "max_slowdown": max_slowdown,
        **rows,
    }


def _row(assigned: Assignment, default: Assignment, max_slowdown: float) -> dict[str, Any]:
    slowdown = assigned.time_s / default.time_s - 1.0
    finite = math.isfinite(assigned.time_s)
    return {
        "saving": 1.0 - assigned.energy_j / default.energy_j if finite else None,
        "slowdown": slowdown if finite else None,
        "switches": assigned.switches,
        "within_bound": slowdown <= max_slowdown * (1.0 + 1e-9) + 1e-12,
        "iteration_s": assigned.time_s if finite else None,
        "energy_j": assigned.energy_j if finite else None,
    }


def _stretches(costs: Costs, assigned: Assignment) -> list[dict[str, Any]]:
    """Operations in a row with one setting."""
    path = assigned.path
    begins = [0, *(np.flatnonzero(path[1:] != path[:-1]) + 1).tolist()]
    return [
        {"from_operation": i, "setting": msgspec.to_builtins(costs.settings[path[i]])}
        for i in begins
    ]


def _tell(costs: Costs, found: ComparedPlans, switch_s: float) -> None:
    default = found.assignments["default"]
    print(answer(found, switch_s))
    print()
    for name, assigned in found.assignments.items():
        if math.isinf(assigned.time_s):
            print(f"{name:<22} never ends: it switches {assigned.switches} times")
            continue
        print(
            f"{name:<22} saves {show_fraction(1 - assigned.energy_j / default.energy_j):>7}, "
            f"{show_fraction(assigned.time_s / default.time_s - 1, signed=True):>7} time, "
            f"{assigned.switches} switches"
        )
    print()
    print(
        f"{show_count(len(costs.operations), 'operation')}, {len(costs.settings)} clock pairs; any "
        f"other plan saves at most {show_fraction(found.planned.gap)} more [simulated]"
    )


def answer(found: ComparedPlans, switch_s: float) -> str:
    """One sentence: whether clocks inside the iteration are worth their switches."""
    default, best = found.assignments["default"], found.planned.best
    latency = "never possible" if math.isinf(switch_s) else f"{show_time(switch_s)} each"
    if switch_s == 0.0:
        latency = "free"
    saves = show_fraction(1 - best.energy_j / default.energy_j)
    if not best.switches:
        what = "the default" if not best.path[0] else "one setting for the whole iteration"
        return f"With switches {latency}, {what} is best: it saves {saves} of the energy."
    alone = show_fraction(1 - found.planned.static.energy_j / default.energy_j)
    return (
        f"With switches {latency}, {best.switches} of them save {saves} of the energy, where the "
        f"best single setting saves {alone}."
    )
