"""`kilter report`: what a run found, did and restored."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kilter.app.report import build as report
from kilter.app.report import html, summary
from kilter.app.report import memory as memory_report
from kilter.core.codec import write_atomically

HELP = "What a run found, what it saved and what it cost, what was set, restored and refused."

EPILOG = """\
RUN is the directory of a run, or `latest`: the newest one below ./runs. A killed or still running
run has a report as well. Every number is measured, replayed or simulated, and says which.

examples:
  kilter report latest
  kilter report latest --json | jq .saving
  kilter report runs/20261120-101500 --html report.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a run, or `latest`")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object, SI units, null unknown")
    form.add_argument("--html", metavar="FILE", type=Path, help="write one self-contained page")


def run(arguments: argparse.Namespace) -> int:
    directory = report.find_run(arguments.run)
    found = report.build(directory)
    if arguments.json:
        sys.stdout.buffer.write(report.to_json(found))
        sys.stdout.buffer.flush()
    elif arguments.html is not None:
        page = html.page(found, memory_report.timeline(directory))
        write_atomically(arguments.html, page.encode("utf-8", "replace"))
        print(arguments.html)
    else:
        print(summary.full(found))
    return 0
