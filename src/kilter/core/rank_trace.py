"""What the GPU of one rank did, as a profiler saw it: `RankTrace`. Read by `observe/rank_traces`.

Times are seconds on the rank's own clock, from the trace's first event on the GPU. Sets of times
are in the form of `model/intervals`: disjoint, ascending.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

WINDOW_FILE = "window-rank{rank}.json"
"""This file in the directory of a run holds the last window of the profiler for sections, a
`RankTrace`."""

RankTimes = list[tuple[float, float]]


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel, or one copy between GPUs, that communicates."""

    op: str
    """It is `all_reduce`, `all_gather`, ..., `send_recv` for point-to-point, `copy`, or `other`."""
    begin_s: float
    end_s: float
    stream: int | str
    group: str | None = None
    """It is the name of the process group; None where the trace does not say."""
    ranks: tuple[int, ...] = ()
    """These are the members of the group; it is empty where the trace does not say."""
    peers: tuple[int, int] | None = None
    """They are source and target of a transfer, where known; the lower rank comes first if it goes
    both ways."""
    sequence: int | None = None
    """The collective has this number in its group, equal on all ranks."""
    bytes: int | None = None
    """It is the size of the larger message: of the one that goes in or the one that comes out."""
    dtype: str | None = None
    ready_s: float | None = None
    """When it was launched and all computation that was launched before it was over, but not later
    than its begin: the data that it sends were there then. None where the trace has no launch."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


class RankIteration(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration's window on the GPU's timeline; windows follow each other without gaps."""

    number: int
    """It is the profiler's step, or a count from 0 where the trace has no steps."""
    begin_s: float
    end_s: float


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of the one GPU of a rank."""

    source: str
    rank: int
    world_size: int | None
    """It is None where the trace does not say."""
    device: str
    """It is the GPU's name; empty where the trace does not say."""
    origin_s: float
    """The rank's clock shows this at time 0."""
    compute: RankTimes
    """It is the union of the kernels that do not communicate."""
    copies: RankTimes
    """It is the union of copies and memory sets of this GPU alone."""
    collectives: tuple[Collective, ...]
    """They are in the order in which they begin."""
    iterations: tuple[RankIteration, ...]
    found_by: str
    """How the iterations were found, in words."""
    warnings: tuple[str, ...] = ()
    """What the trace holds and the analysis does not use, in words."""


class IterationMarks(msgspec.Struct, frozen=True, kw_only=True):
    """The iteration ends of one window of the profiler by number, in times of `time.monotonic()`
    of the program's process."""

    annotated_s: dict[int, float]
    """When the profiler was told; the trace holds an annotation for each."""
    marked_s: dict[int, float]
    """When the marker's write was given to the stream, where that was noted."""

    def on_clock_of(self, annotations_s: Sequence[float]) -> tuple[list[float], float]:
        """The iteration ends on the clock of the trace, and what `time.monotonic()` is ahead of it.
        The program's thread notes its time just after the annotation and may be interrupted in
        between, so the smallest difference is the true one."""
        noted = sorted(self.annotated_s.items())
        ahead_s = min(t_s - at_s for (_, t_s), at_s in zip(noted, annotations_s, strict=True))
        # An end inside backward is marked at once, and annotated later.
        ends_s = [
            at_s if self.marked_s.get(n, t_s) >= t_s else self.marked_s[n] - ahead_s
            for (n, t_s), at_s in zip(noted, annotations_s, strict=True)
        ]
        return ends_s, ahead_s
