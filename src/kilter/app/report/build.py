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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kilter.app.factors import Factors
from kilter.app.fields import taken
from kilter.app.report.bound import JobClass, job_class
from kilter.app.report.evidence import (
    Judgement,
    judge,
    within,
)
from kilter.app.report.footprint import Amount, Footprint, amount, footprint_of
from kilter.app.report.idle import Idle, idle_of
from kilter.app.report.memory import MemoryReport, as_json, memory_report
from kilter.app.report.operations import OperationEnergy, attribute
from kilter.app.report.section_run import SectionsReport, sections_report
from kilter.clocks.plan.governor import Phase
from kilter.core import codec
from kilter.core.errors import FileError
from kilter.core.events import (
    AnyEvent,
    Block,
    Decided,
    Failed,
    Fitted,
    Moved,
    Operated,
    Refused,
    Sampled,
    Sectioned,
    Started,
    Stopped,
    read_events,
)
from kilter.core.label import Label
from kilter.core.plan import ClocksMode, Goal, Plan
from kilter.core.secrets import masked
from kilter.core.setting import DeviceInfo, Setting
from kilter.core.trace import IterationTrace, TraceFeatures
from kilter.model.stats import mean_of_known

T = TypeVar("T")

SCHEMA = "kilter.report/1"

MOST_POINTS = 400
"""A time series is thinned to this many points; blocks are never thinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSetting:
    """The setting that ruled at the end of the record, and why."""

    setting: Setting
    state: str
    """It is the state of the last decision; `undecided` if the record ends before any, `restored`
    if an error of ours undid it."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What one device's sensors said over the run; `None` where they said nothing."""

    rank: int
    device: str
    begin_s: float
    """The device's clock stood at this when the record began."""
    device_t_s: tuple[float, ...]
    """These are times of the device's clock: virtual time of a simulated device."""
    power_w: tuple[float | None, ...]
    sm_clock_hz: tuple[float | None, ...]
    memory_clock_hz: tuple[float | None, ...]


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
class Report(Judgement):
    """Everything a reader may ask of a run: the judgement, and what else is on record. `None` is
    unknown, never zero. `saving` and `slowdown` are 0 if the default stands. Its many attributes
    are the keys of `report.json`, which others build on."""

    schema: str
    label: Label
    """Where the times and energies come from."""
    run: str
    device: str
    devices: tuple[DeviceInfo, ...]
    iterations: int
    """The script did so many; in a killed run, so many are on record."""
    contract: float | None
    """It is the slowdown that is allowed."""
    within_contract: bool | None
    """The whole interval of the slowdown is below the bound (True) or above it (False)."""
    kept: bool
    """A setting other than the found one was still held when the record ended."""
    restored: bool | None
    """The found setting was put back and seen; None if the record ends without an end."""
    refused: tuple[Refused, ...]
    energy_method: str | None
    energy_disagreement: float | None
    """It is (integral of power - energy counter) / counter: the larger of all ranks."""
    energy_j: float | None
    """All devices used this over the whole run, with all that is not an iteration. It is None on a
    simulated device, which did none of the script's work."""
    footprint: Footprint | None
    """It has carbon and cost; None if the user gave no factor."""
    interval_method: str
    goal: Goal
    found: Setting
    after: Setting | None
    choice: ChosenSetting
    rehearsed_iterations: int
    mode: ClocksMode
    mode_reason: str
    outcome: str | None
    unseen: str | None
    """Why no iteration was seen, and what to do about it; None if one was."""
    job: JobClass
    """It says what bounds the job."""
    features: TraceFeatures | None
    """How an iteration uses the GPU; None without a trace of it."""
    idle: Idle | None
    """How much of the time the GPU has nothing to do."""
    ranks: str
    """How several ranks were added up."""
    command: tuple[str, ...]
    kilter: str
    host: str | None
    torch: str | None
    driver: str | None
    wall_time: str
    config: str | None
    """This configuration file was read."""
    duration_s: float
    overhead: Overhead | None
    decisions: tuple[Decided, ...]
    errors: tuple[Failed, ...]
    prediction: Prediction | None
    memory: MemoryReport | None
    """It is None if memory was left alone."""
    sections: SectionsReport | None
    """It is None if nobody looked for communication sections."""
    operation_clocks: Operated | None
    """It is None if no clocks were planned for unit operations."""
    blocks: tuple[Block, ...]
    series: tuple[Series, ...]
    operations: tuple[OperationEnergy, ...]
    operations_method: str | None
    no_trace: str | None
    """Why the operations of an iteration were not recorded; None if they were, or if the record has
    no end."""
    unread: tuple[str, ...]
    """It says, for each file that is there and cannot be read, why, and what is left out without
    it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The record of one rank, sorted by kind of event."""

    started: Started
    samples: tuple[Sampled, ...]
    blocks: tuple[Block, ...]
    decisions: tuple[Decided, ...]
    fitted: tuple[Fitted, ...]
    moved: tuple[Moved, ...]
    sectioned: tuple[Sectioned, ...]
    operated: tuple[Operated, ...]
    refused: tuple[Refused, ...]
    failed: tuple[Failed, ...]
    stopped: Stopped | None
    last_s: float


