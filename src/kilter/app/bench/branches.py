"""`kilter bench branches`: every way of running parallel branches, side by side, measured here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from kilter.app.cli.options import output_file
from kilter.core.errors import UsageError
from kilter.core.units import show_bytes, show_time

HELP = "parallel branches: as published, threads, streams, graphs, torch.compile, ours"
EPILOG = """examples:
  kilter bench branches --workload cswintt --precision fp16
  kilter bench branches --workload experts --rows serial,graph,auto --quick --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "--workload",
        default="cswintt",
        metavar="A,B",
        help="cswintt, cswintt-nomask, frame, inception, experts, ensemble, detection, or all",
    )
    parser.add_argument("--precision", default="fp32", metavar="P,Q", help="fp32, tf32, fp16")
    parser.add_argument("--rows", metavar="A,B", help="only these rows")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--out", metavar="FILE", type=output_file, help="append each row as a JSON line, at once"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print. 0 if every row was measured or refused with a reason."""
    try:
        from kilter.app.bench import branch_rows, branch_workloads
    except ImportError as error:
        raise UsageError(f"this benchmark needs PyTorch ({error})") from error

    device = args.device or ("cuda" if branch_rows.has_gpu() else "cpu")
    names = list(branch_workloads.WORKLOADS) if args.workload == "all" else args.workload.split(",")
    wanted = args.rows.split(",") if args.rows else None
    rows: list[dict[str, Any]] = []
    for name in names:
        for precision in args.precision.split(","):
            if not args.json and name in branch_workloads.WORKLOADS:
                print(f"\n{name}, {precision}: {branch_workloads.WORKLOADS[name].about}")
            for row in branch_rows.run_rows(
                name, precision, wanted, device=device, quick=args.quick
            ):
                rows.append(row)
                if args.out:
                    with open(args.out, "a", encoding="ascii") as file:
                        file.write(json.dumps(row) + "\n")
                if not args.json:
                    print(_line(row), flush=True)
    if args.json:
        report = {
            "schema": "kilter.bench.branches/1",
            "label": "measured",
            "conditions": branch_rows.conditions(device),
            "rows": rows,
        }
        json.dump(report, sys.stdout, indent=1)
        print()
    return 0


def _line(row: dict[str, Any]) -> str:
    name = f"  {row['row']:<24}"
    if row["refused"]:
        return f"{name} refused: {row['refused']}"
    times = row["device_s"] or row["wall_s"]
    parts: Sequence[str] = (
        f"{show_time(times['median']):>9}",
        f"({show_time(times['p10'])} - {show_time(times['p90'])})",
        f"wall {show_time(row['wall_s']['median'])}",
        f"ready {show_time(row['ready_s'])}",
        f"error {row['max_error']:.2g}",
        f"pool {show_bytes(row['pool_bytes'])}" if row.get("pool_bytes") else "",
        str(row["chosen"] or ""),
    )
    return f"{name} " + "  ".join(p for p in parts if p)
