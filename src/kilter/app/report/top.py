"""What `kilter top` shows: a run as its event files stand now, as one value, and as text.

The judgement is the report's own, so that both say the same of the same record; the last readings
of the sensors are added. Pure: from what was read to what is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kilter.app.report import build as report
from kilter.app.report import memory as memory_report
from kilter.app.report import section_run, summary
from kilter.app.report.build import Rank, Report
from kilter.app.report.evidence import Arm
from kilter.app.report.words import ascii_line, wish
from kilter.core.events import Decided, Failed, Refused, Sampled
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.core.units import (
    show_bytes,
    show_clock,
    show_count,
    show_duration,
    show_fraction,
    show_power,
)

TOP_SCHEMA = "kilter.top/1"
SILENT_S = 10.0
"""After so long without a new line, the run may be dead."""
_MOST_DECISIONS = 6
_MOST_RANKS = 16
_PLOT_WIDTH = 60
_LEVELS = " .:-=+*#"


class RankNow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: the last reading of its sensors, and its memory. `None` is unknown."""

    rank: int
    device: str
    outcome: str | None
    """How its program has ended; None: no end on record."""
    power_w: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    sm_utilisation: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] | None = None
    budget_bytes: int | None = None
    peak_bytes: int | None = None


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    schema: str
    label: Label
    run: str
    state: str
    """`running`, `silent` (no end on record, and nothing written for a while) or `ended`."""
    silent_s: float
    """Since the last line was written."""
    duration_s: float
    """The run's clock at the last line."""
    command: tuple[str, ...]
    device: str
    goal: str
    mode: str
    mode_reason: str
    outcome: str | None
    iterations: int
    """As far as the record goes."""
    setting: Setting | None
    """Of the last block; None before the first."""
    phase: str | None
    """`warm`, `probe`, `confirm`, `hold` or `drift`, of the last block."""
    last: Arm | None
    """Iteration of the last block."""
    baseline: Arm
    governed: Arm
    saving: float | None
    saving_ci95: tuple[float, float] | None
    slowdown: float | None
    slowdown_ci95: tuple[float, float] | None
    contract: float | None
    within_contract: bool | None
    pairs: int
    result: str
    """The report's sentence, as far as there is one."""
    memory: tuple[str, ...]
    """The report's sentences about a memory budget."""
    sections: tuple[str, ...]
    """The report's sentences about communication sections."""
    ranks: tuple[RankNow, ...]
    power_w: tuple[float, ...]
    """Of rank 0 (or the first rank that has a sensor): the last readings, the newest last."""
    decisions: tuple[Decided, ...]
    refused: tuple[Refused, ...]
    errors: tuple[Failed, ...]


def now(ranks: Sequence[Rank], *, run: str, silent_s: float) -> Now:
    """The run as it stands. `ranks` must not be empty."""
    found = report.summarise(ranks, run=run, trace=None, plan=None)
    ended = all(rank.stopped is not None for rank in ranks)
    state = "ended" if ended else "silent" if silent_s > SILENT_S else "running"
    block = found.blocks[-1] if found.blocks else None
    return Now(
        schema=TOP_SCHEMA,
        label=found.label,
        run=run,
        state=state,
        silent_s=silent_s,
        duration_s=found.duration_s,
        command=found.command,
        device=found.device,
        goal=wish(found.goal),
        mode=found.mode,
        mode_reason=found.mode_reason,
        outcome=found.outcome,
        iterations=found.iterations,
        setting=None if block is None else block.setting,
        phase=None if block is None else block.phase,
        last=None if block is None else Arm(iteration_s=block.iteration_s, energy_j=block.energy_j),
        baseline=found.baseline,
        governed=found.governed,
        saving=found.saving,
        saving_ci95=found.saving_ci95,
        slowdown=found.slowdown,
        slowdown_ci95=found.slowdown_ci95,
        contract=found.contract,
        within_contract=found.within_contract,
        pairs=found.evidence.pairs,
        result=_result(found, ended=ended),
        memory=_memory(found),
        sections=_sections(found),
        ranks=tuple(_rank(rank) for rank in ranks),
        power_w=_power(ranks),
        decisions=found.decisions,
        refused=found.refused,
        errors=found.errors,
    )


def _result(found: Report, *, ended: bool) -> str:
    """The report's sentence; while the search goes on, how far it has come."""
    if ended or found.errors or found.slowdown is not None:
        return summary.headline(found)
    if found.goal.max_slowdown is None:
        return "clocks are left alone"
    if found.mode == "observe":
        return f"only watching: {found.mode_reason}"
    if not found.blocks:
        return "nothing judged yet"
    tried = len({probe.setting for probe in found.probes})
    return f"no verdict yet: {show_count(tried, 'setting')} compared with the default"


def _memory(found: Report) -> tuple[str, ...]:
    if found.memory is None:
        return ()
    details = [f"{name}: {text}" for name, text in memory_report.details(found.memory)]
    return (memory_report.headline(found.memory), *details)


