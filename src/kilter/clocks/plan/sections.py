"""Communication sections: where a GPU communicates and does not compute. Pure.

    compute     union of the kernels that do not communicate
    comm        union of the kernels and copies that communicate
    overlapped  comm and compute at once            exposed  comm without compute
    copy        neither, but a copy of this GPU alone        idle  nothing at all

so that compute + exposed + copy + idle is the iteration. A section is a maximal run of exposed
communication; an interruption of at most `JOINED_S` (a cast between two pieces) does not end it.
Runs shorter than `LEAST_S` are launch gaps under a running collective, and remnants (`REMNANT`) of
one come and go: they are counted together.
(After claims 1, 9 and 17 of US 2025/0264922; the definition of exposure is that of
HolisticTraceAnalysis, whose memory operations are no computation either.)
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kilter.clocks.plan.cover import Cover, common, covers
from kilter.clocks.plan.match import Matched, match
from kilter.core.rank_trace import Collective, RankIteration, RankTimes, RankTrace
from kilter.core.units import show_fraction, show_time
from kilter.model.intervals import clip, difference, intersection, join, length, union

JOINED_S = 10e-6
LEAST_S = 20e-6
REMNANT = 0.01
"""What is left of a collective, as a share of its longest run, up to which it is no section of its
own: it may be there in one iteration and not in the next, and runs are told apart by their order.
"""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """What the occurrences of one section have in common. Times per iteration."""

    key: str
    """It names operation, group, and number in the iteration of the collective with which the
    section ends: the one that the next computation waits for. It is stable while the program stays
    the same."""
    op: str
    group: str | None
    bytes: int | None
    """The collectives that run in it move this; None where the trace does not say."""
    collectives: int
    """How many those are (median)."""
    presence: float
    """This share of the iterations has it."""
    start_s: float
    """The median start is this, counted from the beginning of the iteration."""
    length_s: float
    """The median length is this."""
    length_p5_s: float
    length_p95_s: float
    exposed_s: float
    """Mean over all iterations, so that the sections add up."""
    wait_s: float | None
    """This part of `exposed_s` waits for another rank; None where no other rank was seen."""
    gap_s: float
    """The next section, or the end of the iteration, comes after this time in the median."""
    gap_compute_s: float
    """Computation takes this much of it in the median."""
    covers: tuple[Cover, ...] = ()
    """They are computation before the section that has slack, from the latest to the earliest."""


class Short(msgspec.Struct, frozen=True, kw_only=True):
    """Exposed pieces that are too short to be sections, per iteration."""

    count: float
    exposed_s: float


class SectionPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one iteration, or of the mean iteration, goes."""

    iteration_s: float
    compute_s: float
    comm_s: float
    exposed_s: float
    overlapped_s: float
    copy_s: float
    idle_s: float
    wait_s: float | None
    """Collectives run so much longer than the same ones on the fastest rank; None: not known."""
    transfer_s: float | None
    exposed_wait_s: float | None


