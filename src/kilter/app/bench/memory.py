"""`kilter bench memory`: planners side by side on synthetic chains. All simulated.

Measured rows of real training come from `benchmarks/memory_h200.py`, which needs a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from typing import Any

import numpy as np

from kilter.app.cli.options import argument
from kilter.app.cli.output import print_json
from kilter.core.errors import PlanError, UsageError
from kilter.core.label import Label
from kilter.core.units import show_time
from kilter.memory.plan.choose import PLANNERS, SWAP_ONLY, plan
from kilter.memory.plan.exact import relax
from kilter.memory.plan.problem import IdleInterval, Link, Problem

HELP = "memory planners on synthetic chains of layers; every figure but solve_s is simulated"
EPILOG = """\
A chain has OPS/2 operations forward and the same backward at twice the time; each keeps one tensor
from forward to backward. `ratio` is the time to move all of them over the forward time, `budget`
the share of them that may stay. Times are over compute alone; `of_bound` is the planner's own bound
(swap only, or with recomputing at the producer's forward time) over its time.

examples:
  kilter bench memory
  kilter bench memory --operations 992,4992 --ratios 2.5,8 --budgets 0.3 --json
"""
OF_A_LAYER = 8
"""A layer has so many operations; their times and sizes are drawn once and repeated."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--operations", type=_numbers, default=(192, 992), metavar="N,N", help="(192,992)"
    )
    parser.add_argument(
        "--ratios", type=_numbers, default=(1.5, 2.5, 4, 8), metavar="R,R", help="(1.5,2.5,4,8)"
    )
    parser.add_argument(
        "--budgets", type=_numbers, default=(0.15, 0.4), metavar="B,B", help="(0.15,0.4)"
    )
    parser.add_argument(
        "--planners", default=",".join(PLANNERS), metavar="P,P", help=f"({','.join(PLANNERS)})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the chain (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@argument
def _numbers(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0.0 < value < math.inf for value in values):
        raise UsageError(f"{text!r}: positive numbers with commas between them")
    return values


def chain(operations: int, ratio: float, budget: float, *, seed: int) -> Problem:
    """A stack of like layers, forward and backward."""
    rng = np.random.default_rng(seed)
    forward = max(2, operations // 2)
    repeats = forward // OF_A_LAYER + 1
    times = np.tile(1e-3 * rng.uniform(0.3, 1.7, OF_A_LAYER), repeats)[:forward]
    sizes = np.tile(rng.integers(4_000_000, 64_000_000, OF_A_LAYER), repeats)[:forward]
    count = 2 * forward
    level = np.zeros(count, dtype=np.int64)
    intervals = []
    for k in range(forward):
        level[k : count - k] += sizes[k]
        if count - 1 - 2 * k >= 2:
            intervals.append(
                IdleInterval(
                    name=f"{k}",
                    size_bytes=int(sizes[k]),
                    after=k,
                    before=count - 1 - k,
                    recompute_s=float(times[k]),
                )
            )
    rate = float(sizes.sum() / (ratio * times.sum()))
    return Problem(
        operation_s=(*times.tolist(), *(2 * times[::-1]).tolist()),
        resident_bytes=tuple(level.tolist()),
        intervals=tuple(intervals),
        link=Link(
            to_host_bytes_per_s=rate,
            to_device_bytes_per_s=rate,
            both_bytes_per_s=2 * 0.92 * rate,  # both at once, as measured on PCIe 5
        ),
        budget_bytes=int(budget * level.max()),
    )


def run(args: argparse.Namespace) -> int:
    rows = []
    for operations in args.operations:
        for ratio in args.ratios:
            for budget in args.budgets:
                problem = chain(int(operations), ratio, budget, seed=args.seed)
                found = _rows(problem, args.planners.split(","), int(operations), ratio, budget)
                rows += found
                if not args.json:
                    _tell(found)
    if args.json:
        print_json("kilter.bench-memory/1", Label.SIMULATED, {"rows": rows})
    return 0


def _rows(
    problem: Problem, planners: list[str], operations: int, ratio: float, budget: float
) -> list[dict[str, Any]]:
    has_solver = importlib.util.find_spec("highspy") is not None
    bounds = {
        swap_only: relax(problem, recompute=not swap_only).bound_s if has_solver else None
        for swap_only in (True, False)
    }
    rows = []
    for name in planners:
        if name == "exact" and not has_solver:
            continue
        row: dict[str, Any] = {
            "operations": operations,
            "intervals": len(problem.intervals),
            "ratio": ratio,
            "budget": budget,
            "planner": name,
        }
        try:
            found = plan(problem, name, clock=time.perf_counter)
        except PlanError as error:
            rows.append(row | {"feasible": False, "reason": str(error)})
            continue
        bound_s = bounds[name in SWAP_ONLY]
        row |= {
            "feasible": found.feasible,
            "slowdown": found.iteration_s / problem.compute_s - 1,
            "bound": None if bound_s is None else bound_s / problem.compute_s - 1,
            "of_bound": None if bound_s is None else bound_s / found.iteration_s,
            "solve_s": found.solve_s,
            "swapped_bytes": found.out_bytes,
            "recomputed": found.recomputed,
            "hidden": found.hidden,
        }
        rows.append(row)
    return rows


def _tell(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        head = f"{row['operations']:>5} ops, ratio {row['ratio']:g}, budget {row['budget']:.0%}"
        if not row["feasible"]:
            print(f"{head}  {row['planner']:<9} {row.get('reason', 'does not fit')}")
            continue
        of_bound = "" if row["of_bound"] is None else f"{row['of_bound']:.3f} of the bound"
        print(
            f"{head}  {row['planner']:<9} {1 + row['slowdown']:.4f}  {of_bound}  "
            f"in {show_time(row['solve_s'])}"
        )
