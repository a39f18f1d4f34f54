"""`kilter top`: a run while it is under way, from the files in its folder."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from kilter.app.cli.output import show_live
from kilter.app.report.build import find_run
from kilter.app.report.follow import GrowingRun
from kilter.app.report.top import Now, as_json, now, screen
from kilter.core.errors import FileError

HELP = """\
Show a run while it is under way: what is tried and decided, iterations, power, clocks and memory of
every rank. Only the files in the run's folder are read; the job is not asked, and runs as before.
"""

EPILOG = """\
RUN is the folder of a run (what `kilter run --out` names), or `latest`: the newest below ./runs.
It may lie on a shared file system, and the run may have ended. The view ends with the run, or by
Ctrl-C. The live view needs rich (pip install 'kilter[top]'); --once and --json do not.

examples:
  kilter top
  kilter top runs/20261120-101500-4711
  kilter top latest --once
  kilter top latest --json | jq '.ranks[].power_w'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="?", default="latest", help="folder of a run, or `latest`"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print one screen and end")
    form.add_argument("--json", action="store_true", help="one JSON object, SI units, null unknown")


def run(arguments: argparse.Namespace) -> int:
    growing = GrowingRun(find_run(arguments.run))
    found = _read_now(growing)
    if arguments.json:
        # What is not a finite number becomes null.
        sys.stdout.buffer.write(msgspec.json.encode(as_json(found)) + b"\n")
        sys.stdout.buffer.flush()
        return 0
    if not arguments.once and sys.stdout.isatty() and found.state != "ended":
        show_live(lambda: _next_screen(growing), otherwise="kilter top --once")
        found = _read_now(growing)
    print(screen(found))
    return 0


def _next_screen(growing: GrowingRun) -> str | None:
    found = _read_now(growing)
    return None if found.state == "ended" else screen(found)


def _read_now(growing: GrowingRun) -> Now:
    growing.read()
    ranks = growing.ranks()
    if not ranks:
        raise FileError(
            f"{growing.directory}: the first line of the run is not whole yet; try again in a "
            "moment (or the run was killed before it)"
        )
    silent_s = max(0.0, time.time() - growing.written_s)
    return now(ranks, run=growing.directory.resolve().name, silent_s=silent_s)
