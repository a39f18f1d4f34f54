"""The page of `kilter sections`: the answer, the ranks' timelines, the sections as a table."""

from __future__ import annotations

from collections.abc import Sequence

from kilter.app.report import svg
from kilter.app.report.page import document, section, table
from kilter.app.report.svg import Frame, escape
from kilter.clocks.plan.sections import Analysis, RankSections, SectionLane
from kilter.core.rank_trace import RankTimes
from kilter.core.section_record import SectionsFound
from kilter.core.units import show_bytes, show_clock, show_count, show_fraction, show_time
from kilter.model.intervals import join

MOST_LANES = 16
"""So many timelines are drawn; the ranks with most exposed time come first where there are more."""
MOST_ROWS = 40
"""The table has at most so many sections, by exposed time."""
ROW, BAR = 26.0, 16.0
"""A rank's timeline is so high with and without the space below it, in pixels."""
PARTS = (
    ("compute", "computes"),
    ("overlapped", "communicates under computation"),
    ("transferring", "exposed communication"),
    ("waiting", "exposed, waiting for another rank"),
    ("copies", "copies"),
)
_STYLE = """<style>
.part.compute { fill: var(--axis); fill-opacity: .55 }
.part.overlapped { fill: var(--trace) }
.part.transferring { fill: var(--bound) }
.part.waiting { fill: var(--bound); fill-opacity: .45 }
.part.copies { fill: var(--ours); fill-opacity: .6 }
</style>"""


def page(analysis: Analysis, answer: str, reasons: Sequence[str] = ()) -> str:
    """`answer` is one sentence, `reasons` what led to it."""
    reasoning = "".join(f"<p class='finding'>{escape(reason)}</p>" for reason in reasons)
    left_out = "".join(f"<p class='facts'>Note: {escape(text)}.</p>" for text in analysis.left_out)
    facts = (
        f"{show_count(len(analysis.ranks), 'rank')}; {analysis.matched} of {analysis.collectives} "
        "collectives were seen on more than one rank. Times are measured, per iteration."
    )
    body = (
        f"{_STYLE}<header><p class='kicker'>kilter sections "
        f"<span class='tag measured'>measured</span></p><h1>{escape(answer)}</h1>{reasoning}"
        f"<p class='facts'>{escape(facts)}</p>{left_out}</header>"
        f"{_timelines(analysis)}{_ranks(analysis)}{_sections(analysis)}"
    )
    return document("kilter sections", body)


def in_report(analysis: Analysis | None, answer: str, found: SectionsFound | None) -> str:
    """The sections of a run, inside its page."""
    drawn = ""
    if analysis is not None:
        drawn = f"{_STYLE}{_timelines(analysis)}{_ranks(analysis)}{_sections(analysis)}"
    told = f"<p class='finding'>{escape(answer)}</p>"
    return f"{section('Communication sections', told, key='sections')}{_clocks(found)}{drawn}"


def _clocks(found: SectionsFound | None) -> str:
    """Which rank has which clock in which section."""
    if found is None or not found.held:
        return ""
    rows = [
        (escape(key), show_clock(found.clocks_hz[depth - 1]) if depth else "as found", ranks)
        for key, row in zip(found.keys, found.depths, strict=True)
        for depth in sorted(set(row), reverse=True)
        for ranks in [", ".join(str(rank) for rank, own in enumerate(row) if own == depth)]
    ]
    columns = (("Section", "name"), ("Clock", "n"), ("Ranks", "n"))
    return section("Clocks held", table(columns, rows, "Clocks in sections"))


def _timelines(analysis: Analysis) -> str:
    order = sorted(range(len(analysis.lanes)), key=lambda i: -analysis.ranks[i].mean.exposed_s)
    lanes = [analysis.lanes[i] for i in sorted(order[:MOST_LANES])]
    shown = "" if len(lanes) == len(analysis.lanes) else f" The {MOST_LANES} most exposed ranks."
    drawn = svg.both_widths(
        "timelines",
        "Timelines of the ranks",
        "For each rank, when it computes, communicates and waits in one iteration.",
        lambda width: _picture(lanes, width),
    )
    told = f"<p>On clocks that the collectives align.{shown}</p>"
    return section("One iteration", told, f"<figure>{drawn}</figure>")


