"""`kilter bench period`: the period of iterations from telemetry, checked against marks.

With a recording: one verdict. Without: synthetic telemetry whose iteration ends are known.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from kilter.app.bench.period_cases import KINDS, Change, PeriodCase, case, change
from kilter.app.cli.options import positive
from kilter.app.cli.output import print_json, show_progress
from kilter.core.codec import read
from kilter.core.errors import FileError, UsageError
from kilter.core.label import Label
from kilter.core.setting import Sample
from kilter.core.units import show_count
from kilter.device.sim.replay import load_recording
from kilter.model.period import Detection, Telemetry, changed, detect, doubt, telemetry

HELP = "detect the period of iterations from telemetry alone; check it against marks"
EPILOG = """\
Columns of a recording: t_s, power_instant_w, energy_mj, gpu_util, mem_util, sm_mhz (a field may be
blank). Marks: a JSON list of the times, on the same clock, at which iterations ended. Without a
recording: synthetic cases (gradient accumulation, evaluation pauses, checkpoint stalls,
variable-length batches, sensors of 50 to 1000 ms), some of them without a period that the sensor
can show, and jobs that change their iteration. The figures of synthetic cases are simulated.

examples:
  kilter bench period
  kilter bench period --telemetry run.csv --marks run_marks.json --json
