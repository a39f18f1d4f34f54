"""`kilter rehearse`: a plan against the default, on a simulated device."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from kilter.app.cli.options import fraction, simulated
from kilter.app.cli.output import print_json
from kilter.app.fields import taken
from kilter.app.report.memory import timeline_of
from kilter.clocks.plan.guard import Contract, Verdict
from kilter.clocks.rehearsal import compare
from kilter.core import codec
from kilter.core.errors import PlanError, UsageError
from kilter.core.label import Label
from kilter.core.plan import Plan
from kilter.core.trace import IterationTrace
from kilter.core.units import show_bytes, show_count, show_fraction, show_time
from kilter.device.sim.gpu import SimGpu
from kilter.memory.plan.simulate import simulate
from kilter.model.stats import Estimate, paired_ratio

REHEARSAL_SCHEMA = "kilter.rehearse/1"

HELP = "Try a plan on a simulated device: interleaved blocks against the default."

EPILOG = """\
The contract is judged as on a real job; a memory schedule is run by the event simulator, with the
link that it was planned for. Every figure is labelled simulated.

examples:
  kilter rehearse plan.json --trace runs/ID/trace.json --device sim:h200
  kilter rehearse plan.json --trace trace.json --device sim:v100 --pairs 40 --json
  kilter rehearse runs/ID/plan.json --trace runs/ID/trace.json      a plan of memory alone
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", type=Path, help="plan.json")
    parser.add_argument("--trace", metavar="TRACE", type=Path, required=True, help="trace.json")
    parser.add_argument(
        "--device", type=simulated, metavar="sim:NAME", help="not needed for memory alone"
    )
    parser.add_argument("--max-slowdown", type=fraction, default=0.02, metavar="S", help="(2%%)")
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="of blocks (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the simulated card (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    plan = codec.load(args.plan, Plan)
    trace = codec.load(args.trace, IterationTrace)
    memory = _memory(plan, trace)
    if plan.memory is not None and memory is None and not plan.actions:
        raise PlanError(
            f"{args.trace}: lists no required data, and {args.plan} is a plan of memory; give the "
            "trace.json beside it"
        )
    if args.device is None and (plan.actions or memory is None):
        raise UsageError("clocks are rehearsed on a simulated device: add --device sim:NAME")
    if args.device is None:
        assert memory is not None
        if args.json:
            print_json(REHEARSAL_SCHEMA, Label.SIMULATED, {"memory": memory})
        else:
            _tell_memory(memory)
        return 0
    if args.pairs < 2:
        raise UsageError(f"--pairs {args.pairs}: an interval needs at least 2")
    if not trace.operations:
        raise PlanError(f"{args.trace}: the trace has no operations; nothing can be rehearsed")
    gpu = SimGpu(args.device, seed=args.seed)
    setting = plan.actions[-1].setting if plan.actions else gpu.settings()
    pairs = compare(gpu, trace, setting, pairs=args.pairs, seed=args.seed)
    ratios = [math.log(c.iteration_s / b.iteration_s) for b, c in pairs]
    time = paired_ratio(ratios)
    energies = [math.log(c.energy_j / b.energy_j) for b, c in pairs if b.energy_j and c.energy_j]
    energy = paired_ratio(energies)
    assert time is not None
    contract = Contract(max_slowdown=args.max_slowdown)
    verdict = contract.judge(ratios, error_probability=contract.error_probability, most=len(ratios))
    if verdict is Verdict.DEGRADED and not contract.broken(ratios):
        verdict = Verdict.UNDECIDED
    if args.json:
        document = {
            "device": gpu.info().name,
            "setting": setting,
            "pairs": args.pairs,
            "slowdown": time.ratio - 1,
            "slowdown_ci95": (time.low - 1, time.high - 1),
            "saving": None if energy is None else 1 - energy.ratio,
            "saving_ci95": None if energy is None else (1 - energy.high, 1 - energy.low),
            "max_slowdown": args.max_slowdown,
            "verdict": verdict.value,
            "memory": memory,
        }
        print_json(REHEARSAL_SCHEMA, Label.SIMULATED, document)
        return 0
    count = show_count(args.pairs, "pair")
    print(f"{gpu.info().name}, {count} of blocks: {setting} against the default")
    print(f"time     {_change(time)}")
    print(f"energy   {_change(energy)}")
    print(
        f"contract at most {show_fraction(args.max_slowdown)} slower: {verdict.value} [simulated]"
    )
    if memory is not None:
        _tell_memory(memory)
    return 0


def _memory(plan: Plan, trace: IterationTrace) -> dict[str, object] | None:
    """What the event simulator says of the plan's memory schedule."""
    found = timeline_of(trace, plan)
    if found is None:
        return None
    outcome = simulate(found.problem, found.schedule)
    return {
        "budget_bytes": found.problem.budget_bytes,
        "peak_before_bytes": found.problem.peak_bytes,
        "compute_s": found.problem.compute_s,
        **taken(outcome, _OF_OUTCOME),
    }


_OF_OUTCOME = (
    *("peak_bytes", "iteration_s", "stall_s", "recompute_s", "out_bytes", "in_bytes", "faults"),
)


def _tell_memory(memory: dict[str, Any]) -> None:
    before, peak = show_bytes(memory["peak_before_bytes"]), show_bytes(memory["peak_bytes"])
    slower = show_fraction(memory["iteration_s"] / memory["compute_s"] - 1, signed=True)
    print(f"memory   peak {before} -> {peak}, budget {show_bytes(memory['budget_bytes'])}")
    print(
        f"pass     {show_time(memory['compute_s'])} -> {show_time(memory['iteration_s'])} "
        f"({slower}); waits {show_time(memory['stall_s'])}, "
        f"recomputed {show_time(memory['recompute_s'])}; {show_bytes(memory['out_bytes'])} out, "
        f"{show_bytes(memory['in_bytes'])} in [simulated]"
    )
    for fault in memory["faults"]:
        print(f"fault    {fault}")


def _change(estimate: Estimate | None) -> str:
    if estimate is None:
        return "unknown"
    mean, low, high = (
        show_fraction(x - 1, signed=True) for x in (estimate.ratio, estimate.low, estimate.high)
    )
    return f"{mean} (95 %: {low.removesuffix(' %')} to {high})"
