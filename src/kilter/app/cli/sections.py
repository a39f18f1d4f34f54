"""`kilter sections TRACE...`: where the ranks of a job communicate without computing, and wait."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilter.app.cli.options import fraction, output_file, simulated
from kilter.app.cli.output import print_json, show_progress
from kilter.app.report import sections as sections_page
from kilter.clocks.plan import worth
from kilter.clocks.plan.sections import Analysis, RankSections, analyse, summary
from kilter.clocks.plan.worth import ClockCosts
from kilter.clocks.section_card import card_of
from kilter.core.codec import write_atomically
from kilter.core.errors import FileError, UsageError
from kilter.core.label import Label
from kilter.core.units import show_count, show_duration, show_fraction, show_time
from kilter.observe.rank_traces import KernelTable, read_ranks

HELP = "Communication sections of Kineto traces: one trace per rank, plain or gzip."
EPILOG = """\
A section is a maximal run of communication that no computation covers. With the traces of several
ranks, each collective is split into waiting for the last rank and transferring. Traces come from
torch.profiler with ProfilerActivity.CUDA; CPU activities add message sizes and process groups.

examples:
  kilter sections rank*.json.gz
  kilter sections rank0.json rank1.json --json
  kilter sections rank*.json.gz --html sections.html
  kilter sections rank*.json.gz --device sim:h200        is there something to gain?
"""

MOST_SECTIONS = 12
"""So many sections are printed, those with the most exposed time first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    add_device_arguments(parser, required=False)
    parser.add_argument(
        "--html", type=output_file, metavar="FILE", help="write a page with the timelines"
    )


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """What every verb takes that reads the traces of the ranks."""
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="one per rank")
    parser.add_argument(
        "--iterations",
        type=int,
        metavar="N",
        help="each trace holds N equal iterations (default: found in the trace)",
    )
    parser.add_argument(
        "--kernels", type=Path, metavar="FILE", help="further communication kernels (TOML)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_device_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """The device, and how fast its clocks change."""
    parser.add_argument("--device", type=simulated, required=required, metavar="sim:NAME")
    parser.add_argument(
        "--switch-latency-s",
        type=float,
        metavar="S",
        help="a switch of clocks always takes S (default: the device's distribution)",
    )
    parser.add_argument("--max-slowdown", type=fraction, default=0.01, metavar="B", help="(1%%)")


def card(args: argparse.Namespace) -> ClockCosts:
    """The card that the options name; `UsageError` for a time below zero."""
    switch_s = args.switch_latency_s
    if switch_s is not None and not 0.0 <= switch_s < math.inf:
        raise UsageError(f"--switch-latency-s {switch_s}: a switch takes 0 s or more")
    return card_of(args.device, switch_s=switch_s)


def run(args: argparse.Namespace) -> int:
    device = None if args.device is None else card(args)
    analysis = analysed(args)
    answers = [summary(analysis)]
    if device is not None:
        found = [
            worth.worth(rank, device, max_slowdown=args.max_slowdown) for rank in analysis.ranks
        ]
        answers.insert(0, f"{worth.summary(found, device)} [simulated]")
    if args.html is not None:
        page = sections_page.page(analysis, answers[0], answers[1:])
        write_atomically(args.html, page.encode())
    if args.json:
        result = as_json(analysis) | {"summary": " ".join(answers)}
        print_json("kilter.sections/1", Label.MEASURED, result)
    else:
        _tell(analysis, answers)
    return 0


def analysed(args: argparse.Namespace) -> Analysis:
    """The analysis of the traces that can be read; the others are named, and left out. Raises
    `FileError` if none can be read."""
    if args.iterations is not None and args.iterations < 1:
        raise UsageError(f"--iterations {args.iterations}: a trace holds at least 1")
    table = KernelTable(args.kernels)
    traces, broken = [], []
    for number, found in enumerate(
        read_ranks(args.traces, table=table, iterations=args.iterations), 1
    ):
        if len(args.traces) > 1:
            show_progress(f"read {number} of {len(args.traces)} traces")
        if isinstance(found, FileError):
            broken.append(found)
        else:
            traces.append(found)
    show_progress()
    if not traces:
        raise broken[0]
    analysis = analyse(traces)
    left_out = (*(str(error) for error in broken), *analysis.left_out)
    return msgspec.structs.replace(analysis, left_out=left_out)


def as_json(analysis: Analysis) -> dict[str, Any]:
    """The fields that `--json` prints."""
    return {
        "matched_collectives": analysis.matched,
        "collectives": analysis.collectives,
        "left_out": list(analysis.left_out),
        "ranks": [_rank_as_json(rank) for rank in analysis.ranks],
    }


def _rank_as_json(rank: RankSections) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(rank)
    mean: dict[str, Any] = fields.pop("mean")
    return fields | mean | {"sections": fields.pop("sections")}


def _tell(analysis: Analysis, answers: Sequence[str]) -> None:
    print("\n".join(answers))
    print()
    heads = ("rank", "iteration", "compute", "exposed", "waiting", "overlapped", "idle")
    _print_columns([heads, *(sections_page.rank_row(rank) for rank in analysis.ranks)])
    everything = [(rank, section) for rank in analysis.ranks for section in rank.sections]
    largest = sorted(everything, key=lambda pair: -pair[1].exposed_s)[:MOST_SECTIONS]
    if largest:
        print()
        rows = [("rank", "section", "starts at", "length", "waiting", "in iterations")]
        for rank, section in largest:
            rows.append(
                (
                    str(rank.rank),
                    section.key,
                    show_time(section.start_s),
                    show_time(section.length_s),
                    show_time(section.wait_s),
                    show_fraction(section.presence),
                )
            )
        _print_columns(rows)
        if len(everything) > len(largest):
            print(f"... and {len(everything) - len(largest)} shorter sections (--json has all)")
    print()
    iterations = sum(rank.iterations for rank in analysis.ranks)
    print(f"Times are measured, per iteration, from {show_count(iterations, 'iteration')}.")
    for rank in analysis.ranks:
        if abs(rank.clock_offset_s or 0.0) >= 1.0:
            apart = show_duration(abs(rank.clock_offset_s or 0.0))
            print(f"The clock of rank {rank.rank} is {apart} off; the collectives align it.")
    for text in analysis.left_out:
        print(f"Note: {text}.")


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