def find_run(name: str) -> Path:
    """The directory of a run; `latest` is the one below ./runs that was written to last."""
    if name != "latest":
        return Path(name)
    runs = {file.parent for file in Path("runs").glob("*/events-rank*.jsonl")}
    if not runs:
        raise FileError("runs: no run in here yet; make one with: kilter run SCRIPT")
    return max(runs, key=lambda run: max(f.stat().st_mtime_ns for f in event_files(run)))


def build(run_dir: str | Path, factors: Factors | None = None) -> Report:
    """The report of a run, from what can be read of it. `FileError` if there is no record, or a
    malformed one."""
    directory = Path(run_dir)
    ranks = read_ranks(directory)
    trace, no_operations = _load(directory / "trace.json", IterationTrace, _OF_TRACE)
    plan, no_plan = _load(directory / "plan.json", Plan, _OF_PLAN)
    return summarise(
        ranks,
        run=directory.resolve().name,
        trace=trace,
        plan=plan,
        unread=no_operations + no_plan,
        factors=factors,
    )


_OF_TRACE = "the operations of an iteration and their energy"
_OF_PLAN = "what the plan expects"


def _load(file: Path, kind: type[T], gives: str) -> tuple[T | None, tuple[str, ...]]:
    """The value in a file of a run, or a sentence on why the report does without what it gives."""
    if not file.exists():
        return None, ()
    try:
        return codec.load(file, kind), ()
    except FileError as error:
        return None, (f"{error}; the report leaves out {gives}",)


def read_ranks(directory: Path) -> list[Rank]:
    """The records of all ranks that have one. `FileError` if there is none, or a malformed one."""
    files = event_files(directory)
    if not directory.is_dir():
        raise FileError(f"{directory}: no such run")
    if not files:
        raise FileError(f"{directory}: not a run (it holds no events-rank*.jsonl)")
    ranks = [rank for file in files if (rank := _read_rank(file)) is not None]
    if not ranks:
        raise FileError(f"{files[0]}: the run ended before its first whole record")
    return ranks


def to_json(report: Report) -> bytes:
    """One JSON object on one line; what is not a finite number becomes `null`."""
    value = msgspec.to_builtins(report)
    value["memory"] = None if report.memory is None else as_json(report.memory)
    return msgspec.json.encode(value) + b"\n"


def event_files(directory: Path) -> list[Path]:
    """The event files of a run in the order of their ranks."""
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
    kinds: dict[Any, list[Any]] = {}
    last_s = -math.inf
    for event in events:
        found = kinds.setdefault(type(event), [])
        if isinstance(event, Moved | Sectioned | Operated | Stopped):
            found.clear()  # the last one rules
        found.append(event)
        last_s = max(last_s, event.t_s)
    if Started not in kinds:
        return None

    def of(kind: type[T]) -> tuple[T, ...]:
        return tuple(kinds.get(kind, ()))

    return Rank(
        started=of(Started)[0],
        samples=of(Sampled),
        blocks=of(Block),
        decisions=of(Decided),
        fitted=of(Fitted),
        moved=of(Moved),
        sectioned=of(Sectioned),
        operated=of(Operated),
        refused=_once(of(Refused)),
        failed=of(Failed),
        stopped=of(Stopped)[0] if Stopped in kinds else None,
        last_s=last_s,
    )


