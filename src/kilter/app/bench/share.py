"""`kilter bench share`: the policies of fair sharing side by side, on placements, in simulation."""

from __future__ import annotations

import argparse

import msgspec

from kilter.app.cli.options import positive, some_of
from kilter.app.cli.output import print_json
from kilter.app.cli.share import figures, placement
from kilter.core.label import Label
from kilter.core.units import show_duration, show_fraction
from kilter.sharing.placements import NAMES
from kilter.sharing.plan.policies import SHARING_POLICIES
from kilter.sharing.simulate import simulate

HELP = "Policies of fair sharing, side by side, on simulated machines."
EPILOG = """\
`fixed` is the placement as it begins; `even` is the baseline to beat.

examples:
  kilter bench share
  kilter bench share --placements p1,p4,machine.json --policies even,maxmin --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--placements",
        type=lambda text: text.split(","),
        default=list(NAMES),
        metavar="FILE,...",
        help="rehearsal files, or p1 to p6 (all six)",
    )
    parser.add_argument(
        "--policies",
        type=some_of(SHARING_POLICIES),
        default=["fixed", "even", "thesis_literal", "thesis", "maxmin"],
        metavar="P,...",
        help="(all)",
    )
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="of the noise (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    rows = []
    if not args.json:
        print(
            f"{'placement':<10} {'policy':<15} max SD  max/min   Jain  max rho  busy     "
            "makespan  samples/s  moves"
        )
    for name in args.placements:
        machine = placement(name)
        for policy in args.policies:
            for seed in range(args.seeds):
                seeded = msgspec.structs.replace(machine, seed=machine.seed + seed)
                outcome = simulate(seeded, SHARING_POLICIES[policy])
                row = {
                    "placement": name,
                    "policy": policy,
                    "seed": seed,
                    **figures(outcome),
                    "max_rho": max(job.rho for job in outcome.jobs),
                    "decisions": len(outcome.decisions),
                }
                rows.append(row)
                if not args.json:
                    busy, makespan = show_fraction(outcome.utilisation), outcome.makespan_s
                    print(
                        f"{name:<10} {policy:<15} {row['max_slowdown']:6.2f}  "
                        f"{row['max_over_min']:7.2f}  {outcome.jain:.3f}  "
                        f"{row['max_rho']:7.2f}  {busy:<7}  {show_duration(makespan):>8}  "
                        f"{outcome.samples_per_s:9.0f}  {len(outcome.decisions):5}",
                        flush=True,
                    )
    if args.json:
        print_json("kilter.bench-share/1", Label.SIMULATED, {"rows": rows})
    else:
        print(f"[{Label.SIMULATED.value}]")
    return 0
