"""The report of a run, rebuilt from the files of its directory alone.

`build` works for finished, killed, observed and many-rank runs alike, because it reads only what
whole event lines say. The saving and the slowdown come from pairs of blocks that had no part in
choosing the setting: the pairs that chose it are lucky ones (the winner's curse).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kilter.core import codec
from kilter.core.errors import FileError
from kilter.core.events import (
    AnyEvent,
    Block,
    Decided,
    Failed,
    Refused,
    Sampled,
    Started,
    Stopped,
    read_events,
)
from kilter.core.label import Label
from kilter.core.plan import Goal, Plan
from kilter.core.setting import DeviceInfo, Setting
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.model.stats import Estimate, paired_ratio
from kilter.plan.guard import Contract

SCHEMA = "kilter.report/1"

JUDGED = ("confirm", "hold")
"""Phases whose pairs make the headline."""

MOST_POINTS = 400
"""A time series is thinned to this many points; blocks are never thinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One iteration in one arm: geometric mean over the blocks that count."""

    iteration_s: float | None
    energy_j: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the headline rests on."""

    iterations: int
    blocks: int
    pairs: int
    energy_pairs: int
    """Pairs of which both blocks know their energy."""
    left_out: dict[str, int]
    """Reason -> blocks of any phase that did not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """All pairs of one setting in one role: chosen from (`probe`), or judged by (`confirm`)."""

    setting: Setting
    phase: str
    chosen: bool
    time_ratio: float
    time_ci95: tuple[float, float] | None
    energy_ratio: float | None
    energy_ci95: tuple[float, float] | None
    pairs: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The setting that ruled at the end of the record, and why."""

    setting: Setting
    state: str
    """State of the last decision; `undecided` if the run ended before any conclusion."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBlock:
    """A block of the whole job: time of the slowest rank, energy of all devices."""

    number: int
    pair: int | None
    phase: str
    arm: str
    setting: Setting
    t_s: float
    iterations: int
    iteration_s: float
    energy_j: float | None
    clean: bool
    why_not: str | None
    rehearsed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What one device's sensors said over the run; `None` where they said nothing."""

    rank: int
    device: str
    t_s: tuple[float, ...]
    power_w: tuple[float | None, ...]
    sm_clock_hz: tuple[float | None, ...]
    memory_clock_hz: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEnergy:
    """Energy of one iteration attributed to the operations of one name and kind."""

    name: str
    kind: str
    energy_j: float
    share: float
    duration_s: float
    flops: float | None
    bytes_moved: float | None
    intensity_flop_per_byte: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What `plan.json` expects: of use where nothing could be set."""

    planner: str
    actions: tuple[str, ...]
    time_ratio: float
    energy_ratio: float | None
    reason: str
    label: Label


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What kilter itself took: time in the iterations' path, and in the sampler's thread."""

    hook_s: float
    hook_per_iteration_s: float | None
    sampler_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a reader may ask of a run. `None` is unknown, never zero."""

    schema: str
    label: Label
    """Where the times and energies come from."""
    run: str
    device: str
    devices: tuple[DeviceInfo, ...]
    iterations: int
    """Of the script; of a killed run, as far as the record goes."""
    baseline: Arm
    governed: Arm
    """Under the setting that ruled at the end. The default's own values if the default stands."""
    saving: float | None
    """Fraction of the baseline's energy per iteration. 0 if the default stands, with the reason in
    `choice`; None if nothing was concluded."""
    saving_ci95: tuple[float, float] | None
    slowdown: float | None
    slowdown_ci95: tuple[float, float] | None
    contract: float | None
    """The allowed slowdown."""
    within_contract: bool | None
    """The whole interval of the slowdown is below the bound (True) or above it (False)."""
    kept: bool
    """A setting other than the found one was still held when the record ended."""
    restored: bool | None
    """The found setting was put back and seen; None if the record ends without an end."""
    refused: tuple[Refused, ...]
    energy_method: str | None
    interval_method: str
    goal: Goal
    found: Setting
    after: Setting | None
    choice: Choice
    evidence: Evidence
    rehearsed_iterations: int
    rehearsed_share: float
    """Of the evidence's iterations: run on the simulated device after the script had ended."""
    mode: str
    mode_reason: str
    outcome: str | None
    ranks: str
    """How several ranks were added up."""
    command: tuple[str, ...]
    kilter: str
    wall_time: str
    duration_s: float
    overhead: Overhead | None
    probes: tuple[Probe, ...]
    decisions: tuple[Decided, ...]
    errors: tuple[Failed, ...]
    prediction: Prediction | None
    blocks: tuple[JobBlock, ...]
    series: tuple[Series, ...]
    operations: tuple[OperationEnergy, ...]
    operations_method: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The record of one rank, sorted by kind of event."""

    started: Started
    samples: tuple[Sampled, ...]
    blocks: tuple[Block, ...]
    decisions: tuple[Decided, ...]
    refused: tuple[Refused, ...]
    failed: tuple[Failed, ...]
    stopped: Stopped | None
    last_s: float


def find_run(name: str, *, below: Path = Path("runs")) -> Path:
    """The directory of a run; `latest` is the one below `below` that was written to last."""
    if name != "latest":
        return Path(name)
    runs = {file.parent for file in below.glob("*/events-rank*.jsonl")}
    if not runs:
        raise FileError(f"{below}: no run in here yet; make one with: kilter run SCRIPT")
    return max(runs, key=lambda run: max(f.stat().st_mtime_ns for f in _event_files(run)))


def build(run_dir: str | Path) -> Report:
    """The report of a run. `FileError` if there is no record, or a malformed one."""
    directory = Path(run_dir)
    files = _event_files(directory)
    if not directory.is_dir():
        raise FileError(f"{directory}: no such run")
    if not files:
        raise FileError(f"{directory}: not a run (it holds no events-rank*.jsonl)")
    ranks = [rank for file in files if (rank := _read_rank(file)) is not None]
    if not ranks:
        raise FileError(f"{files[0]}: empty; the run ended before its first whole record")
    trace, plan = directory / "trace.json", directory / "plan.json"
    return summarise(
        ranks,
        run=directory.resolve().name,
        trace=codec.load(trace, IterationTrace) if trace.exists() else None,
        plan=codec.load(plan, Plan) if plan.exists() else None,
    )


def to_json(report: Report) -> bytes:
    """One JSON object on one line; what is not a finite number becomes `null`."""
    return msgspec.json.encode(report) + b"\n"


def _event_files(directory: Path) -> list[Path]:
    numbered = [
        (int(match[1]), file)
        for file in directory.glob("events-rank*.jsonl")
        if (match := re.fullmatch(r"events-rank(\d+)\.jsonl", file.name))
    ]
    return [file for _, file in sorted(numbered)]


def _read_rank(file: Path) -> Rank | None:
    """None for a rank that was killed before its first line was whole."""
    if file.stat().st_size == 0:
        return None
    return sort_events(read_events(file))


def sort_events(events: Iterable[AnyEvent]) -> Rank | None:
    """Events of one rank by kind. None if there is none."""
    kinds: dict[type, list[AnyEvent]] = {}
    last_s = 0.0
    for event in events:
        kinds.setdefault(type(event), []).append(event)
        last_s = max(last_s, event.t_s)
    if Started not in kinds:
        return None

XX
        return tuple(event for event in kinds.get(kind, ()) if isinstance(event, kind))

    stopped = of(Stopped)
    return Rank(
        started=of(Started)[0],
        samples=of(Sampled),
        blocks=of(Block),
        decisions=of(Decided),
        refused=of(Refused),
        failed=of(Failed),
        stopped=stopped[-1] if stopped else None,
        last_s=last_s,
    )
