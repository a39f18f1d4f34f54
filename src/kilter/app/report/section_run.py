"""What a run did about communication sections, in words: `kilter run --sections`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from kilter.clocks.plan.sections import Analysis, analyse
from kilter.core.codec import read
from kilter.core.errors import FileError, PlanError
from kilter.core.events import Operated, Sectioned
from kilter.core.rank_trace import WINDOW_FILE, RankTrace
from kilter.core.section_record import SectionsFound
from kilter.core.units import show_clock, show_count, show_fraction, show_pace, show_time

MOST_WINDOW_BYTES = 1 << 28
LENGTHENED = 1.1
"""Iterations in a window that are longer than the usual ones by more than this are told."""
_TRACE = msgspec.json.Decoder(RankTrace)


class RankSectioned(msgspec.Struct, frozen=True, kw_only=True):
    """The last word of one rank."""

    rank: int
    sections: Sectioned


class SectionsReport(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks. Exposure, windows, commands and edges are measured; the saving is simulated."""

    summary: str
    planned: bool
    dry_run: bool
    """No command reached a device."""
    commands: int
    left_out: int
    edges: int
    edge_error_p95_s: float | None
    """The worst rank's errors are within this in 95 % of the edges."""
    restored: bool | None
    """It is None if no conductor ran, or the record has no end."""
    search: SectionsFound | None
    """What the ranks' search has come to; None: it was not over, or nothing could be set."""
    instead: str | None
    """Why one clock for the whole job was governed in place of sections; None: it was not."""
    blocks: int
    """So many blocks of iterations were judged in it."""
    ranks: tuple[RankSectioned, ...]


def sections_report(ranks: Iterable[tuple[int, Sequence[Sectioned]]]) -> SectionsReport | None:
    """None if no rank looked for sections."""
    last = [RankSectioned(rank=rank, sections=found[-1]) for rank, found in ranks if found]
    if not last:
        return None
    planned = [each for each in last if each.sections.planned]
    spoken = max(planned or last, key=lambda each: each.sections.exposed_share)
    where = f"rank {spoken.rank}: " if len(last) > 1 else ""
    errors = [e for each in last if (e := each.sections.edge_error_p95_s) is not None]
    ends = [end for each in last if (end := each.sections.restored) is not None]
    return SectionsReport(
        summary=where + spoken.sections.summary,
        planned=bool(planned),
        dry_run=not any(each.sections.sets for each in last),
        commands=sum(each.sections.commands for each in last),
        left_out=sum(each.sections.left_out for each in last),
        edges=sum(each.sections.edges for each in last),
        edge_error_p95_s=max(errors, default=None),
        restored=all(ends) if ends else None,
        search=next((each.sections.search for each in last if each.sections.search), None),
        instead=next((each.sections.instead for each in last if each.sections.instead), None),
        blocks=max(each.sections.blocks for each in last),
        ranks=tuple(last),
    )


def windows(directory: Path) -> Analysis | None:
    """The last windows of all ranks of a run together; None if there are none that can be read, or
    if they do not belong together."""
    traces = []
    for path in sorted(directory.glob(WINDOW_FILE.format(rank="*"))):
        try:
            traces.append(_TRACE.decode(read(path, max_bytes=MOST_WINDOW_BYTES)))
        except (FileError, msgspec.MsgspecError):
            continue
    try:
        return analyse(traces) if traces else None
    except PlanError:
        return None


def headline(report: SectionsReport, *, simulated: bool) -> str:
    """The answer. What the plan would save is simulated; what is exposed was measured."""
    expected = simulated or report.search is None or report.instead is not None
    label = "simulated; exposed: measured" if expected else "measured"
    return f"sections: {answer(report)} [{label}]"


def answer(report: SectionsReport) -> str:
    """What was taken and why, or what would be, in one or two sentences."""
    found = report.search
    if report.instead is not None:
        return f"{report.summary} One clock for the whole job instead: {report.instead}."
    if found is None and report.planned and not report.dry_run:
        blocks = show_count(report.blocks, "block")
        return f"The search was not over after {blocks}: the default stood. {report.summary}"
    if found is None:
        return report.summary
    return outcome(found) if found.taken == "sections" else f"{report.summary} {outcome(found)}"


