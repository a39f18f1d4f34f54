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

from kilter.app.memory_report import MemoryReport, memory_report
from kilter.core import codec
from kilter.core.errors import FileError
from kilter.core.events import (
    AnyEvent,
    Block,
    Decided,
    Failed,
    Fitted,
    Moved,
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
from kilter.plan.governor import Phase
from kilter.plan.guard import Contract
from kilter.sim.profile import Profile, load_profile, profile_of
from kilter.sim.work import cost_of, work_of

SCHEMA = "kilter.report/1"

JUDGED = (Phase.CONFIRM.value, Phase.HOLD.value)
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
    """State of the last decision; `undecided` if the record ends before any, `restored` if an
    error of ours undid it."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What one device's sensors said over the run; `None` where they said nothing."""

    rank: int
    device: str
    begin_s: float
    """The device's clock when the record begins."""
    device_t_s: tuple[float, ...]
    """The device's clock: virtual time of a simulated device."""
    power_w: tuple[float | None, ...]
    sm_clock_hz: tuple[float | None, ...]
    memory_clock_hz: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEnergy:
    """Energy of one iteration attributed to the operations of one kind and one name, or of the
    same place in every layer."""

    name: str
    """`blocks.*.mlp.0` for that of several layers."""
    names: int
    """How many that are."""
    kind: str
    energy_j: float
    share: float
    duration_s: float
    """In the trace, on its timeline."""
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
    energy_disagreement: float | None
    """(integral of power - energy counter) / counter: the larger of all ranks."""
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
    memory: MemoryReport | None
    """None if memory was left alone."""
    blocks: tuple[Block, ...]
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
    fitted: tuple[Fitted, ...]
    moved: tuple[Moved, ...]
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
    record = list(events)
    if not record or not isinstance(record[0], Started):
        return None
    stopped = [e for e in record if isinstance(e, Stopped)]
    return Rank(
        started=record[0],
        samples=tuple(e for e in record if isinstance(e, Sampled)),
        blocks=tuple(e for e in record if isinstance(e, Block)),
        decisions=tuple(e for e in record if isinstance(e, Decided)),
        fitted=tuple(e for e in record if isinstance(e, Fitted)),
        moved=tuple(e for e in record if isinstance(e, Moved)),
        refused=tuple(e for e in record if isinstance(e, Refused)),
        failed=tuple(e for e in record if isinstance(e, Failed)),
        stopped=stopped[-1] if stopped else None,
        last_s=max(e.t_s for e in record),
    )


def summarise(
    ranks: Sequence[Rank], *, run: str, trace: IterationTrace | None, plan: Plan | None
) -> Report:
    """The report from what was read. Pure."""
    lead = ranks[0].started
    stops = [rank.stopped for rank in ranks if rank.stopped is not None]
    complete = len(stops) == len(ranks)
    blocks = ranks[0].blocks
    choice = _choice(ranks[0], complete=complete)
    pairs = pair_up(blocks)
    governed = choice.setting != lead.found
    judged = [
        pair for pair in pairs if pair[1].phase in JUDGED and pair[1].setting == choice.setting
    ]
    time, energy = _estimates(judged if governed else [])
    evidence = _evidence(blocks, judged if governed else pairs, energy)
    stands = not governed and choice.state not in ("undecided", "predicted")
    slowdown, slowdown_ci = _change(time, sign=1)
    saving, saving_ci = _change(energy, sign=-1)
    if governed and judged:
        baseline, arm = _arm([base for base, _ in judged]), _arm([ours for _, ours in judged])
    else:
        baseline = _arm([b for b in blocks if b.arm == "baseline" and _usable(b)])
        arm = baseline if stands else Arm(iteration_s=None, energy_j=None)
    label = lead.device.label
    if governed and any(block.rehearsed for pair in judged for block in pair):
        label = Label.SIMULATED
    memory = memory_report(
        lead.goal.memory_budget,
        [(rank.started.rank, rank.fitted, rank.moved) for rank in ranks],
    )
    if memory is not None and lead.goal.max_slowdown is None:
        label = memory.label  # there are no other numbers
    operations, operations_method = attribute(trace, baseline.energy_j, lead.device)
    iterations = max((stop.iterations for stop in stops), default=0)
    rehearsed_iterations = max((stop.rehearsed_iterations for stop in stops), default=0)
    if not complete:
        iterations = max(iterations, sum(b.iterations for b in blocks if not b.rehearsed))
        rehearsed_iterations = sum(b.iterations for b in blocks if b.rehearsed)
    return Report(
        schema=SCHEMA,
        label=label,
        run=run,
        device=_names(ranks),
        devices=tuple(rank.started.device for rank in _one_per_device(ranks)),
        iterations=iterations,
        baseline=baseline,
        governed=arm,
        saving=0.0 if stands else saving,
        saving_ci95=saving_ci,
        slowdown=0.0 if stands else slowdown,
        slowdown_ci95=slowdown_ci,
        contract=lead.goal.max_slowdown,
        within_contract=_within(lead.goal, slowdown_ci),
        kept=governed and lead.mode == "govern" and choice.state != "predicted",
        restored=_restored(stops, complete=complete),
        refused=_once(refusal for rank in ranks for refusal in rank.refused),
        energy_method=" and ".join(sorted({stop.energy_method for stop in stops})) or None,
        energy_disagreement=max(
            (s.energy_disagreement for s in stops if s.energy_disagreement is not None),
            key=abs,
            default=None,
        ),
        interval_method=_INTERVAL_METHOD,
        goal=lead.goal,
        found=lead.found,
        after=stops[0].after if complete else None,
        choice=choice,
        evidence=evidence,
        rehearsed_iterations=rehearsed_iterations,
        rehearsed_share=_rehearsed_share(judged if governed else pairs),
        mode=lead.mode,
        mode_reason=lead.mode_reason,
        outcome=stops[0].outcome if complete else None,
        ranks=_ranks_text(ranks),
        command=lead.command,
        kilter=lead.kilter,
        wall_time=lead.wall_time,
        duration_s=max(rank.last_s for rank in ranks),
        overhead=_overhead(stops, iterations) if complete else None,
        probes=_probes(pairs, choice.setting),
        decisions=ranks[0].decisions,
        errors=tuple(failure for rank in ranks for failure in rank.failed),
        prediction=_prediction(plan),
        memory=memory,
        blocks=blocks,
        series=tuple(_series(rank) for rank in _one_per_device(ranks)),
        operations=operations,
        operations_method=operations_method,
    )


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


# Pairs and estimates.


def _usable(block: Block) -> bool:
    return block.clean and block.iteration_s > 0.0


_UNCLEAN = "no reason given"


def pair_up(blocks: Iterable[Block]) -> list[tuple[Block, Block]]:
    """(baseline, candidate) of every pair of which both blocks are clean.

    The blocks of a pair follow each other with no other pair between them; numbers of pairs may
    begin anew when a search is opened again.
    """
    pairs = []
    key: tuple[str, int] | None = None
    arms: dict[str, Block] = {}
    for block in blocks:
        if block.pair is None:
            continue
        if (block.phase, block.pair) != key:
            key, arms = (block.phase, block.pair), {}
        if _usable(block):
            arms[block.arm] = block
            if len(arms) == 2:
                pairs.append((arms["baseline"], arms["candidate"]))
                arms = {}
    return pairs


Pairs = Sequence[tuple[Block, Block]]


def _estimates(pairs: Pairs) -> tuple[Estimate | None, Estimate | None]:
    """Candidate over baseline: time and energy."""
    time = [math.log(ours.iteration_s / base.iteration_s) for base, ours in pairs]
    energy = [
        math.log(ours.energy_j / base.energy_j)
        for base, ours in pairs
        if ours.energy_j and base.energy_j
    ]
    return paired_ratio(time), paired_ratio(energy)


def _interval(estimate: Estimate | None) -> tuple[float, float] | None:
    if estimate is None or estimate.pairs < 2:
        return None
    return estimate.low, estimate.high


def _change(
    estimate: Estimate | None, *, sign: int
) -> tuple[float | None, tuple[float, float] | None]:
    """A ratio as a fraction more (`sign` 1) or less (-1) than the baseline, with its interval."""
    if estimate is None:
        return None, None
    interval = _interval(estimate)
    ends = sorted(sign * (end - 1.0) for end in interval) if interval else None
    return sign * (estimate.ratio - 1.0), (ends[0], ends[1]) if ends else None


def allowed_slowdown(goal: Goal) -> float | None:
    """What a safe slowdown stays below; "none at all" is tested with a small margin."""
    if goal.max_slowdown is None:
        return None
    return math.expm1(Contract(max_slowdown=goal.max_slowdown).bound)


def _within(goal: Goal, interval: tuple[float, float] | None) -> bool | None:
    bound = allowed_slowdown(goal)
    if bound is None or interval is None:
        return None
    if interval[1] <= bound:
        return True
    return False if interval[0] > bound else None


def _arm(blocks: Sequence[Block]) -> Arm:
    # Geometric means, so that their ratio is exactly the ratio of the headline.
    energies = [block.energy_j for block in blocks if block.energy_j]
    return Arm(
        iteration_s=_geometric_mean([block.iteration_s for block in blocks]),
        energy_j=_geometric_mean(energies) if len(energies) == len(blocks) else None,
    )


def _geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def _evidence(blocks: Sequence[Block], pairs: Pairs, energy: Estimate | None) -> Evidence:
    used = [block for pair in pairs for block in pair]
    return Evidence(
        iterations=sum(block.iterations for block in used),
        blocks=len(used),
        pairs=len(pairs),
        energy_pairs=energy.pairs if energy is not None else 0,
        left_out=dict(
            Counter(b.why_not or _UNCLEAN for b in blocks if not _usable(b)).most_common()
        ),
    )


def _rehearsed_share(pairs: Pairs) -> float:
    used = [block for pair in pairs for block in pair]
    total = sum(block.iterations for block in used)
    return sum(block.iterations for block in used if block.rehearsed) / total if total else 0.0


def _probes(pairs: Pairs, chosen: Setting) -> tuple[Probe, ...]:
    groups: dict[tuple[Setting, str], list[tuple[Block, Block]]] = {}
    for pair in pairs:
        ours = pair[1]
        role = "confirm" if ours.phase in JUDGED else ours.phase
        groups.setdefault((ours.setting, role), []).append(pair)
    result = []
    for (setting, role), group in sorted(groups.items(), key=_from_the_top):
        time, energy = _estimates(group)
        if time is not None:
            result.append(
                Probe(
                    setting=setting,
                    phase=role,
                    chosen=setting == chosen,
                    time_ratio=time.ratio,
                    time_ci95=_interval(time),
                    energy_ratio=energy.ratio if energy is not None else None,
                    energy_ci95=_interval(energy),
                    pairs=len(group),
                    blocks=2 * len(group),
                )
            )
    return tuple(result)


def _from_the_top(item: tuple[tuple[Setting, str], object]) -> tuple[float, float, float, bool]:
    """Highest setting first (a knob left alone is above any value), probes before judgements."""
    (setting, role), _ = item
    knobs = (setting.sm_clock_hz, setting.memory_clock_hz, setting.power_limit_w)
    sm, memory, limit = (-math.inf if knob is None else -knob for knob in knobs)
    return sm, memory, limit, role != "probe"


# What was decided, and how it ended.


_SEARCHING = {phase.value for phase in (Phase.WARM, Phase.PROBE, Phase.CONFIRM)}


def _choice(rank: Rank, *, complete: bool) -> Choice:
    """What the last decision says, unless it was still searching or an error of ours undid it."""
    found = rank.started.found
    last = rank.decisions[-1] if rank.decisions else None
    if rank.failed:
        return Choice(setting=found, state="restored", reason="kilter stepped aside after an error")
    if last is not None and last.state not in _SEARCHING:
        return Choice(setting=last.setting, state=last.state, reason=last.reason)
    if rank.started.mode == "observe":
        return Choice(setting=found, state="undecided", reason=rank.started.mode_reason)
    ended = "the run ended" if complete else "the record ends"
    doing = f"in the phase {last.state}" if last is not None else "before the first decision"
    reason = f"{ended} {doing}, before the evidence was in"
    return Choice(setting=found, state="undecided", reason=reason)


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


# Series and operations.


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
        power_w=tuple(_mean(s.power_w for s in chunk) for chunk in chunks),
        sm_clock_hz=tuple(_mean(s.sm_clock_hz for s in chunk) for chunk in chunks),
        memory_clock_hz=tuple(_mean(s.memory_clock_hz for s in chunk) for chunk in chunks),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


_LAYER = re.compile(r"((?:[^.\W\d]\w*\.)+)\d+(\..*|)")
"""A module's path with a number: what holds the layers, the number, the place in the layer."""


def _places(names: Iterable[str]) -> dict[str, str]:
    """By name of an operation, its place in every layer. A number at the end is a layer only where
    others have something inside; else it is a step of a sequence, which are all different."""
    paths = {name: match for name in names if (match := _LAYER.fullmatch(name))}
    layered = {match[1] for match in paths.values() if match[2]}
    return {
        name: f"{paths[name][1]}*{paths[name][2]}"
        if name in paths and paths[name][1] in layered
        else name
        for name in names
    }


def attribute(
    trace: IterationTrace | None, energy_j: float | None, device: DeviceInfo
) -> tuple[tuple[OperationEnergy, ...], str | None]:
    """Operations by energy, the largest first, and the rule by which it was attributed; the parts
    add up to `energy_j`.

    No sensor sees a single operation. On a real device power is taken as constant within the
    iteration, so each operation has the share of the energy that it has of the time. A simulated
    device has a model of each operation, which gives the shares.
    """
    if trace is None or energy_j is None or not trace.operations:
        return (), None
    rest_s = trace.iteration_s - math.fsum(op.duration_s for op in trace.operations)
    operations = list(trace.operations)
    profile = profile_of(device.name) if device.backend == "sim" else None
    if profile is not None:
        weights = _modelled_j(operations, trace, load_profile(profile))
        method = f"attributed by the model of each operation in sim:{profile}"
    else:
        if rest_s > 1e-3 * trace.iteration_s:
            operations.append(
                Operation(name="between operations", kind=Kind.GAP, start_s=0.0, duration_s=rest_s)
            )
        weights = [op.duration_s for op in operations]
        method = (
            f"attributed by share of time on the timeline of the {trace.timeline}, with the "
            "iteration's mean power throughout: no sensor sees a single operation"
        )
    total = math.fsum(weights)
    if total <= 0.0:
        return (), None
    places = _places({operation.name for operation in operations})
    groups: dict[tuple[str, Kind], list[tuple[Operation, float]]] = {}
    for operation, weight in zip(operations, weights, strict=True):
        place = (places[operation.name], operation.kind)
        groups.setdefault(place, []).append((operation, weight / total))
    result = [_operation(place, group, energy_j) for (place, _), group in groups.items()]
    return tuple(sorted(result, key=lambda op: -op.energy_j)), method


def _modelled_j(
    operations: Sequence[Operation], trace: IterationTrace, profile: Profile
) -> list[float]:
    """Energy of each operation alone on a simulated device at its default clocks."""
    sm_hz, memory_hz = profile.knobs.sm_highest_hz, profile.knobs.memory_clocks_hz[-1]
    energies = []
    for operation in operations:
        if not (operation.duration_s or operation.flops or operation.bytes_moved):
            energies.append(0.0)
            continue
        work = work_of(
            replace(trace, operations=(operation,)),
            profile.roofline,
            sm_hz=sm_hz,
            memory_hz=memory_hz,
        )
        cost = cost_of(work, profile.roofline, profile.power, sm_hz=sm_hz, memory_hz=memory_hz)
        energies.append(cost.energy_j)
    return energies


def _operation(
    place: str, group: Sequence[tuple[Operation, float]], energy_j: float
) -> OperationEnergy:
    """Operations of one place and kind as one."""
    operations = [operation for operation, _ in group]
    names = {operation.name for operation in operations}
    share = math.fsum(share for _, share in group)
    flops = _sum(op.flops for op in operations)
    bytes_moved = _sum(op.bytes_moved for op in operations)
    return OperationEnergy(
        name=place if len(names) > 1 else operations[0].name,
        names=len(names),
        kind=operations[0].kind.value,
        energy_j=energy_j * share,
        share=share,
        duration_s=math.fsum(op.duration_s for op in operations),
        flops=flops,
        bytes_moved=bytes_moved,
        intensity_flop_per_byte=flops / bytes_moved if flops and bytes_moved else None,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None
