"""Computation under longer communication, and how much slower it may run without effect. Pure.

Where communication is the longer of two overlapped streams, the computation under it has slack: it
is over before the communication that the next computation waits for. A low clock may then rule from
before the section on. From a time t on, computation may take s times as long as long as

- every collective k that is ready after t still begins when it began: (s - 1) times the computation
  between t and its readiness is at most its time in the queue, begin - ready;
- the computation is still over before the section is.

The times t that are looked at are those at which a collective is ready. The dependencies are those
that the trace shows: of a collective on all computation that was launched before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from kilter.core.rank_trace import Collective, RankTimes
from kilter.model.intervals import clip

LEAST_STRETCH = 1.02
"""Less is not worth a clock."""


class Cover(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time before a section in which computation has slack."""

    after: str
    """It begins with the readiness of this collective."""
    lead_s: float
    """It leads from there to the beginning of the section."""
    compute_s: float
    """Computation in it takes this at the default clock."""
    stretch: float
    """As many times as long it may take."""


def covers(
    collectives: Iterable[tuple[Collective, str]],
    compute: RankTimes,
    *,
    from_s: float,
    begin_s: float,
    end_s: float,
) -> tuple[Cover, ...]:
    """Those before one section, from the latest to the earliest. `from_s`: the end of the section
    before. `collectives`: of the iteration, with their names. None, where the trace does not tell
    when each of them was ready."""
    near = [(c, name) for c, name in collectives if from_s <= c.end_s and c.begin_s < end_s]
    queued: list[tuple[float, float, str]] = []
    for collective, name in near:
        if collective.ready_s is None:
            return ()
        queued.append((collective.ready_s, collective.begin_s, name))
    queued.sort(reverse=True)
    pieces = clip(compute, from_s, begin_s)
    edges = np.array([from_s, *(edge for piece in pieces for edge in piece)])
    lengths = np.array([0.0, *(length for a, b in pieces for length in (0.0, b - a))]).cumsum()
    ends_s = np.array([begin_s, *(ready_s for ready_s, _, _ in queued)])
    done_s = np.interp(ends_s, edges, lengths)  # computation until then
    slack_s = np.array([end_s - begin_s, *(start_s - ready_s for ready_s, start_s, _ in queued)])
    found: list[Cover] = []
    for n, (ready_s, _, name) in enumerate(queued, 1):
        if ready_s < from_s:
            break
        slower = (done_s - done_s[n])[:n]
        if slower[0] <= 0.0:
            continue
        most = 1.0 + float(np.min(slack_s[:n][slower > 0.0] / slower[slower > 0.0]))
        if most < LEAST_STRETCH:
            break
        found.append(
            Cover(after=name, lead_s=begin_s - ready_s, compute_s=float(slower[0]), stretch=most)
        )
    return tuple(found)


def common(occurrences: Sequence[Sequence[Cover]]) -> tuple[Cover, ...]:
    """What all occurrences of a section have, by the least of each: a clock that is harmless in all
    of them."""
    if not occurrences:
        return ()
    by_name = [{cover.after: cover for cover in covers} for covers in occurrences]
    return tuple(
        Cover(
            after=name,
            lead_s=min(of[name].lead_s for of in by_name),
            compute_s=min(of[name].compute_s for of in by_name),
            stretch=min(of[name].stretch for of in by_name),
        )
        for name in by_name[0]
        if all(name in of for of in by_name)
    )
