"""What `kilter top` shows: a run as its event files stand now, as JSON and as text.

The judgement is the report's own, so that both say the same of the same record; the last readings
of the sensors are added. Pure: from what was read to what is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kilter.app.fields import taken
from kilter.app.report import memory as memory_report
from kilter.app.report import summary
from kilter.app.report.build import Rank, Report, summarise
from kilter.app.report.evidence import Arm
from kilter.app.report.words import ascii_line, wish
from kilter.core.events import Block, Moved, Sampled
from kilter.core.plan import ClocksMode
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


@dataclass(frozen=True, slots=True)
class Now:
    """A run as it stands. `ranks` must not be empty."""

    report: Report
    """It covers the record as far as that goes."""
    ranks: Sequence[Rank]
    silent_s: float
    """The last line was written so long ago."""

    @property
    def state(self) -> str:
        """`running`, `silent` (no end on record, and nothing written for a while) or `ended`."""
        if all(rank.stopped is not None for rank in self.ranks):
            return "ended"
        return "silent" if self.silent_s > SILENT_S else "running"

    @property
    def block(self) -> Block | None:
        """The last one."""
        return self.report.blocks[-1] if self.report.blocks else None

    @property
    def result(self) -> str:
        """The report's sentence; while the search goes on, how far it has come."""
        found = self.report
        if self.state == "ended" or found.errors or found.slowdown is not None:
            return summary.headline(found)
        if found.goal.max_slowdown is None:
            return "clocks are left alone"
        if found.mode == ClocksMode.OBSERVE:
            return f"only watching: {found.mode_reason}"
        if not found.blocks:
            return "nothing judged yet"
        tried = len({probe.setting for probe in found.probes})
        return f"no verdict yet: {show_count(tried, 'setting')} compared with the default"

    @property
    def memory(self) -> list[str]:
        """The report's sentences about a memory budget."""
        return [] if self.report.memory is None else memory_report.lines(self.report.memory)

    @property
    def power_w(self) -> list[float]:
        """The readings of the first rank that has a sensor, the newest last."""
        for rank in self.ranks:
            if found := [s.power_w for s in rank.samples if s.power_w is not None]:
                return found
        return []


def now(ranks: Sequence[Rank], *, run: str, silent_s: float) -> Now:
    """The judgement of what is on record."""
    return Now(summarise(ranks, run=run, trace=None, plan=None), ranks, silent_s)


def _sample(rank: Rank) -> Sampled:
    """The last reading."""
    return rank.samples[-1] if rank.samples else Sampled(t_s=0.0, device_t_s=0.0)


def _moved(rank: Rank) -> Moved | None:
    """The last state of memory."""
    return rank.moved[-1] if rank.moved else None


# As JSON.

_OF_REPORT = (
    *("label", "run", "duration_s", "command", "device", "mode", "mode_reason", "outcome"),
    *("iterations", "baseline", "governed", "saving", "saving_ci95", "slowdown", "slowdown_ci95"),
    *("contract", "within_contract", "decisions", "refused", "errors"),
)
_OF_SAMPLE = (
    *("power_w", "sm_clock_hz", "memory_clock_hz", "sm_utilisation", "temperature_c", "throttle"),
)


def as_json(found: Now) -> dict[str, Any]:
    """What `--json` prints. `None` is unknown."""
    report, block = found.report, found.block
    return {
        "schema": TOP_SCHEMA,
        "state": found.state,
        "silent_s": found.silent_s,
        **taken(report, _OF_REPORT),
        "goal": wish(report.goal),
        "setting": None if block is None else block.setting,
        "phase": None if block is None else block.phase,
        "last": _arm(block),
        "pairs": report.evidence.pairs,
        "result": found.result,
        "memory": found.memory,
        "sections": summary.inside(report),
        "power_w": found.power_w,
        "ranks": [_rank_as_json(rank) for rank in found.ranks],
    }


def _rank_as_json(rank: Rank) -> dict[str, Any]:
    moved = _moved(rank)
    return {
        "rank": rank.started.rank,
        "device": rank.started.device.name,
        "outcome": None if rank.stopped is None else rank.stopped.outcome,
        **taken(_sample(rank), _OF_SAMPLE),
        "budget_bytes": None if moved is None else moved.budget_bytes,
        "peak_bytes": None if moved is None else moved.peak_bytes,
    }