def summarise(
    ranks: Sequence[Rank],
    *,
    run: str,
    trace: IterationTrace | None,
    plan: Plan | None,
    unread: tuple[str, ...] = (),
    factors: Factors | None = None,
) -> Report:
    """The report from what was read. Pure."""
    lead = ranks[0].started
    stops = [rank.stopped for rank in ranks if rank.stopped is not None]
    complete = len(stops) == len(ranks)
    choice = _choice(ranks[0], complete=complete)
    stands = choice.setting == lead.found and choice.state not in ("undecided", "predicted")
    judged = judge(ranks[0].blocks, found=lead.found, chosen=choice.setting, stands=stands)
    memory = memory_report(
        lead.goal.memory_budget,
        [(rank.started.rank, rank.fitted, rank.moved) for rank in ranks],
        complete=complete,
    )
    iterations, rehearsed_iterations = _iterations(ranks[0], stops, complete=complete)
    end = _end(ranks, iterations)
    shown = trace if end["no_trace"] is None else None
    operations, operations_method = attribute(shown, judged.baseline.energy_j, lead.device)
    label = _label(lead, memory, governed=choice.setting != lead.found, judged=judged)
    idle = idle_of(trace, lead.device, ranks[0].samples, ranks[0].blocks)
    sections = sections_report((rank.started.rank, rank.sectioned) for rank in ranks)
    return Report(
        schema=SCHEMA,
        label=label,
        run=run,
        device=_names(ranks),
        devices=tuple(rank.started.device for rank in _one_per_device(ranks)),
        iterations=iterations,
        **taken(judged, (field.name for field in fields(judged))),
        **taken(lead, _OF_STARTED),
        **end,
        contract=lead.goal.max_slowdown,
        within_contract=within(lead.goal, judged.slowdown_ci95),
        kept=_kept(lead, choice),
        refused=_once(refusal for rank in ranks for refusal in rank.refused),
        footprint=footprint_of(
            factors,
            run=_used(factors, ranks),
            judged=judged,
            iterations=iterations,
            label=label,
            happened=lead.mode == ClocksMode.GOVERN and label is Label.MEASURED,
            found=lead.found,
            blocks=ranks[0].blocks,
        ),
        interval_method=_INTERVAL_METHOD,
        choice=choice,
        rehearsed_iterations=rehearsed_iterations,
        job=job_class(
            device=lead.device,
            label=Label.SIMULATED if judged.rehearsed_share > 0.0 else lead.device.label,
            idle=idle,
            samples=ranks[0].samples,
            blocks=ranks[0].blocks,
            probes=judged.probes,
            found=lead.found,
            memory=memory,
            sections=sections,
        ),
        features=None if shown is None else shown.features,
        idle=idle,
        ranks=_ranks_text(ranks),
        command=masked(lead.command),
        driver=lead.device.driver,
        duration_s=max(rank.last_s for rank in ranks),
        decisions=ranks[0].decisions,
        errors=tuple(failure for rank in ranks for failure in rank.failed),
        prediction=_prediction(plan),
        memory=memory,
        sections=sections,
        operation_clocks=next(iter(ranks[0].operated), None),
        blocks=ranks[0].blocks,
        series=tuple(_series(rank) for rank in _one_per_device(ranks)),
        operations=operations,
        operations_method=operations_method,
        unread=unread,
    )


_OF_STARTED = (
    *("goal", "found", "mode", "mode_reason"),
    *("kilter", "host", "torch", "wall_time", "config"),
)


