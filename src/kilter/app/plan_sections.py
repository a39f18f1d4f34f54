"""`kilter plan sections TRACE...`: which communication sections are worth a lower clock."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from kilter.app.cli.sections import add_device_arguments, add_trace_arguments, analysed, card
from kilter.clocks.plan.sections import Analysis
from kilter.clocks.plan.worth import ClockCosts, Worth, job, summary, worth
from kilter.core.label import Label
from kilter.core.units import show_clock, show_count, show_energy, show_fraction, show_time

HELP = "which communication sections are worth a lower clock"
EPILOG = """\
A section pays if it is longer than two switches take; neighbouring sections may share a stretch of
a low clock within the slowdown. The times are those of the traces, the device's clocks and power
are simulated: computing is taken to draw the power limit, and communication to keep its pace at a
lower clock, which the running job has to confirm.

examples:
  kilter plan sections rank*.json.gz --device sim:h200
  kilter plan sections rank*.json.gz --device sim:h200 --switch-latency-s 0.01 --max-slowdown 1%
"""


MOST_STRETCHES = 4
"""Stretches of one rank that are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    add_device_arguments(parser, required=True)


def run(args: argparse.Namespace) -> int:
    device, analysis = card(args), analysed(args)
    found = [worth(rank, device, max_slowdown=args.max_slowdown) for rank in analysis.ranks]
    if args.json:
        result = _as_json(found, device, analysis) | {
            "device": args.device.name,
            "max_slowdown": args.max_slowdown,
        }
        print(msgspec.json.encode(result).decode())
    else:
        _tell(found, device, analysis)
    return 0


def _as_json(found: Sequence[Worth], device: ClockCosts, analysis: Analysis) -> dict[str, Any]:
    saving, slowdown = job(found)
    return {
        "schema": "kilter.plan.sections/1",
        "label": Label.SIMULATED.value,
        "summary": summary(found, device),
        "break_even_s": device.break_even_s,
        "saving": saving,
        "slowdown": slowdown,
        "left_out": list(analysis.left_out),
        "ranks": [
            msgspec.to_builtins(w) | {"saving": w.saving, "slowdown": w.slowdown} for w in found
        ],
    }


def _tell(found: Sequence[Worth], device: ClockCosts, analysis: Analysis) -> None:
    print(f"{summary(found, device)} [simulated]")
    for answer in found:
        for stretch in answer.stretches[:MOST_STRETCHES]:
            print(
                f"rank {answer.rank}: {show_clock(stretch.sm_clock_hz)} from "
                f"{show_time(stretch.start_s)} to {show_time(stretch.end_s)} of the iteration "
                f"({stretch.first} to {stretch.last}): saves {show_energy(stretch.saved_j)} of "
                f"{show_energy(answer.iteration_j)}, delays by {show_time(stretch.delay_s)}"
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
        print(f"Left out: {text}.")