class RankSections(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, its mean iteration, its sections in order of their start."""

    rank: int
    source: str
    device: str
    iterations: int
    found_by: str
    mean: SectionPlace
    per_iteration: tuple[SectionPlace, ...]
    sections: tuple[Section, ...]
    short_sections: Short
    clock_offset_s: float | None
    """This rank's clock minus that of the first trace is this; None where nothing tells."""

    @property
    def exposed_share(self) -> float:
        return self.mean.exposed_s / self.mean.iteration_s


class SectionLane(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration of a rank for a picture; times from the iteration's beginning."""

    rank: int
    begin_s: float
    """It counts on the aligned clocks, from the beginning of the rank that is first."""
    length_s: float
    compute: RankTimes
    overlapped: RankTimes
    transferring: RankTimes
    """Exposed communication is in it that does not wait."""
    waiting: RankTimes
    """Exposed communication is in it that waits for another rank."""
    copies: RankTimes


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of a run."""

    ranks: tuple[RankSections, ...]
    lanes: tuple[SectionLane, ...]
    matched: int
    """So many collectives were seen on at least two ranks."""
    collectives: int
    left_out: tuple[str, ...]


class SectionOccurrence(msgspec.Struct, frozen=True, kw_only=True):
    """Where one section was in one iteration, on the rank's clock."""

    iteration: int
    marker_s: float
    """Where that iteration begins."""
    key: str
    begin_s: float
    end_s: float


def analyse(traces: Sequence[RankTrace]) -> Analysis:
    """The sections of the ranks of one run; `PlanError` for traces that cannot be of one run."""
    traces = sorted(traces, key=lambda trace: trace.rank)
    matched = match(traces)
    views = [_View(t, trace, matched) for t, trace in enumerate(traces)]
    return Analysis(
        ranks=tuple(
            view.sections(_clock(traces[0], trace, matched.offset_s[t]))
            for t, (trace, view) in enumerate(zip(traces, views, strict=True))
        ),
        lanes=_lanes(views, matched.offset_s),
        matched=len(matched.transfer_s),
        collectives=sum(len(trace.collectives) for trace in traces),
        left_out=(
            *_warnings(traces),
            *_missing(traces),
            *_uneven(traces),
            *matched.left_out,
            *_alone(traces, matched),
        ),
    )


def places(trace: RankTrace) -> tuple[SectionOccurrence, ...]:
    """Every section of every iteration of a rank, on the rank's clock (`origin_s`)."""
    view = _View(0, trace, match([trace]))
    return tuple(
        SectionOccurrence(
            iteration=window.number,
            marker_s=trace.origin_s + window.begin_s,
            key=found.key,
            begin_s=trace.origin_s + window.begin_s + found.begin_s,
            end_s=trace.origin_s + window.begin_s + found.end_s,
        )
        for i, window in enumerate(trace.iterations)
        for found in view.occurrences(i)[0]
    )


def _clock(first: RankTrace, trace: RankTrace, offset_s: float | None) -> float | None:
    return None if offset_s is None else offset_s + trace.origin_s - first.origin_s


def _lanes(views: Sequence[_View], offsets: Sequence[float | None]) -> tuple[SectionLane, ...]:
    """The same iteration of all ranks on one clock; a rank of unknown clock begins first."""
    number = views[0].window(None).number
    windows = [view.window(number) for view in views]
    begins = [
        None if offset is None else window.begin_s - offset
        for window, offset in zip(windows, offsets, strict=True)
    ]
    first = min(begin for begin in begins if begin is not None)
    return tuple(
        view.lane(window, 0.0 if begin is None else begin - first)
        for view, window, begin in zip(views, windows, begins, strict=True)
    )


def summary(analysis: Analysis) -> str:
    """One sentence: what is exposed, and where."""
    worst = max(analysis.ranks, key=lambda r: r.exposed_share)
    mean = worst.mean
    if mean.comm_s == 0.0:
        return (
            "No communication kernels in "
            f"{'the trace' if len(analysis.ranks) == 1 else 'any of the traces'}: "
            "there is no section to slow down."
        )
    where = "" if len(analysis.ranks) == 1 else f" on rank {worst.rank}, the largest share"
    text = (
        f"{show_fraction(worst.exposed_share)} of the iteration is exposed communication"
        f"{where} ({show_time(mean.exposed_s)} of {show_time(mean.iteration_s)}"
    )
    if mean.exposed_wait_s is not None and mean.exposed_s > 0.0:
        text += f", {show_fraction(mean.exposed_wait_s / mean.exposed_s)} of it waiting"
    if not worst.sections:
        return f"{text}), in pieces below {show_time(LEAST_S)}."
    longest_s = max(section.length_s for section in worst.sections)
    there = "" if len(analysis.ranks) == 1 else " there"
    return f"{text}); the longest section{there} takes {show_time(longest_s)}."


class _Occurrence(msgspec.Struct, frozen=True, kw_only=True):
    """A section in one iteration."""

    key: str
    begin_s: float
    end_s: float
    exposed_s: float
    wait_s: float
    inside: tuple[Collective, ...]
    gap_s: float
    gap_compute_s: float
    covers: tuple[Cover, ...]


class _View:
    """The sets of one rank, cut to its iterations."""

    def __init__(self, place: int, trace: RankTrace, matched: Matched) -> None:
        self._trace = trace
        self._known = not trace.collectives or any(t == place for t, _ in matched.transfer_s)
        self._comm = union((c.begin_s, c.end_s) for c in trace.collectives)
        self._exposed = difference(self._comm, trace.compute)
        self._copies = difference(trace.copies, union([*self._comm, *trace.compute]))
        waits: RankTimes = []
        self._wait_s: dict[int, float] = defaultdict(float)
        self._transfer_s: dict[int, float] = defaultdict(float)
        self._of: list[list[tuple[Collective, str]]] = [[] for _ in trace.iterations]
        begins = [window.begin_s for window in trace.iterations]
        numbers: dict[tuple[int, str], int] = defaultdict(int)
        for c, collective in enumerate(trace.collectives):
            at = bisect_right(begins, collective.begin_s) - 1
            if at < 0 or collective.begin_s >= trace.iterations[at].end_s:
                continue
            name = f"{collective.op}/{collective.group or f'stream {collective.stream}'}"
            numbers[at, name] += 1
            self._of[at].append((collective, f"{name}/{numbers[at, name]}"))
            transfer_s = matched.transfer_s.get((place, c))
            if transfer_s is not None:
                waits.append((collective.begin_s, collective.end_s - transfer_s))
                self._wait_s[at] += collective.duration_s - transfer_s
                self._transfer_s[at] += transfer_s
        self._begins = [[c.begin_s for c, _ in of] for of in self._of]
        self._longest_s = [max((c.duration_s for c, _ in of), default=0.0) for of in self._of]
        self._waiting = intersection(self._exposed, union(waits))

    def sections(self, clock_offset_s: float | None) -> RankSections:
        trace = self._trace
        per_iteration = [self._times(i) for i in range(len(trace.iterations))]
        found: dict[str, list[_Occurrence]] = defaultdict(list)
        short: list[float] = []
        for i in range(len(trace.iterations)):
            occurrences, shorter = self.occurrences(i)
            short += shorter
            for occurrence in occurrences:
                found[occurrence.key].append(occurrence)
        count = len(trace.iterations)
        sections = [self._section(key, group, count) for key, group in found.items()]
        return RankSections(
            rank=trace.rank,
            source=trace.source,
            device=trace.device,
            iterations=count,
            found_by=trace.found_by,
            mean=_mean(per_iteration),
            per_iteration=tuple(per_iteration),
            sections=tuple(sorted(sections, key=lambda s: s.start_s)),
            short_sections=Short(count=len(short) / count, exposed_s=sum(short) / count),
            clock_offset_s=clock_offset_s,
        )

    def window(self, number: int | None) -> RankIteration:
        """The iteration of that number; without it or without one, that of median length."""
        windows = self._trace.iterations
        same = [window for window in windows if window.number == number]
        by_length = sorted(windows, key=lambda w: w.end_s - w.begin_s)
        return same[0] if same else by_length[len(windows) // 2]

    def lane(self, window: RankIteration, begin_s: float) -> SectionLane:
        """An iteration as a picture shows it."""

        def cut(times: RankTimes) -> RankTimes:
            pieces = clip(times, window.begin_s, window.end_s)
            return [(a - window.begin_s, b - window.begin_s) for a, b in pieces]

        compute = self._trace.compute
        return SectionLane(
            rank=self._trace.rank,
            begin_s=begin_s,
            length_s=window.end_s - window.begin_s,
            compute=cut(difference(compute, self._comm)),
            overlapped=cut(intersection(compute, self._comm)),
            transferring=cut(difference(self._exposed, self._waiting)),
            waiting=cut(self._waiting),
            copies=cut(self._copies),
        )

    def _times(self, i: int) -> SectionPlace:
        window = self._trace.iterations[i]

        def inside(times: RankTimes) -> float:
            return length(clip(times, window.begin_s, window.end_s))

        comm_s, exposed_s = inside(self._comm), inside(self._exposed)
        compute_s = inside(self._trace.compute)
        copy_s = inside(self._copies)
        iteration_s = window.end_s - window.begin_s
        known = self._known
        return SectionPlace(
            iteration_s=iteration_s,
            compute_s=compute_s,
            comm_s=comm_s,
            exposed_s=exposed_s,
            overlapped_s=comm_s - exposed_s,
            copy_s=copy_s,
            idle_s=max(0.0, iteration_s - compute_s - exposed_s - copy_s),
            wait_s=self._wait_s[i] if known else None,
            transfer_s=self._transfer_s[i] if known else None,
            exposed_wait_s=inside(self._waiting) if known else None,
        )

    def occurrences(self, i: int) -> tuple[list[_Occurrence], list[float]]:
        """The sections of an iteration, and the lengths of what is too short for one."""
        window, compute = self._trace.iterations[i], self._trace.compute
        exposed = clip(self._exposed, window.begin_s, window.end_s)
        runs = join(exposed, JOINED_S)
        lengths = [length(clip(exposed, *run)) for run in runs]
        longest: dict[str, float] = defaultdict(float)
        names = [self._inside(i, *run)[1] for run in runs]
        for name, s in zip(names, lengths, strict=True):
            longest[name] = max(longest[name], s)
        least = [max(LEAST_S, REMNANT * longest[name]) for name in names]
        kept = [run for run, s, least_s in zip(runs, lengths, least, strict=True) if s >= least_s]
        ends = [*(begin for begin, _ in kept), window.end_s][1:]
        # Computation goes on after a run because a collective is over, or for a reason of its own.
        overs = sorted(c.end_s for c, _ in self._of[i])
        before = [window.begin_s]
        for begin, end in kept:
            waited = bisect_left(overs, begin) < bisect_right(overs, end + JOINED_S)
            before.append(end if waited else before[-1])
        occurrences = []
        pieces: dict[str, int] = defaultdict(int)
        for (begin, end), following, from_s in reversed(
            list(zip(kept, ends, before[:-1], strict=True))
        ):
            inside, name = self._inside(i, begin, end)
            pieces[name] += 1
            occurrences.append(
                _Occurrence(
                    key=name if pieces[name] == 1 else f"{name}-{pieces[name]}",
                    begin_s=begin - window.begin_s,
                    end_s=end - window.begin_s,
                    exposed_s=length(clip(exposed, begin, end)),
                    wait_s=length(clip(self._waiting, begin, end)),
                    inside=inside,
                    gap_s=following - end,
                    gap_compute_s=length(clip(compute, end, following)),
                    covers=covers(self._of[i], compute, from_s=from_s, begin_s=begin, end_s=end),
                )
            )
        short = [s for s, least_s in zip(lengths, least, strict=True) if s < least_s]
        return occurrences[::-1], short

    def _inside(self, i: int, begin: float, end: float) -> tuple[tuple[Collective, ...], str]:
        """The collectives of an iteration that run in a stretch of it, and the name of the one that
        ends last."""
        of, begins = self._of[i], self._begins[i]
        # Those that began earlier than the longest one takes are over.
        first, last = bisect_left(begins, begin - self._longest_s[i]), bisect_left(begins, end)
        inside = [(c, name) for c, name in of[first:last] if c.end_s > begin]
        before = (None, "from the iteration before")
        _, name = max(inside, key=lambda pair: pair[0].end_s, default=before)
        return tuple(c for c, _ in inside), name

    def _section(self, key: str, group: list[_Occurrence], iterations: int) -> Section:
        lengths = sorted(o.end_s - o.begin_s for o in group)
        inside = max((o.inside for o in group), key=len)
        sizes = [c.bytes for c in inside]
        named = {c.group for c in inside if c.group is not None}
        return Section(
            key=key,
            op=key.partition("/")[0],
            group=", ".join(sorted(named)) or None,
            bytes=None if not sizes or None in sizes else sum(s or 0 for s in sizes),
            collectives=int(statistics.median(len(o.inside) for o in group)),
            presence=len(group) / iterations,
            start_s=statistics.median(o.begin_s for o in group),
            length_s=statistics.median(lengths),
            length_p5_s=_quantile(lengths, 0.05),
            length_p95_s=_quantile(lengths, 0.95),
            exposed_s=sum(o.exposed_s for o in group) / iterations,
            wait_s=sum(o.wait_s for o in group) / iterations if self._known else None,
            gap_s=statistics.median(o.gap_s for o in group),
            gap_compute_s=statistics.median(o.gap_compute_s for o in group),
            covers=common([o.covers for o in group]),
        )


def _mean(per_iteration: Sequence[SectionPlace]) -> SectionPlace:
    count = len(per_iteration)
    means: dict[str, Any] = {}
    for name in SectionPlace.__struct_fields__:
        values = [getattr(times, name) for times in per_iteration]
        means[name] = None if None in values else sum(values) / count
    return SectionPlace(**means)


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Linear between the values."""
    place = share * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])


def _warnings(traces: Sequence[RankTrace]) -> list[str]:
    return [f"{trace.source}: {text}" for trace in traces for text in trace.warnings]


def _missing(traces: Sequence[RankTrace]) -> list[str]:
    size = next((t.world_size for t in traces if t.world_size is not None), None)
    absent = sorted(set(range(size or 0)) - {t.rank for t in traces})
    if not absent:
        return []
    more = f" and {len(absent) - 8} more" if absent[8:] else ""
    shown = ", ".join(map(str, absent[:8])) + more
    return [
        f"rank{'s' if len(absent) > 1 else ''} {shown} of {size}: no trace was given, so waiting "
        f"for {'them' if len(absent) > 1 else 'that rank'} counts as transfer"
    ]


def _alone(traces: Sequence[RankTrace], matched: Matched) -> Iterator[str]:
    """Ranks of which some collectives were seen elsewhere and others not."""
    for t, trace in enumerate(traces):
        total = len(trace.collectives)
        seen = sum((t, c) in matched.transfer_s for c in range(total))
        if not total and any(other.collectives for other in traces):
            yield (
                f"rank {trace.rank}: holds no communication, though others do; what they waited "
                "for it is unknown"
            )
        if seen < total and len(traces) > 1:
            yield (
                f"rank {trace.rank}: {total - seen} of {total} collectives were seen on no other "
                "rank; their waiting is not counted"
            )


def _uneven(traces: Sequence[RankTrace]) -> list[str]:
    counts = {trace.rank: len(trace.iterations) for trace in traces}
    if len(set(counts.values())) < 2:
        return []
    shown = ", ".join(f"{count} on rank {rank}" for rank, count in list(counts.items())[:8])
    return [f"the traces hold different numbers of iterations ({shown}); means are per rank"]
