"""`kilter share`: fair sharing of one machine among several training jobs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from kilter.app.cli import share_live
from kilter.app.cli.options import output_file
from kilter.app.cli.output import print_json
from kilter.app.fields import taken
from kilter.app.share_page import page
from kilter.core.codec import write_atomically
from kilter.core.label import Label
from kilter.core.units import show_count, show_duration, show_fraction
from kilter.sharing.placements import NAMES
from kilter.sharing.plan import maxmin
from kilter.sharing.plan.policies import SHARING_POLICIES
from kilter.sharing.simulate import Machine, SharedOutcome, load, simulate

HELP = """\
Share the GPUs of one machine fairly among several training jobs: the data ratio of each job (how
its global batch splits over the GPUs, in tenths) is changed while it trains, so that the slow-downs
of all jobs become similar. The gradient of every step stays that of the same global batch.
"""

EPILOG = """\
actions:
  serve      the daemon: watches the jobs and decides their data ratios
  run        a training script (DDP), unmodified, one rank for each GPU
  top        what runs, how fast, and the last decisions, live
  rehearse   the same policies on a simulated machine, in virtual time

examples:
  kilter share serve --gpus 0-3 --policy maxmin --period 20s
  kilter share run train.py --epochs 3
  kilter share top
  kilter share rehearse p1 --policy thesis --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kilter share serve|run|top|rehearse ..."
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog="kilter share"
    )
    share_live.add_serve(actions)
    share_live.add_run(actions)
    share_live.add_top(actions)
    _add_rehearse(actions)


def _add_rehearse(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "rehearse",
        description="Rehearse a policy on a simulated machine, in virtual time.",
        epilog=f"""\
FILE is JSON: schema "kilter.sharing/1", gpus, jobs; a job has name, global_batch, total_steps,
cost {{sample_s, fixed_s, host_s, comm_s}} in seconds, and if wanted arrival_s, ratios (tenths, one
number for each GPU), alone_step_s, memory {{replica_bytes, sample_bytes}}, min_samples, may_idle.
Also gpu_memory_bytes, period_s, noise, seed. The names p1 to p6 are files that kilter ships
({Path(str(resources.files("kilter.sharing.placements")))}):
  p1 skewed, p2 all jobs on two GPUs, p3 eight jobs on random pairs, p4 even, p5 fewer jobs than
  GPUs, p6 staggered arrivals.

examples:
  kilter share rehearse p1 --policy maxmin
  kilter share rehearse machine.json --policy thesis --json
  kilter share rehearse p6 --policy maxmin --html share.html
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="a rehearsal file, or p1 to p6")
    parser.add_argument("--policy", choices=SHARING_POLICIES, default="maxmin", help="(maxmin)")
    parser.add_argument(
        "--html", type=output_file, metavar="PAGE", help="write the page of slow-downs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(act=_rehearse)


def run(args: argparse.Namespace) -> int | Callable[[], object]:
    act: Callable[[argparse.Namespace], int | Callable[[], object]] = args.act
    return act(args)


def placement(name: str) -> Machine:
    """A rehearsal file by path, or one of those that are shipped."""
    if name in NAMES and not Path(name).exists():
        with resources.as_file(resources.files("kilter.sharing.placements")) as folder:
            return load(folder / f"{name}.json")
    return load(Path(name))


def _rehearse(args: argparse.Namespace) -> int:
    machine = placement(args.file)
    outcome = simulate(machine, SHARING_POLICIES[args.policy])
    if args.html is not None:
        write_atomically(args.html, _page(args.file, args.policy, machine, outcome).encode())
    if args.json:
        print_json("kilter.share/1", Label.SIMULATED, _document(args.policy, machine, outcome))
    else:
        _tell(args.policy, machine, outcome)
        if args.html is not None:
            print(f"page: {args.html}")
    return 0


def _document(policy: str, machine: Machine, outcome: SharedOutcome) -> dict[str, object]:
    return {
        "policy": policy,
        "source": machine.source,
        "jobs": outcome.jobs,
        **figures(outcome),
        "decisions": [
            {"t_s": made.t_s} | taken(made.decision, ("job", "before", "after", "reason"))
            for made in outcome.decisions
        ],
    }


def figures(outcome: SharedOutcome) -> dict[str, Any]:
    """What a rehearsal has come to, in numbers."""
    return {
        "max_slowdown": max(outcome.slowdowns),
        "max_over_min": max(outcome.slowdowns) / min(outcome.slowdowns),
        **taken(outcome, ("jain", "utilisation", "makespan_s", "samples_per_s")),
    }


def _tell(policy: str, machine: Machine, outcome: SharedOutcome) -> None:
    print(f"{show_count(machine.gpus, 'GPU')}, policy {policy} [{Label.SIMULATED.value}]")
    if machine.source:
        print(f"costs: {machine.source}")
    width = max(len(job.name) for job in outcome.jobs)
    print(f"{'job':<{width}}  slow-down    rho     end")
    for job in sorted(outcome.jobs, key=lambda job: job.name):
        end = show_duration(job.finish_s)
        print(f"{job.name:<{width}}  {job.slowdown:9.2f}  {job.rho:5.2f}  {end:>8}")
    print(
        f"largest slow-down {max(outcome.slowdowns):.2f}, Jain {outcome.jain:.3f}, utilisation "
        f"{show_fraction(outcome.utilisation)}, makespan {show_duration(outcome.makespan_s)}, "
        f"{outcome.samples_per_s:.0f} samples/s"
    )
    for made in outcome.decisions:
        print(f"{show_duration(made.t_s):>8}  {maxmin.describe(made.decision)}")


def _page(name: str, policy: str, machine: Machine, outcome: SharedOutcome) -> str:
    facts = (
        f"Largest slow-down {max(outcome.slowdowns):.2f}; Jain's index {outcome.jain:.3f}; mean "
        f"utilisation while jobs share {show_fraction(outcome.utilisation)}; makespan "
        f"{show_duration(outcome.makespan_s)}",
        f"Rehearsal of {name} under the policy {policy}. Costs: {machine.source or 'of the file'}",
    )
    title = f"{show_count(len(outcome.jobs), 'job')} on {show_count(machine.gpus, 'GPU')}"
    return page(title, facts, outcome.stretches, outcome.decisions, Label.SIMULATED)
