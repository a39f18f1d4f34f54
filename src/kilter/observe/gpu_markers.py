"""Where the markers of a program's iterations stand on a GPU's timeline, from a profiler's trace.

The host reaches an iteration end, gives the stream the marker's write, and runs ahead. The stream
carries the write out after the last work that it was given before: that work's end is the marker's
time, or the host's own time where the stream had nothing left to do. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


class GpuWork(msgspec.Struct, frozen=True, kw_only=True):
    """What ran on a GPU and was launched in the trace: one entry each for every kernel and copy.
    Times of one clock."""

    launch_s: NDArray[Any]
    launch: NDArray[Any]
    """It is the number of the launch: a whole CUDA graph has one."""
    end_s: NDArray[Any]
    stream: NDArray[Any]
    computes: NDArray[Any]
    """It is False for what communicates or copies."""


def markers(work: GpuWork, ends_s: Sequence[float]) -> list[float | None]:
    """When the stream passed each iteration end; None where the trace holds nothing that the
    stream was given before, so that earlier work may have been under way."""
    stream = marked_stream(work, ends_s)
    on_it = np.isin(work.launch, np.unique(work.launch[work.stream == stream]))
    order = np.argsort(work.launch_s[on_it], kind="stable")
    launch_s = work.launch_s[on_it][order]
    done_s = np.maximum.accumulate(work.end_s[on_it][order])
    given = np.searchsorted(launch_s, np.array(ends_s), side="left")
    return [
        max(float(done_s[count - 1]), end_s) if count else None
        for count, end_s in zip(given.tolist(), ends_s, strict=True)
    ]


def marked_stream(work: GpuWork, ends_s: Sequence[float]) -> int | None:
    """The stream that is current at the iteration ends: most of them come right after a launch of
    computation to it. None for no work at all."""
    computes = work.computes if work.computes.any() else np.ones_like(work.computes)
    order = np.argsort(work.launch_s[computes], kind="stable")
    launch_s, streams = work.launch_s[computes][order], work.stream[computes][order]
    given = np.searchsorted(launch_s, np.array(ends_s), side="left")
    last = Counter(int(streams[count - 1]) for count in given.tolist() if count)
    return last.most_common(1)[0][0] if last else None
