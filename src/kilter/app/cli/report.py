"""`kilter report`: what a run found, did and restored."""

from __future__ import annotations

import argparse
import sys

import msgspec

from kilter.app.cli.options import output_file
from kilter.app.config import FACTORS, factors, find_file, here
from kilter.app.report import build as report
from kilter.app.report import html, summary
from kilter.app.report.chrome import chrome_of_run
from kilter.core.codec import write_atomically

HELP = "What a run found, what it saved and what it cost, what was set, restored and refused."

EPILOG = """\
RUN is the directory of a run, or `latest`: the newest one below ./runs. A killed or still running
run has a report as well. Every number is measured, replayed or simulated, and says which.
Carbon and cost are shown where their factors are given, here or in kilter.toml:

  [report]                         # [tool.kilter.report] in pyproject.toml
  grams_co2_per_kwh = 380
  price_per_kwh = 0.31
  currency = "EUR"

examples:
  kilter report latest
  kilter report latest --json | jq .saving
  kilter report runs/20261120-101500 --html report.html
  kilter report latest --trace run.chrome.json
  kilter report latest --grams-co2-per-kwh 380 --price-per-kwh 0.31 --currency EUR
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a run, or `latest`")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object, SI units, null unknown")
    form.add_argument(
        "--html", metavar="FILE", type=output_file, help="write one self-contained page"
    )
    form.add_argument(
        "--trace",
        metavar="FILE",
        type=output_file,
        help="write decisions, blocks, settings, power and memory over time as a Chrome trace, "
        "which https://ui.perfetto.dev opens",
    )
    of = parser.add_argument_group("carbon and cost, by your own factors (none is assumed)")
    of.add_argument("--grams-co2-per-kwh", metavar="G", help="of the electricity used: 380")
    of.add_argument("--price-per-kwh", metavar="P", help="in the currency: 0.31")
    of.add_argument("--currency", metavar="NAME", help="EUR, $, ...")


def run(arguments: argparse.Namespace) -> int:
    directory = report.find_run(arguments.run)
    if arguments.trace is not None:
        made = chrome_of_run(report.read_ranks(directory), run=directory.resolve().name)
        write_atomically(arguments.trace, msgspec.json.encode(made))
        print(arguments.trace)
        return 0
    flags = {name: getattr(arguments, name) for name in FACTORS}
    found = report.build(directory, factors(flags, *find_file(here())))
    if arguments.json:
        sys.stdout.buffer.write(report.to_json(found))
        sys.stdout.buffer.flush()
    elif arguments.html is not None:
        html.write(found, directory, arguments.html)
        print(arguments.html)
    else:
        print(summary.full(found))
    return 0