def _picture(lanes: Sequence[SectionLane], wide: float) -> tuple[float, str]:
    legend, top = svg.legend([(f"part {name}", words, True) for name, words in PARTS], wide)
    end_s = max(lane.begin_s + lane.length_s for lane in lanes)
    frame = Frame(
        left=64.0,
        top=top,
        right=wide - 8.0,
        bottom=top + ROW * len(lanes),
        x_range=(0.0, end_s * 1e3),
        y_range=(0.0, 1.0),
    )
    parts = [legend]
    for row, lane in enumerate(lanes):
        y = frame.top + row * ROW
        parts.append(svg.text(0.0, y + 13.0, f"rank {lane.rank}", "tick"))
        parts += [_bars(frame, y, lane, getattr(lane, name), name) for name, _ in PARTS]
    parts.append(frame.x_axis("ms"))
    return frame.bottom + 44.0, "".join(parts)


def _bars(frame: Frame, y: float, lane: SectionLane, times: RankTimes, name: str) -> str:
    """One kind of time. Pieces that the screen cannot tell apart are drawn as one; each is drawn
    at least half a pixel wide only if it is that wide, so that the picture adds up."""
    pixel_s = (frame.x_range[1] / 1e3) / (frame.right - frame.left)
    drawn = []
    for begin, end in join(times, 0.4 * pixel_s):
        if end - begin >= 0.2 * pixel_s:
            x = frame.x((lane.begin_s + begin) * 1e3)
            wide = frame.x((lane.begin_s + end) * 1e3) - x
            drawn.append(svg.rectangle(x, y, wide, BAR, f"part {name}"))
    return "".join(drawn)


def _ranks(analysis: Analysis) -> str:
    columns = (
        ("Rank", "n"),
        ("Iteration", "n"),
        ("Compute", "n"),
        ("Exposed", "n"),
        ("of it waiting", "n"),
        ("Overlapped", "n"),
        ("Idle", "n"),
        ("Iterations", "n wideonly"),
    )
    rows = [(*rank_row(rank), str(rank.iterations)) for rank in analysis.ranks]
    return section("Ranks", table(columns, rows, "Times per iteration"))


def rank_row(rank: RankSections) -> tuple[str, ...]:
    """Rank, iteration, compute, exposed, waiting, overlapped and idle time, as text."""
    mean = rank.mean
    return (
        str(rank.rank),
        show_time(mean.iteration_s),
        show_time(mean.compute_s),
        f"{show_time(mean.exposed_s)} ({show_fraction(rank.exposed_share)})",
        show_time(mean.exposed_wait_s),
        show_time(mean.overlapped_s),
        show_time(mean.idle_s),
    )


def _sections(analysis: Analysis) -> str:
    everything = [(r, s) for r in analysis.ranks for s in r.sections]
    largest = sorted(everything, key=lambda pair: -pair[1].exposed_s)[:MOST_ROWS]
    if not largest:
        return ""
    rest = len(everything) - len(largest)
    more = f" The {MOST_ROWS} with most exposed time; {rest} more." if rest else ""
    columns = (
        ("Rank", "n"),
        ("Ends with", "name"),
        ("Starts at", "n"),
        ("Length", "n"),
        ("5th to 95th percentile", "n wideonly"),
        ("Waiting", "n"),
        ("Bytes", "n wideonly"),
        ("In iterations", "n wideonly"),
    )
    rows = [
        (
            str(rank.rank),
            escape(own.key),
            show_time(own.start_s),
            show_time(own.length_s),
            f"{show_time(own.length_p5_s)} to {show_time(own.length_p95_s)}",
            show_time(own.wait_s),
            show_bytes(own.bytes),
            show_fraction(own.presence),
        )
        for rank, own in largest
    ]
    return section(
        "Sections",
        "<p>Maximal runs of exposed communication, named after the collective that ends them."
        f"{more}</p>",
        table(columns, rows, "Communication sections"),
    )
