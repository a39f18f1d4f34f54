"""`kilter plan`: a plan from an iteration trace, without running the job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kilter.app import plan_memory, plan_operations, plan_sections
from kilter.app.cli.options import add_goal_arguments, goal_of, output_file, simulated
from kilter.clocks.plan.governor import plan_of
from kilter.clocks.rehearsal import Rehearsal
from kilter.core import codec
from kilter.core.errors import PlanError
from kilter.core.label import Label
from kilter.core.plan import Plan
from kilter.core.trace import IterationTrace
from kilter.core.units import show_fraction
from kilter.device.sim.gpu import SimGpu

HELP = "Plan from an iteration trace (the trace.json of a run), without running the job."

EPILOG = """\
`clocks` runs the whole online loop (probe, confirm, hold) on a simulated card of the given kind.
The plan's predicted effects are labelled simulated: the job itself has the last word.

examples:
  kilter plan clocks runs/ID/trace.json --device sim:h200
  kilter plan clocks trace.json --device sim:a100 --max-slowdown 5% -o plan.json
  kilter plan memory trace.json --memory-budget 24GiB
"""

PLAN_REHEARSAL_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(
        dest="kind", required=True, metavar="clocks|sections|operations|memory"
    )
    parts = (("memory", plan_memory), ("sections", plan_sections), ("operations", plan_operations))
    for name, module in parts:
        kind = kinds.add_parser(
            name,
            help=module.HELP,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(kind)
        kind.set_defaults(act=module.run)
    clocks = kinds.add_parser("clocks", help="one setting of the clocks for the whole job")
    clocks.add_argument("trace", metavar="TRACE", type=Path, help="trace.json of a run")
    clocks.add_argument("--device", type=simulated, required=True, metavar="sim:NAME")
    add_goal_arguments(clocks, max_slowdown=0.02)
    clocks.add_argument("--seed", type=int, default=0, help="of the simulated card (0)")
    clocks.add_argument(
        "-o", dest="out", metavar="FILE", type=output_file, help="write the plan here"
    )
    clocks.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    clocks.set_defaults(act=_clocks)


def run(args: argparse.Namespace) -> int:
    return int(args.act(args))


def _clocks(args: argparse.Namespace) -> int:
    plan = _plan_clocks(args)
    if args.out is not None:
        codec.save(args.out, plan)
    if args.json:
        print(codec.encode(plan).decode())
    else:
        _tell(plan)
    return 0


def _plan_clocks(args: argparse.Namespace) -> Plan:
    trace = codec.load(args.trace, IterationTrace)
    if not trace.operations:
        raise PlanError(f"{args.trace}: the trace has no operations; nothing can be planned")
    gpu = SimGpu(args.device, seed=args.seed)
    found = gpu.settings()
    rehearsal = Rehearsal(
        gpu, trace, goal_of(args), apply=gpu.set, record=lambda event: None, seed=args.seed
    )
    if not rehearsal.finish(seconds=PLAN_REHEARSAL_S):
        print(
            f"kilter plan: stopped after {PLAN_REHEARSAL_S:.0f} s; the best so far", file=sys.stderr
        )
    return plan_of(rehearsal.program.choice, found, Label.SIMULATED)


def _tell(plan: Plan) -> None:
    energy = None if plan.effect.energy_ratio is None else plan.effect.energy_ratio - 1
    print(f"plan    {', '.join(str(a.setting) for a in plan.actions) or 'do nothing'}")
    print(
        f"effect  {show_fraction(energy, signed=True)} energy, "
        f"{show_fraction(plan.effect.time_ratio - 1, signed=True)} time [{plan.label.value}]"
    )
    print(f"reason  {plan.reason}")