def _end(ranks: Sequence[Rank], iterations: int) -> dict[str, Any]:
    """What the report says about how the run has ended, as far as that is on record."""
    stops = [rank.stopped for rank in ranks if rank.stopped is not None]
    complete = len(stops) == len(ranks)
    apart = [s.energy_disagreement for s in stops if s.energy_disagreement is not None]
    return {
        "restored": _restored(stops, complete=complete),
        "energy_method": " and ".join(sorted({stop.energy_method for stop in stops})) or None,
        "energy_disagreement": max(apart, key=abs, default=None),
        "energy_j": _run_energy_j(ranks),
        "after": stops[0].after if complete else None,
        "outcome": stops[0].outcome if complete else None,
        "unseen": next((stop.unseen for stop in stops if stop.unseen), None),
        "overhead": _overhead(stops, iterations) if complete else None,
        "no_trace": None if ranks[0].stopped is None else ranks[0].stopped.no_trace,
    }


def _label(
    lead: Started, memory: MemoryReport | None, *, governed: bool, judged: Judgement
) -> Label:
    """Of the times and energies: a measured run in which the judged pairs were rehearsed is a
    simulation."""
    if memory is not None and lead.goal.max_slowdown is None:
        return memory.label  # there are no other numbers
    if governed and judged.rehearsed_share > 0.0:
        return Label.SIMULATED
    return lead.device.label


def _iterations(rank: Rank, stops: Sequence[Stopped], *, complete: bool) -> tuple[int, int]:
    """Of the script, and rehearsed ones; of a killed run, as far as the record goes."""
    iterations = max((stop.iterations for stop in stops), default=0)
    rehearsed = max((stop.rehearsed_iterations for stop in stops), default=0)
    if not complete:
        script = (b for b in rank.blocks if not b.rehearsed)
        iterations = max(iterations, sum(b.iterations + b.left_out for b in script))
        rehearsed = sum(b.iterations + b.left_out for b in rank.blocks if b.rehearsed)
    return iterations, rehearsed


def _kept(lead: Started, choice: ChosenSetting) -> bool:
    return (
        choice.setting != lead.found
        and lead.mode == ClocksMode.GOVERN
        and choice.state != "predicted"
    )


def _used(factors: Factors | None, ranks: Sequence[Rank]) -> Amount | None:
    energy_j = _run_energy_j(ranks)
    return None if energy_j is None else amount(factors, energy_j, ranks[0].started.device.label)


def _run_energy_j(ranks: Sequence[Rank]) -> float | None:
    """Of all devices over the whole run; unknown if that of one of them is."""
    energies = [
        None if rank.stopped is None else rank.stopped.energy_j for rank in _one_per_device(ranks)
    ]
    known = [energy for energy in energies if energy is not None]
    return math.fsum(known) if len(known) == len(energies) else None


_INTERVAL_METHOD = (
    "mean log ratio of paired, interleaved blocks of the phases confirm and hold, with Student's t "
    "interval; blocks that helped to choose the setting are left out. The number of pairs was set "
    "by a sequential test, which the interval does not know about"
)


# One job out of several ranks: rank 0 writes the blocks of them all.


def _one_per_device(ranks: Sequence[Rank]) -> list[Rank]:
    """The first rank on each device, so that no device is counted twice."""
    return list({rank.started.device.uuid: rank for rank in reversed(ranks)}.values())[::-1]


def _names(ranks: Sequence[Rank]) -> str:
    counts = Counter(rank.started.device.name for rank in _one_per_device(ranks))
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())


def _ranks_text(ranks: Sequence[Rank]) -> str:
    world, devices = ranks[0].started.world_size, len(_one_per_device(ranks))
    if world == 1:
        return "one process on one device"
    if ranks[0].started.device.backend == "sim":
        return f"rank 0 of {world}, rehearsed on one device; the others are not counted"
    text = f"time of the slowest of {world} ranks, energy summed over {world} ranks"
    if len(ranks) < world:
        text += f"; {world - len(ranks)} of them left no record of their own"
    if devices < len(ranks):
        text += f"; {len(ranks)} ranks share {devices} devices, which count once for each rank"
    return text