def _sections(found: Report) -> tuple[str, ...]:
    if found.sections is None:
        return ()
    simulated = any(device.backend == "sim" for device in found.devices)
    details = section_run.details(found.sections, simulated=simulated)
    return (section_run.headline(found.sections, simulated=simulated), *details)


def _rank(rank: Rank) -> RankNow:
    sample = rank.samples[-1] if rank.samples else Sampled(t_s=0.0, device_t_s=0.0)
    moved = rank.moved[-1] if rank.moved else None
    return RankNow(
        rank=rank.started.rank,
        device=rank.started.device.name,
        outcome=None if rank.stopped is None else rank.stopped.outcome,
        power_w=sample.power_w,
        sm_clock_hz=sample.sm_clock_hz,
        memory_clock_hz=sample.memory_clock_hz,
        sm_utilisation=sample.sm_utilisation,
        temperature_c=sample.temperature_c,
        throttle=sample.throttle,
        budget_bytes=None if moved is None else moved.budget_bytes,
        peak_bytes=None if moved is None else moved.peak_bytes,
    )


def _power(ranks: Sequence[Rank]) -> tuple[float, ...]:
    for rank in ranks:
        if found := tuple(s.power_w for s in rank.samples if s.power_w is not None):
            return found
    return ()


# As text.


def screen(found: Now) -> str:
    """Lines of plain ASCII: names that a run chooses must not reach a terminal as commands."""
    lines = [
        f"kilter top  {found.run}: {' '.join(found.command)}",
        f"state     {_state(found)}",
        f"device    {summary.plain_name(found.device)} [{found.label.value}]",
        f"goal      {found.goal}",
    ]
    if found.mode != "govern":
        lines.append(f"mode      {found.mode}: {found.mode_reason}")
    if found.setting is not None and found.last is not None:
        lines.append(
            f"now       {found.phase}: {found.setting}, {summary.per_iteration(found.last)}"
        )
    if found.baseline.iteration_s is not None:
        lines.append(f"default   {summary.per_iteration(found.baseline)}")
    told = [line.partition(": ") for line in (*found.sections, *found.memory)]
    lines += [f"{name:<9} {text}" for name, _, text in told] or [f"result    {found.result}"]
    if found.memory and not found.sections and found.contract is not None:
        lines.append(f"result    {found.result}")
    lines += ["", *_ranks(found)]
    if len(found.power_w) > 1:
        lines += ["", _plot(found.power_w)]
    if found.decisions:
        lines += ["", "last decisions:"]
        lines += [
            f"  {show_duration(each.t_s):>8}  {each.state:<9} {each.setting}: {each.reason}"
            for each in found.decisions[-_MOST_DECISIONS:]
        ]
    lines += [f"refused   {each.what}: {each.reason}" for each in found.refused]
    lines += [f"error     {each.where}: {each.error}" for each in found.errors]
    return "\n".join(ascii_line(line).rstrip() for line in lines)


def _state(found: Now) -> str:
    counted = show_count(found.iterations, "timed iteration")
    since = show_duration(found.duration_s)
    if found.state == "ended":
        return f"ended after {since}, {counted}: {found.outcome}"
    if found.state == "silent":
        return (
            f"no end on record, and nothing written for {show_duration(found.silent_s)}: killed, "
            f"or busy; {counted} in {since} until then"
        )
    return f"running for {since}, {counted} on record"


def _ranks(found: Now) -> list[str]:
    memory = any(rank.budget_bytes is not None for rank in found.ranks)
    heads = f"{'rank':>4}  {'power':>8}  {'SM clock':>9}  {'memory':>9}  {'busy':>8}  {'at':>5}"
    lines = [heads + (f"  {'peak memory':>24}" if memory else "") + "  state"]
    for rank in found.ranks[:_MOST_RANKS]:
        line = (
            f"{rank.rank:>4}  {show_power(rank.power_w):>8}  {_clock(rank.sm_clock_hz):>9}  "
            f"{_clock(rank.memory_clock_hz):>9}  {show_fraction(rank.sm_utilisation):>8}  "
            f"{'?' if rank.temperature_c is None else f'{rank.temperature_c:.0f} C':>5}"
        )
        if memory:
            peak = f"{show_bytes(rank.peak_bytes)} of {show_bytes(rank.budget_bytes)}"
            line += f"  {peak:>24}"
        held = ", ".join(rank.throttle or ()).replace("_", " ")
        lines.append(f"{line}  {rank.outcome or found.state}{f'; held by {held}' if held else ''}")
    if len(found.ranks) > _MOST_RANKS:
        lines.append(f"      and {len(found.ranks) - _MOST_RANKS} ranks more (--json has them all)")
    return lines


def _clock(hertz: float | None) -> str:
    return "unknown" if hertz is None else show_clock(hertz)


def _plot(power_w: Sequence[float]) -> str:
    """The last readings of the power sensor, one character each."""
    shown = power_w[-_PLOT_WIDTH:]
    low, high = min(shown), max(shown)
    step = (high - low) / (len(_LEVELS) - 1) or 1.0
    marks = "".join(_LEVELS[round((value - low) / step)] for value in shown)
    return f"power     |{marks}| {show_power(low)} to {show_power(high)}, the newest on the right"
