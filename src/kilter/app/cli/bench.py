"""`kilter bench TABLE`: finds the benchmark's file and runs it."""

from __future__ import annotations

import argparse
import importlib

TABLES: dict[str, str] = {
    "clocks": "clock policies replayed over tables of measurements",
    "period": "iteration periods from telemetry alone, against marks",
    "scale": "decisions of 1,024 simulated ranks through a real store",
    "drift": "false alarms of a held setting, and how soon a change is noticed",
    "overhead": "what watching costs the job, measured side by side",
    "faults": "the settings found after every kind of bad luck",
    "branches": "ways to run heterogeneous branches, side by side",
    "sections": "searches of the clocks of communication sections",
    "operations": "clocks per unit operation against switch latency",
    "memory": "plans and runs under a memory budget, side by side",
    "share": "policies of fair sharing on simulated machines, side by side",
    "harm": "unusual programs, plain and under kilter: what differs",
}
"""It maps a benchmark to its line of help; each has one file under `app/bench/`."""

HELP = "Re-run a table of the README."
EPILOG = "tables:\n" + "\n".join(f"  {name:<10} {line}" for name, line in TABLES.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", choices=TABLES, metavar="TABLE", help="which one")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its own options")


def run(args: argparse.Namespace) -> int:
    module = importlib.import_module(f"kilter.app.bench.{args.table}")
    parser = argparse.ArgumentParser(
        prog=f"kilter bench {args.table}",
        description=module.HELP,
        epilog=module.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(args.rest)))
