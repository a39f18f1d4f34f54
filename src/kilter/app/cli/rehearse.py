"""`kilter rehearse`: a plan against the default, on a simulated device."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import msgspec

from kilter.act.rehearsal import compare
from kilter.app.cli.options import fraction, simulated
from kilter.core import codec
from kilter.core.errors import PlanError
from kilter.core.plan import Plan
from kilter.core.trace import IterationTrace
from kilter.core.units import show_fraction
from kilter.model.stats import Estimate, paired_ratio
from kilter.plan.guard import Contract
from kilter.sim.gpu import SimGpu

HELP = "Try a plan on a simulated device: interleaved blocks against the default."

EPILOG = """\
The contract is judged as on a real job; every figure is labelled simulated.

examples:
  kilter rehearse plan.json --trace runs/ID/trace.json --device sim:h200
  kilter rehearse plan.json --trace trace.json --device sim:v100 --pairs 40 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", type=Path, help="plan.json")
    parser.add_argument("--trace", metavar="TRACE", type=Path, required=True, help="trace.json")
    parser.add_argument("--device", type=simulated, required=True, metavar="sim:NAME")
    parser.add_argument("--max-slowdown", type=fraction, default=0.02, metavar="S", help="(2%%)")
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="of blocks (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the simulated card (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    plan = codec.load(args.plan, Plan)
    trace = codec.load(args.trace, IterationTrace)
    if args.pairs < 2:
        raise PlanError(f"--pairs {args.pairs}: an interval needs at least 2")
    if not trace.operations:
        raise PlanError(f"{args.trace}: the trace has no operations; nothing can be rehearsed")
    gpu = SimGpu(args.device, seed=args.seed)
    setting = plan.actions[-1].setting if plan.actions else gpu.settings()
    pairs = compare(gpu, trace, setting, pairs=args.pairs, seed=args.seed)
    time = paired_ratio([math.log(c.iteration_s / b.iteration_s) for b, c in pairs])
    energies = [math.log(c.energy_j / b.energy_j) for b, c in pairs if b.energy_j and c.energy_j]
    energy = paired_ratio(energies)
    assert time is not None
    contract = Contract(max_slowdown=args.max_slowdown)
    verdict = contract.judge(
        [math.log(c.iteration_s / b.iteration_s) for b, c in pairs],
        error_probability=contract.error_probability,
    )
    if args.json:
        document = {
            "schema": "kilter.rehearse/1",
            "label": "simulated",
            "device": gpu.info().name,
            "setting": setting,
            "pairs": args.pairs,
            "slowdown": time.ratio - 1,
            "slowdown_ci95": (time.low - 1, time.high - 1),
            "saving": None if energy is None else 1 - energy.ratio,
            "saving_ci95": None if energy is None else (1 - energy.high, 1 - energy.low),
            "max_slowdown": args.max_slowdown,
            "verdict": verdict.value,
        }
        print(msgspec.json.encode(document).decode())
        return 0
    print(f"{gpu.info().name}, {args.pairs} pairs of blocks: {setting} against the default")
    print(f"time     {_change(time)}")
    print(f"energy   {_change(energy)}")
    print(
        f"contract at most {show_fraction(args.max_slowdown)} slower: {verdict.value} [simulated]"
    )
    return 0


def _change(estimate: Estimate | None) -> str:
    if estimate is None:
        return "unknown"
    mean, low, high = (
        show_fraction(x - 1, signed=True) for x in (estimate.ratio, estimate.low, estimate.high)
    )
    return f"{mean} (95 %: {low} .. {high})"
