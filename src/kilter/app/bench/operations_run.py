"""`kilter bench operations --run`: what `kilter run --operations` comes to on a real job.

The job is `kilter.testing.operations_program`, on one CPU: once alone, once in a dry run and once
with a simulated device whose clocks are set. The times of its operations are measured; energy,
clocks and what switches take are simulated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kilter.app.bench.real_job import run_job
from kilter.app.cli.output import print_json, show_progress
from kilter.app.report import build, operation_run
from kilter.core import codec
from kilter.core.errors import KilterError, UsageError
from kilter.core.label import Label
from kilter.core.trace import IterationTrace
from kilter.core.units import show_count, show_fraction, show_time

FEWEST_ITERATIONS = 30
REHEARSAL_LIMIT_S = 60.0
PROGRAM = ("-m", "kilter.testing.operations_program")
MEASURED_FIELDS = ("iteration_s", "commands", "left_out", "same_results")


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to, with an attribute for each column of the table. Ratios are against the
    default clock."""

    device: str
    mode: str
    """`dry run`: the plan; `set`: what of it was confirmed against plain iterations."""
    iterations: int
    max_slowdown: float
    iteration_s: float
    stretches: int
    planned_saving: float
    planned_slowdown: float
    whole_job_saving: float
    """By the best single clock for the whole job within the same bound, by the same tables."""
    saving: float | None
    """Of the stretches whose clocks were confirmed; None: a dry run, or none were."""
    slowdown: float | None
    slowdown_ci95: tuple[float, float] | None
    pairs: int
    commands: int
    left_out: int
    restored: bool | None
    same_results: bool
    """Losses and parameters equal those of the job alone, bit by bit."""
    answer: str


def tell_runs(devices: Sequence[str], iterations: int, bound: float, *, as_json: bool) -> None:
    """Run the job, and print what came of it."""
    if iterations < FEWEST_ITERATIONS:
        raise UsageError(f"--iterations {iterations}: at least {FEWEST_ITERATIONS}")
    rows = list(_rows(devices, iterations, bound))
    if as_json:
        fields = {"measured": MEASURED_FIELDS, "runs": msgspec.to_builtins(rows)}
        print_json("kilter.bench.operations/1", Label.SIMULATED, fields)
        return
    for row in rows:
        print(
            f"{row.device}, {row.mode}: {row.answer}\n"
            f"  {show_count(row.iterations, 'iteration')} of {show_time(row.iteration_s)}; "
            f"stretches planned: {row.stretches}, "
            f"{show_fraction(row.planned_saving)} less energy expected at "
            f"{show_fraction(row.planned_slowdown)} slowdown, "
            f"{show_fraction(row.whole_job_saving)} by one clock for the whole job; "
            f"{show_count(row.commands, 'command')}, {row.left_out} left out; results "
            f"{'as' if row.same_results else 'OTHER than'} without kilter"
        )
    print("Times of operations and iterations measured; energy, clocks and switches [simulated].")


def _rows(devices: Sequence[str], iterations: int, bound: float) -> Iterator[PlannedRun]:
    job = [*PROGRAM, "--iterations", str(iterations)]
    show_progress("the job alone")
    alone = run_job(job, iterations)
    for device in devices:
        for mode, options in (
            ("dry run", ["--dry-run"]),
            ("set", ["--rehearse", f"{REHEARSAL_LIMIT_S}s"]),
        ):
            show_progress(f"{device}, {mode}")
            with tempfile.TemporaryDirectory(prefix="kilter-") as directory:
                out = Path(directory) / "run"
                kilter = ["-m", "kilter", "run", "--operations", "--max-slowdown", str(bound)]
                kilter += ["--device", f"sim:{device}", "--out", str(out), *options]
                # Settings of earlier runs are not to be found, and these are not kept.
                printed = run_job(
                    [*kilter, *job], iterations, more_s=REHEARSAL_LIMIT_S, XDG_STATE_HOME=directory
                )
                yield _row(device, mode, bound, out, same_results=printed == alone)
    show_progress()


def _row(device: str, mode: str, bound: float, out: Path, *, same_results: bool) -> PlannedRun:
    report = build.build(out)
    told = report.operation_clocks
    if told is None:
        why = "; ".join(each.reason for each in report.refused)
        raise KilterError(f"no clocks were planned for the operations: {why}")
    found = None if told.search is None or not told.search.held else told.search
    time = None if found is None else found.time_ratio
    ci95 = None if found is None else found.time_ratio_ci95
    energy = None if found is None else found.energy_ratio
    return PlannedRun(
        device=device,
        mode=mode,
        iterations=report.iterations,
        max_slowdown=bound,
        iteration_s=codec.load(out / "trace.json", IterationTrace).iteration_s,
        stretches=told.stretches,
        planned_saving=told.saving,
        planned_slowdown=told.slowdown,
        whole_job_saving=told.whole_job_saving,
        saving=None if energy is None else 1.0 - energy,
        slowdown=None if time is None else time - 1.0,
        slowdown_ci95=None if ci95 is None else (ci95[0] - 1.0, ci95[1] - 1.0),
        pairs=0 if found is None else found.pairs,
        commands=told.commands,
        left_out=told.left_out,
        restored=told.restored,
        same_results=same_results,
        answer=operation_run.answer(told),
    )