def _arm(block: Block | None) -> Arm | None:
    """One iteration of a block."""
    return None if block is None else Arm(iteration_s=block.iteration_s, energy_j=block.energy_j)


# As text.


def screen(found: Now) -> str:
    """Lines of plain ASCII: names that a run chooses must not reach a terminal as commands."""
    report, sections = found.report, summary.inside(found.report)
    lines = [
        f"kilter top  {report.run}: {' '.join(report.command)}",
        f"state     {_state(found)}",
        f"device    {summary.plain_name(report.device)} [{report.label.value}]",
        f"goal      {wish(report.goal)}",
    ]
    if report.mode != ClocksMode.GOVERN:
        lines.append(f"mode      {report.mode}: {report.mode_reason}")
    block, last = found.block, _arm(found.block)
    if block is not None and last is not None:
        when = "last" if found.state == "ended" else "now"
        lines.append(f"{when:<9} {block.phase}: {block.setting}, {summary.per_iteration(last)}")
    if report.baseline.iteration_s is not None:
        lines.append(f"default   {summary.per_iteration(report.baseline)}")
    told = [line.partition(": ") for line in (*sections, *found.memory)]
    lines += [f"{name:<9} {text}" for name, _, text in told] or [f"result    {found.result}"]
    if found.memory and not sections and report.contract is not None:
        lines.append(f"result    {found.result}")
    lines += ["", *_ranks(found)]
    if len(found.power_w) > 1:
        lines += ["", _plot(found.power_w)]
    if report.decisions:
        lines += ["", "last decisions:"]
        lines += [
            f"  {show_duration(each.t_s):>8}  {each.state:<9} {each.setting}: {each.reason}"
            for each in report.decisions[-_MOST_DECISIONS:]
        ]
    lines += [f"refused   {each.what}: {each.reason}" for each in report.refused]
    lines += [f"error     {each.where}: {each.error}" for each in report.errors]
    return "\n".join(ascii_line(line).rstrip() for line in lines)


def _state(found: Now) -> str:
    counted = show_count(found.report.iterations, "timed iteration")
    since = show_duration(found.report.duration_s)
    if found.state == "ended":
        return f"ended after {since}, {counted}: {found.report.outcome}"
    if found.state == "silent":
        return (
            f"no end on record, and nothing written for {show_duration(found.silent_s)}: killed, "
            f"or busy; {counted} in {since} until then"
        )
    return f"running for {since}, {counted} on record"


def _ranks(found: Now) -> Iterator[str]:
    memory = any(
        moved is not None and moved.budget_bytes is not None for moved in map(_moved, found.ranks)
    )
    heads = f"{'rank':>4}  {'power':>8}  {'SM clock':>9}  {'memory':>9}  {'busy':>8}  {'at':>5}"
    yield heads + (f"  {'peak memory':>24}" if memory else "") + "  state"
    for rank in found.ranks[:_MOST_RANKS]:
        sample, moved = _sample(rank), _moved(rank)
        line = (
            f"{rank.started.rank:>4}  {show_power(sample.power_w):>8}  "
            f"{_clock(sample.sm_clock_hz):>9}  {_clock(sample.memory_clock_hz):>9}  "
            f"{show_fraction(sample.sm_utilisation):>8}  "
            f"{'?' if sample.temperature_c is None else f'{sample.temperature_c:.0f} C':>5}"
        )
        if memory:
            peak, budget = (None, None) if moved is None else (moved.peak_bytes, moved.budget_bytes)
            line += f"  {f'{show_bytes(peak)} of {show_bytes(budget)}':>24}"
        state = found.state if rank.stopped is None else rank.stopped.outcome
        held = ", ".join(sample.throttle or ()).replace("_", " ")
        yield f"{line}  {state}{f'; held by {held}' if held else ''}"
    if len(found.ranks) > _MOST_RANKS:
        yield f"      and {len(found.ranks) - _MOST_RANKS} ranks more (--json has them all)"


def _clock(hertz: float | None) -> str:
    return "unknown" if hertz is None else show_clock(hertz)


def _plot(power_w: Sequence[float]) -> str:
    """The last readings of the power sensor, one character each."""
    shown = power_w[-_PLOT_WIDTH:]
    low, high = min(shown), max(shown)
    step = (high - low) / (len(_LEVELS) - 1) or 1.0
    marks = "".join(_LEVELS[round((value - low) / step)] for value in shown)
    return f"power     |{marks}| {show_power(low)} to {show_power(high)}, the newest on the right"