def outcome(found: SectionsFound) -> str:
    """What a search has come to."""
    if found.taken == "sections":
        return f"{held(found)} {_instead_of(found)}"
    if found.taken == "whole job":
        return f"One clock for the whole job pays more: {found.reason}."
    return f"The default stands: {found.reason}."


def held(found: SectionsFound) -> str:
    """The clocks that stand, or would, and the evidence for them."""
    verb = "Would hold" if found.rehearsed else "Held"
    text = f"{verb} {found.reason}"
    if found.time_ratio is not None and found.time_ratio_ci95 is not None:
        low, high = (show_fraction(ratio - 1.0) for ratio in found.time_ratio_ci95)
        text += f": {show_pace(found.time_ratio - 1.0)} ({low} to {high})"
    if found.energy_ratio is not None:
        text += f" with {show_fraction(1.0 - found.energy_ratio)} less energy"
    what = "clocks of an earlier run, confirmed" if found.known else "confirmed"
    return f"{text}; {what} in {show_count(found.pairs, 'pair')} of blocks."


def _instead_of(found: SectionsFound) -> str:
    if found.whole_job_saving is None or found.sections_saving is None:
        return ""
    return (
        f"One clock for the whole job was expected to save {show_fraction(found.whole_job_saving)} "
        f"within the bound, the sections {show_fraction(found.sections_saving)}."
    )


def details(report: SectionsReport, *, simulated: bool) -> list[str]:
    """How the commands went, and what looking has cost."""
    lines = []
    if report.commands:
        lines.append(f"commands: {commands(report, simulated=simulated)}")
    if report.edge_error_p95_s is not None:
        lines.append(
            f"edges: {show_count(report.edges, 'command')} within "
            f"{show_time(report.edge_error_p95_s)} (95 %) of the real edges [measured]"
        )
    if any(each.sections.waits for each in report.ranks):
        lines.append(f"long waits: {_waits(report)}")
    first = report.ranks[0].sections
    whose = "the device's own switch times" if first.calibrated else "the profile's switch times"
    lines.append(f"break-even: {show_time(first.break_even_s)} by {whose}")
    windows = max(each.sections.windows for each in report.ranks)
    reopened = max(each.sections.reopened for each in report.ranks)
    cost_s = max(each.sections.window_cost_s + each.sections.key_cost_s for each in report.ranks)
    text = f"looked: {show_count(windows, 'window')} of the profiler, {show_time(cost_s)} in all"
    if slower := _lengthened(report):
        text += f"; {slower}"
    if reopened:
        text += f"; the collectives changed {show_count(reopened, 'time')}"
    if any(each.sections.collectives == 0 for each in report.ranks):
        text += "; the process groups count no collectives: a change is seen by windows only"
    return [*lines, text]


def _lengthened(report: SectionsReport) -> str:
    """What the profiler has made of the iterations that the plan was made of, if that was much."""
    for each in report.ranks:
        seen_s, usual_s = each.sections.window_iteration_s, each.sections.iteration_s
        if seen_s is not None and usual_s is not None and seen_s > LENGTHENED * usual_s:
            return (
                f"on rank {each.rank} an iteration took {show_time(seen_s)} in the last one and "
                f"{show_time(usual_s)} otherwise, and the plan is made of the longer ones"
            )
    return ""


def commands(report: SectionsReport | Operated, *, simulated: bool) -> str:
    """How many there were, and what became of them."""
    count = show_count(report.commands, "clock call")
    if report.dry_run:
        text = f"{count} written down, none sent"
    else:
        text = f"{count} sent{' to the simulated device' if simulated else ''}"
        text += "; the found clock is back" if report.restored else "; the found clock is NOT back"
        if report.restored is None:
            text = f"{count} sent; no end on record"
    if report.left_out:
        share = report.left_out / (report.left_out + report.commands)
        text += f"; {report.left_out} left out ({show_fraction(share)})"
    return text


def _waits(report: SectionsReport) -> str:
    """Of all ranks together."""
    count = sum(each.sections.waits for each in report.ranks)
    low_s = sum(each.sections.waits_low_s for each in report.ranks)
    clocks = {hz for each in report.ranks if (hz := each.sections.waits_clock_hz) is not None}
    at = " and ".join(show_clock(hz) for hz in sorted(clocks))
    text = f"{show_count(count, 'wait')} of {show_time(low_s)} in all at {at}"
    return f"{text}; written down, not set" if report.dry_run else text
