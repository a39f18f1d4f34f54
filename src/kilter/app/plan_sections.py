"""`kilter plan sections TRACE...`: which communication sections are worth a lower clock."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from kilter.app.cli.output import print_json
from kilter.app.cli.sections import add_device_arguments, add_trace_arguments, analysed, card
from kilter.app.report import section_run
from kilter.clocks.plan.cover import Cover
from kilter.clocks.plan.guard import Contract
from kilter.clocks.plan.section_job import offer_of
from kilter.clocks.plan.sections import Analysis
from kilter.clocks.plan.worth import ClockCosts, Worth, job, summary, worth
from kilter.clocks.section_leader import SectionLeader
from kilter.clocks.section_rehearsal import SimulatedRanks
from kilter.core.label import Label
from kilter.core.section_record import SectionsFound
from kilter.core.units import show_clock, show_count, show_energy, show_fraction, show_time

HELP = "which communication sections are worth a lower clock"
EPILOG = """\
A section pays if it is longer than two switches take; neighbouring sections may share a stretch of
a low clock within the slowdown. The times are those of the traces, the device's clocks and power
are simulated: computing is taken to draw the power limit, and communication to keep its pace at a
lower clock, which the running job has to confirm. With --search the clocks are searched on
simulated ranks as `kilter run --sections` searches them.

examples:
  kilter plan sections rank*.json.gz --device sim:h200
  kilter plan sections rank*.json.gz --device sim:h200 --switch-latency-s 0.01 --max-slowdown 1%
"""


MOST_STRETCHES = 4
"""So many stretches of one rank are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    add_device_arguments(parser, required=True)
    parser.add_argument(
        "--search", action="store_true", help="search the clocks on simulated ranks, as a run does"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (0)")


def run(args: argparse.Namespace) -> int:
    device, analysis = card(args), analysed(args)
    found = [worth(rank, device, max_slowdown=args.max_slowdown) for rank in analysis.ranks]
    searched = _searched(args, device, analysis, found) if args.search else None
    if args.json:
        result = _as_json(found, device, analysis) | {
            "device": args.device.name,
            "max_slowdown": args.max_slowdown,
            "search": searched,
        }
        print_json("kilter.plan.sections/1", Label.SIMULATED, result)
    else:
        _tell(found, device, analysis)
        if searched is not None:
            print(f"Search: {section_run.outcome(searched)} [simulated]")
    return 0


def _searched(
    args: argparse.Namespace, device: ClockCosts, analysis: Analysis, found: Sequence[Worth]
) -> SectionsFound | None:
    """What the search of a run comes to on simulated ranks with these sections."""
    ranks = zip(analysis.ranks, found, strict=True)
    renumbered = [
        (msgspec.structs.replace(rank, rank=n), msgspec.structs.replace(own, rank=n))
        for n, (rank, own) in enumerate(ranks)
    ]
    offers = [offer_of(rank, own, "") for rank, own in renumbered]
    leader = SectionLeader(
        device,
        Contract(max_slowdown=args.max_slowdown),
        device=args.device.name,
        saved=lambda signature: None,
        save=lambda signature, found: None,
        seed=args.seed,
    )
    targets = leader.begin(offers)
    simulated = SimulatedRanks(offers, targets, device, args.device.switch, seed=args.seed)
    return leader.rehearse(simulated)


def _as_json(found: Sequence[Worth], device: ClockCosts, analysis: Analysis) -> dict[str, Any]:
    saving, slowdown = job(found)
    return {
        "summary": summary(found, device),
        "break_even_s": device.break_even_s,
        "saving": saving,
        "slowdown": slowdown,
        "left_out": list(analysis.left_out),
        "ranks": [
            msgspec.to_builtins(w) | {"saving": w.saving, "slowdown": w.slowdown} for w in found
        ],
    }


def _covered(cover: Cover | None) -> str:
    if cover is None:
        return ""
    return (
        f"; takes in {show_time(cover.compute_s)} of computation under communication, which has "
        f"slack to take {cover.stretch:.1f} times as long"
    )


def _tell(found: Sequence[Worth], device: ClockCosts, analysis: Analysis) -> None:
    print(f"{summary(found, device)} [simulated]")
    for answer in found:
        for stretch in answer.stretches[:MOST_STRETCHES]:
            print(
                f"rank {answer.rank}: {show_clock(stretch.sm_clock_hz)} from "
                f"{show_time(stretch.start_s)} to {show_time(stretch.end_s)} of the iteration "
                f"({stretch.first} to {stretch.last}): saves {show_energy(stretch.saved_j)} of "
                f"{show_energy(answer.iteration_j)}, delays by {show_time(stretch.delay_s)}"
                f"{_covered(stretch.cover)}"
            )
        if len(answer.stretches) > MOST_STRETCHES:
            more = len(answer.stretches) - MOST_STRETCHES
            print(f"rank {answer.rank}: {more} more stretches (--json has all)")
        if answer.refused:
            longest = max(answer.refused, key=lambda r: r.code == "no_saving")
            refused = show_count(len(answer.refused), "section")
            print(f"rank {answer.rank}: {refused} refused: {longest.subject} ({longest.text}), ...")
    exposed = max(rank.exposed_share for rank in analysis.ranks)
    print(
        f"Exposed: {show_fraction(exposed)} at most [measured]. A section pays from "
        f"{show_time(device.break_even_s)} on."
    )
    for text in analysis.left_out:
        print(f"Note: {text}.")
