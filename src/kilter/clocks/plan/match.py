"""Which collectives of several ranks are the same one, what of them is waiting, and how the ranks'
clocks differ. Pure.

A collective's kernel runs from the arrival of its own rank to the end of the transfer, so the
shortest kernel of a matched occurrence is at most the transfer plus what all ranks waited
together, and whatever another rank's kernel takes longer is that rank's wait. Only durations enter:
the ranks' clocks need not agree. All ranks see the end at nearly the same moment, which aligns the
clocks for the pictures.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations

import msgspec

from kilter.core.errors import PlanError
from kilter.core.rank_trace import Collective, RankTrace
from kilter.core.units import show_time

Place = tuple[int, int]
"""It is the index of a trace, and of a collective in it."""
MatchLane = tuple[str | None, tuple[int, ...], tuple[int, ...] | None]
"""It is made of a group, its members, and the pair of a point-to-point transfer."""


class Matched(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks' collectives have to do with each other."""

    transfer_s: dict[Place, float]
    """It has every collective that was seen on at least two ranks."""
    offset_s: tuple[float | None, ...]
    """Each trace has its clock minus that of the first trace here, each from its origin; None if
    unknown."""
    left_out: tuple[str, ...]
    """What could not be matched, in words."""


def match(traces: Sequence[RankTrace]) -> Matched:
    """Match the collectives of one run's ranks.

    `PlanError` if the traces cannot be of one run: a rank twice, different numbers of ranks, or
    ranks of one group that run different collectives throughout.
    """
    _one_run(traces)
    occurrences: list[list[Place]] = []
    left_out: list[str] = []
    differences: list[str] = []
    for lane, members in _lanes(traces).items():
        if len(members) < 2:
            continue
        found, unlike = _occurrences(traces, members)
        # A kernel that lasts no time, or an impossible one, tells nothing of the others.
        lasting = ([p for p in places if _at(traces, p).duration_s > 0.0] for places in found)
        occurrences += [places for places in lasting if len(places) > 1]
        if unlike:
            differences.append(unlike)
            rest = "only what is equal was compared" if found else "waiting is unknown there"
            left_out.append(f"{_name(lane)}: {unlike}; {rest}")
    if differences and not occurrences:
        raise PlanError(
            f"{traces[0].source} and {traces[1].source} do not run the same collectives "
            f"({differences[0]}): pass the traces of one run, and of the same iterations"
        )
    transfer_s: dict[Place, float] = {}
    for places in occurrences:
        shortest = min(_at(traces, place).duration_s for place in places)
        transfer_s |= dict.fromkeys(places, shortest)
    offsets = _offsets(traces, occurrences)
    _end_together(traces, occurrences, offsets)
    return Matched(transfer_s=transfer_s, offset_s=offsets, left_out=tuple(left_out))


def _at(traces: Sequence[RankTrace], place: Place) -> Collective:
    return traces[place[0]].collectives[place[1]]


def _one_run(traces: Sequence[RankTrace]) -> None:
    seen: dict[int, str] = {}
    for trace in traces:
        if trace.rank in seen:
            raise PlanError(
                f"{seen[trace.rank]} and {trace.source} are both of rank {trace.rank}: pass one "
                "trace per rank of one run"
            )
        seen[trace.rank] = trace.source
        if trace.world_size is not None and trace.rank >= trace.world_size:
            raise PlanError(
                f"{trace.source}: says that it is of rank {trace.rank}, in a run of "
                f"{trace.world_size} ranks: pass the traces of one run"
            )
    sizes = {t.world_size: t.source for t in traces if t.world_size is not None}
    if len(sizes) > 1:
        (a, in_a), (b, in_b) = list(sizes.items())[:2]
        raise PlanError(
            f"{in_a} is of a run of {a} ranks, {in_b} of a run of {b}: pass the traces of one run"
        )


_SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""No member can leave these operations before every member has arrived."""
APART_S, APART_SHARE = 0.01, 0.05
"""Ends of one collective that are further apart, after the clocks were aligned, than both this time
and this share of an iteration are no ends of one collective."""


def _end_together(
    traces: Sequence[RankTrace],
    occurrences: Sequence[Sequence[Place]],
    offsets: Sequence[float | None],
) -> None:
    """`PlanError` if the ends of most collectives, on the aligned clocks, are far apart."""
    apart = []
    for places in occurrences:
        members = [(traces[t].collectives[c], offsets[t]) for t, c in places]
        ends = [c.end_s - offset for c, offset in members if offset is not None]
        if ends and members[0][0].op in _SYMMETRIC:
            apart.append(max(ends) - min(ends))
    lengths = [w.end_s - w.begin_s for trace in traces for w in trace.iterations]
    allowed_s = max(APART_S, APART_SHARE * statistics.median(lengths))
    if apart and statistics.median(apart) > allowed_s:
        raise PlanError(
            f"{traces[0].source} and {traces[1].source}: the same collectives end "
            f"{show_time(statistics.median(apart))} apart (median), on clocks that were aligned by "
            "them: pass the traces of one run"
        )


def _lanes(traces: Sequence[RankTrace]) -> dict[MatchLane, dict[int, list[int]]]:
    """Lane -> trace -> its collectives. A lane is a process group, a pair of a point-to-point
    transfer in it, or, where the trace does not name groups, a stream."""
    lanes: dict[MatchLane, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for t, trace in enumerate(traces):
        for c, collective in enumerate(trace.collectives):
            if (lane := _lane(collective)) is not None:
                lanes[lane][t].append(c)
    return lanes


def _lane(collective: Collective) -> MatchLane | None:
    if collective.op == "copy":
        return None  # a copy engine's transfer has one end only
    if collective.op == "send_recv":
        pair = collective.peers or (collective.ranks if len(collective.ranks) == 2 else None)
        return None if pair is None else (collective.group, collective.ranks, pair)
    if collective.group is None:
        return (f"stream {collective.stream}", (), None)
    return (collective.group, collective.ranks, None)


def _name(lane: MatchLane) -> str:
    group, ranks, pair = lane
    members = pair or ranks
    return f"group {group}{f' of ranks {list(members)}' if members else ''}"


def _occurrences(
    traces: Sequence[RankTrace], members: dict[int, list[int]]
) -> tuple[list[list[Place]], str]:
    """The same occurrence on every member, and what is unlike, in words."""
    if (in_order := _in_order(traces, members)) is not None:
        return in_order, ""
    unlike = ""
    tables = {t: _numbered(traces[t], places) for t, places in members.items()}
    complete = set.intersection(*(set(table) for table in tables.values()))
    everything = set.union(*(set(table) for table in tables.values()))
    if len(complete) < len(everything):
        counts = ", ".join(f"{len(table)} on rank {traces[t].rank}" for t, table in tables.items())
        unlike = f"the ranks hold different collectives ({counts})"
    found, differing = [], 0
    for number in sorted(complete):
        places = [(t, table[number]) for t, table in tables.items()]
        if len({_signature(traces[t].collectives[c]) for t, c in places}) > 1:
            differing += 1
        else:
            found.append(places)
    # Few equal ones among many unlike are chance: another order, another program.
    if differing > 0.05 * len(complete):
        return [], f"{differing} of {len(complete)} collectives in order differ between the ranks"
    if differing:
        unlike = unlike or f"{differing} of {len(complete)} collectives differ between the ranks"
    return found, unlike


def _in_order(
    traces: Sequence[RankTrace], members: dict[int, list[int]]
) -> list[list[Place]] | None:
    """The occurrences by their place in the whole trace, if no numbers tell more and all members
    hold the same operations from the first to the last."""
    collectives = {t: [traces[t].collectives[c] for c in places] for t, places in members.items()}
    if all(c.sequence is not None for ours in collectives.values() for c in ours):
        return None
    if len({tuple(_signature(c) for c in ours) for ours in collectives.values()}) > 1:
        return None
    return [list(zip(members, row, strict=True)) for row in zip(*members.values(), strict=True)]


def _numbered(trace: RankTrace, places: Sequence[int]) -> dict[tuple[int, int], int]:
    """Number of each collective: its sequence number, with a count where several have the same,
    else (iteration, place in it)."""
    collectives = trace.collectives
    counts: dict[int, int] = defaultdict(int)
    table: dict[tuple[int, int], int] = {}
    if all(collectives[c].sequence is not None for c in places):
        for c in places:
            number = collectives[c].sequence or 0
            table[number, counts[number]] = c
            counts[number] += 1
        return table
    steps = trace.iterations
    at = 0
    for c in places:
        while at + 1 < len(steps) and collectives[c].begin_s >= steps[at + 1].begin_s:
            at += 1
        number = steps[at].number
        table[number, counts[number]] = c
        counts[number] += 1
    return table


def _signature(collective: Collective) -> Hashable:
    if collective.op in ("send_recv", "broadcast", "gather", "scatter", "reduce"):
        return collective.op, collective.dtype
    return collective.op, collective.bytes, collective.dtype


def _offsets(
    traces: Sequence[RankTrace], occurrences: Sequence[Sequence[Place]]
) -> tuple[float | None, ...]:
    """Median difference of the ends of matched collectives, from the first trace outwards."""
    apart: dict[tuple[int, int], list[float]] = defaultdict(list)
    for places in occurrences:
        for (a, c), (b, d) in combinations(places, 2):
            if len(apart[a, b]) < 10_000:
                there = traces[b].collectives[d].end_s - traces[a].collectives[c].end_s
                apart[a, b].append(there)
                apart[b, a].append(-there)
    offsets: list[float | None] = [None] * len(traces)
    offsets[0] = 0.0
    edge = [0]
    while edge:
        a = edge.pop()
        for b in range(len(traces)):
            if offsets[b] is None and apart.get((a, b)):
                offsets[b] = (offsets[a] or 0.0) + statistics.median(apart[a, b])
                edge.append(b)
    return tuple(offsets)
