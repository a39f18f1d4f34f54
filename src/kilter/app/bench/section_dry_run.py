"""`kilter bench sections --scenario dry_run_gloo`: commands of a dry run against real edges.

The job is `kilter.testing.gloo_program`; it says itself where its sections begin and end, in every
iteration, without the profiler. Nothing here is simulated but the device's times of a switch, which
decide when the commands leave.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilter.app.cli.output import print_json
from kilter.app.report import build
from kilter.clocks.plan.timing import RealEdge, differences, edge_errors
from kilter.clocks.section_process import CommandLog
from kilter.core.errors import KilterError, UsageError
from kilter.core.units import show_count, show_time

LABEL = "measured on CPU"
LATE_S = 0.25
FEWEST_RECORDED = 60
START_S, SECONDS_PER_ITERATION = 60.0, 5.0
"""A job that takes longer does not run."""


def dry_run(device: str, iterations: int, *, as_json: bool) -> int:
    """Run the job, print how far the commands were from its edges."""
    if iterations < FEWEST_RECORDED:
        raise UsageError(f"--iterations {iterations}: at least {FEWEST_RECORDED}")
    with tempfile.TemporaryDirectory(prefix="kilter-") as directory:
        found = _measure(device, iterations, Path(directory))
    if as_json:
        print_json("kilter.bench.sections/1", LABEL, found)
    else:
        _tell(found)
    return 0


def _measure(device: str, iterations: int, directory: Path) -> dict[str, Any]:
    out, seen = directory / "run", directory / "edges.json"
    command = ["-m", "kilter", "run", "--sections", "--dry-run"]
    command += ["--device", f"sim:{device}", "--out", str(out)]
    command += ["--standalone", "--nproc-per-node", "2", "-m", "kilter.testing.gloo_program"]
    command += ["--iterations", str(iterations), "--late-s", str(LATE_S), "--edges", str(seen)]
    _run_job(command, START_S + SECONDS_PER_ITERATION * iterations)
    if not seen.exists():
        raise KilterError("the job has not written its edges")
    log = CommandLog(out / "commands-rank0.jsonl", keep=None)
    log.read()
    # The job has one section in an iteration, whatever its key.
    commanded = [msgspec.structs.replace(c, key="") for c in log.recent]
    real = msgspec.json.decode(seen.read_bytes(), type=list[RealEdge])
    report = build.build(out).sections
    both = {
        edge: edge_errors(differences([c for c in commanded if c.edge == edge], real))
        for edge in ("down", "up")
    }
    return {
        "scenario": "dry_run_gloo",
        "device": device,
        "iterations": iterations,
        "late_s": LATE_S,
        "commands": log.counts["would set"],
        "left_out": log.counts["left out"],
        "edges": msgspec.to_builtins(edge_errors(differences(commanded, real))),
        **{edge: msgspec.to_builtins(errors) for edge, errors in both.items()},
        "late_p95_s": _p95([c.late_s for c in commanded if c.state != "left out"]),
        "window_edges": None if report is None else report.edges,
        "summary": None if report is None else report.summary,
        "look_cost_s": None
        if report is None
        else max(r.sections.window_cost_s + r.sections.key_cost_s for r in report.ranks),
    }


def _run_job(arguments: Sequence[str], most_s: float) -> None:
    """`python ARGUMENTS`, on one thread unless the environment says otherwise. `KilterError` if it
    fails, or takes longer."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env={"OMP_NUM_THREADS": "1"} | dict(os.environ),
            timeout=most_s,
        )
    except subprocess.TimeoutExpired as error:
        raise KilterError(f"the job does not end within {error.timeout:g} s") from error
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise KilterError(f"the job failed (exit code {done.returncode}): {last}")


def _p95(values: list[float]) -> float | None:
    errors = edge_errors(values)
    return None if errors is None else errors.p95_s


def _tell(found: dict[str, Any]) -> None:
    print(f"{found['summary']} [simulated]")
    if found["edges"] is None:
        print("No command met an edge: nothing was planned, or the job was too short.")
        return
    for name, what in (("down", "section begins"), ("up", "section ends")):
        errors = found[name]
        if errors is not None:
            print(
                f"{what:<15} {show_count(errors['n'], 'command')}: {show_time(errors['p50_s'])} "
                f"(median) and {show_time(errors['p95_s'])} (95 %) from the real edge, "
                f"bias {show_time(errors['bias_s'])}"
            )
    print(
        f"{found['commands']} commands, {found['left_out']} left out; they left within "
        f"{show_time(found['late_p95_s'])} (95 %) of their scheduled times. [{LABEL}]"
    )