"""

PERIOD_SCHEMA = "kilter.bench.period/1"
METHOD = "likeness of consecutive windows, folding, tracking of single iterations"
EXACT = 0.02
"""A right period has at most this relative error."""
CONFUSED = 0.2
"""A period further off than this is another multiple or part of the iteration."""
MOST_READINGS = 40_000
"""A recording has at most so many; they take about a minute."""
LONG_GAP = 30.0
"""Readings further apart than so many usual distances have a gap between them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--telemetry", metavar="CSV", help="a recording, or a run's directory")
    parser.add_argument("--marks", metavar="JSON", help="ends of the iterations of the recording")
    parser.add_argument(
        "--cases", type=positive, default=500, metavar="N", help="synthetic cases (default 500)"
    )
    parser.add_argument("--seed", type=int, default=0, help="number of the first case (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.telemetry is None:
        if args.marks is not None:
            raise UsageError("--marks needs --telemetry: the recording that the marks belong to")
        return _synthetic(range(args.seed, args.seed + args.cases), as_json=args.json)
    samples, left_out = _looked_at(load_recording(args.telemetry))
    readings = telemetry(samples)
    show_progress(f"looking at {show_count(len(samples), 'reading')} ...")
    detection = detect(readings)
    doubted = doubt(readings, detection)
    show_progress()
    true_s = None if args.marks is None else float(np.median(np.diff(load_marks(args.marks))))
    error = (
        None
        if true_s is None or detection.period_s is None
        else abs(detection.period_s / true_s - 1)
    )
    document = {
        "detected": detection.period_s is not None,
        "period_s": detection.period_s,
        "relative_error": error,
        "code": detection.code,
        "reason": detection.reason,
        "method": METHOD,
        "marked_period_s": true_s,
        "resolution_s": detection.resolution_s,
        "likeness": detection.likeness,
        "spread": detection.spread,
        "doubt": doubted,
        "left_out": left_out,
    }
    if args.json:
        print_json(PERIOD_SCHEMA, Label.REPLAYED, document)
        return 0
    found = "no period" if detection.period_s is None else f"period {detection.period_s:.4g} s"
    print(f"{found} (replayed): {detection.reason}")
    if doubted is not None:
        print(f"kilter watch would set nothing: {doubted}")
    if left_out is not None:
        print(f"Note: {left_out}.")
    if true_s is not None:
        suffix = "" if error is None else f", relative error {error * 100:.2f} %"
        print(f"marks: {true_s:.4g} s per iteration{suffix}")
    return 0


def _looked_at(samples: Sequence[Sample]) -> tuple[Sequence[Sample], str | None]:
    """Of a recording that is gaps for the most part its longest stretch, and of a long one its end;
    what is left out, in words."""
    apart_s = np.diff([sample.t_s for sample in samples])
    gaps = np.flatnonzero(apart_s > LONG_GAP * np.median(apart_s)) if len(apart_s) else apart_s
    begin, why = 0, "the last"
    end = total = len(samples)
    if apart_s[gaps.astype(int)].sum() > 0.5 * apart_s.sum():
        edges = [0, *(gaps + 1).tolist(), total]
        begin, end = max(itertools.pairwise(edges), key=lambda edge: edge[1] - edge[0])
        why = "those of the longest stretch without a gap"
    begin = max(begin, end - MOST_READINGS)
    if end - begin == total:
        return samples, None
    return samples[begin:end], f"of {total} readings {end - begin} are looked at, {why}"


def load_marks(path: str) -> list[float]:
    """Iteration ends, ascending."""
    try:
        marks = msgspec.json.decode(read(path), type=list[float])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not a JSON list of times in seconds ({error})") from error
    if len(marks) < 2 or any(b <= a for a, b in itertools.pairwise(marks)):
        raise FileError(f"{path}: needs at least two marks, each later than the one before")
    return marks


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """One synthetic case and its verdict."""

    seed: int
    kind: str
    periodic: bool
    detected: bool
    period_s: float
    detected_s: float | None
    relative_error: float | None
    verdict: str
    """It is `right`, `inexact`, `confused` (a multiple or a part), `missed`, or `invented`."""
    code: str


def _judge(seed: int, labelled: PeriodCase, detection: Detection) -> _Row:
    error = None
    verdict = "right" if not labelled.periodic else "missed"
    if detection.period_s is not None:
        verdict = "invented"
        if labelled.periodic:
            error = abs(detection.period_s / labelled.period_s - 1)
            verdict = "right" if error <= EXACT else "inexact" if error < CONFUSED else "confused"
    return _Row(
        seed=seed,
        kind=labelled.kind,
        periodic=labelled.periodic,
        detected=detection.period_s is not None,
        period_s=labelled.period_s,
        detected_s=detection.period_s,
        relative_error=error,
        verdict=verdict,
        code=detection.code,
    )


def _synthetic(seeds: range, *, as_json: bool) -> int:
    rows = []
    for number, seed in enumerate(seeds):
        if number % 50 == 0:
            print(f"case {number + 1} of {len(seeds)} ...", file=sys.stderr)
        labelled = case(seed)
        rows.append(_judge(seed, labelled, detect(labelled.telemetry)))
    noticed = [_noticed(change(seed)) for seed in range(seeds.start, seeds.start + len(seeds) // 5)]
    summary = _summary(rows, noticed)
    if as_json:
        found = {"method": METHOD, "rows": rows, "summary": summary}
        print_json(PERIOD_SCHEMA, Label.SIMULATED, found)
        return 0
    by_kind: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        by_kind[row.kind].append(row)
    print("kind                     cases  right  inexact  confused  missed  invented  (simulated)")
    for kind in KINDS:
        if own := by_kind[kind]:
            counts = [
                sum(r.verdict == v for r in own)
                for v in ("right", "inexact", "confused", "missed", "invented")
            ]
            right, inexact, confused, missed, invented = counts
            print(
                f"{kind:<24} {len(own):>5}  {right:>5}  {inexact:>7}  {confused:>8}  {missed:>6}"
                f"  {invented:>8}"
            )
    for name, value in summary.items():
        print(f"{name.replace('_', ' ')}: {'unknown' if math.isnan(value) else f'{value:.4g}'}")
    return 0


def _summary(
    rows: Sequence[_Row], noticed: Sequence[tuple[bool, float | None]]
) -> dict[str, float]:
    errors = [r.relative_error for r in rows if r.relative_error is not None]
    periodic = [r for r in rows if r.periodic]
    changes = [late for is_change, late in noticed if is_change]
    steady = [late for is_change, late in noticed if not is_change]

    def share(count: int, of: int) -> float:
        return count / of if of else math.nan

    return {
        "right": share(sum(r.verdict == "right" for r in rows), len(rows)),
        "right_of_periodic": share(sum(r.verdict == "right" for r in periodic), len(periodic)),
        "not_confused": share(sum(r.verdict != "confused" for r in rows), len(rows)),
        "median_relative_error": statistics.median(errors) if errors else math.nan,
        "changes_noticed_within_three_periods": share(
            sum(late is not None and late <= 3.0 for late in changes), len(changes)
        ),
        "false_alarms_of_unchanged": share(sum(s is not None for s in steady), len(steady)),
    }


def _noticed(job: Change) -> tuple[bool, float | None]:
    """(whether the job changes, periods from the change to the alarm or None). The longer of the
    two periods counts; an alarm before the change is one too early: minus infinity."""
    t = job.telemetry.t_s
    learned = t[0] + 24 * job.period_s
    reference = _between(job.telemetry, t[0], learned)
    end = min(float(t[-1]), job.begin_s + 8 * job.after_s)
    for now in np.arange(learned + 2 * job.period_s, end, job.period_s / 4):
        recent = _between(job.telemetry, now - 2.2 * job.period_s, now)
        if changed(reference, recent, job.period_s):
            late = float(now - job.begin_s) / max(job.period_s, job.after_s)
            return math.isfinite(job.begin_s), late if late >= 0 else -math.inf
    return math.isfinite(job.begin_s), None


def _between(whole: Telemetry, begin_s: float, end_s: float) -> Telemetry:
    inside = (whole.t_s >= begin_s) & (whole.t_s <= end_s)

    def cut(values: np.ndarray) -> np.ndarray:
        return values[inside] if len(values) == len(inside) else values

    return Telemetry(
        t_s=whole.t_s[inside],
        power_w=cut(whole.power_w),
        sm_utilisation=cut(whole.sm_utilisation),
        memory_utilisation=cut(whole.memory_utilisation),
        energy_j=cut(whole.energy_j),
    )