# What was decided, and how it ended.


_SEARCHING = {phase.value for phase in (Phase.WARM, Phase.PROBE, Phase.CONFIRM)}


def _choice(rank: Rank, *, complete: bool) -> ChosenSetting:
    """What the last decision says, unless it was still searching or an error of ours undid it."""
    found = rank.started.found
    last = rank.decisions[-1] if rank.decisions else None
    if rank.failed:
        return ChosenSetting(
            setting=found,
            state="restored",
            reason="the default stands: kilter stepped aside after an error",
        )
    if last is not None and last.state not in _SEARCHING:
        return ChosenSetting(setting=last.setting, state=last.state, reason=last.reason)
    if rank.started.mode == ClocksMode.OBSERVE:
        return ChosenSetting(setting=found, state="undecided", reason=rank.started.mode_reason)
    ended = "the run ended" if complete else "the record ends"
    return ChosenSetting(setting=found, state="undecided", reason=f"{ended} {_doing(rank)}")


def _doing(rank: Rank) -> str:
    """What was going on when the record ends without a conclusion, and what was not found yet."""
    last = rank.decisions[-1] if rank.decisions else None
    # Blocks at the default are no decision: a search may be over, or nothing could be set.
    if rank.blocks and rank.blocks[-1].phase == Phase.HOLD.value:
        return "while the default was held; no setting had been chosen in its place"
    if last is None or last.state == Phase.WARM.value:
        return "before any setting was tried"
    if last.state == Phase.PROBE.value:
        return (
            f"while {last.setting} was being tried, to see what it saves and what it costs; the "
            "search for a better setting had no result yet"
        )
    return (
        f"while {last.setting} was being tested against the default; that it saves energy within "
        "the bound was not certain yet"
    )


def _restored(stops: Sequence[Stopped], *, complete: bool) -> bool | None:
    if any(not stop.restored for stop in stops):
        return False
    return True if complete else None


def _once(refusals: Iterable[Refused]) -> tuple[Refused, ...]:
    """The first of each: ranks, and attempts, are refused alike."""
    first: dict[tuple[str, str], Refused] = {}
    for refusal in refusals:
        first.setdefault((refusal.what, refusal.reason), refusal)
    return tuple(first.values())


def _overhead(stops: Sequence[Stopped], iterations: int) -> Overhead:
    slowest = max(stops, key=lambda stop: stop.hook_cost_s)
    return Overhead(
        hook_s=slowest.hook_cost_s,
        hook_per_iteration_s=slowest.hook_cost_s / iterations if iterations else None,
        sampler_s=max(stop.sampler_cost_s for stop in stops),
    )


def _prediction(plan: Plan | None) -> Prediction | None:
    if plan is None or plan.effect.peak_bytes is not None:  # None, or one of memory alone
        return None
    return Prediction(
        planner=plan.planner,
        actions=tuple(str(action.setting) for action in plan.actions),
        time_ratio=plan.effect.time_ratio,
        energy_ratio=plan.effect.energy_ratio,
        reason=plan.reason,
        label=plan.label,
    )


# What the sensors said.


def _series(rank: Rank) -> Series:
    samples = rank.samples
    size = max(1, math.ceil(len(samples) / MOST_POINTS))
    chunks = [samples[i : i + size] for i in range(0, len(samples), size)]
    begins = [s.device_t_s for s in samples[:1]] + [b.device_begin_s for b in rank.blocks[:1]]
    return Series(
        rank=rank.started.rank,
        device=rank.started.device.name,
        begin_s=min(begins, default=0.0),
        device_t_s=tuple(math.fsum(s.device_t_s for s in chunk) / len(chunk) for chunk in chunks),
        power_w=tuple(mean_of_known(s.power_w for s in chunk) for chunk in chunks),
        sm_clock_hz=tuple(mean_of_known(s.sm_clock_hz for s in chunk) for chunk in chunks),
        memory_clock_hz=tuple(mean_of_known(s.memory_clock_hz for s in chunk) for chunk in chunks),
    )
