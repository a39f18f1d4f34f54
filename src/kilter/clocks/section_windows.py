"""The windows of the profiler in which the controller of sections sees a rank's timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kilter.controller import Run
from kilter.core.rank_trace import IterationMarks, RankTrace
from kilter.observe.marked_trace import read_marked

if TYPE_CHECKING:
    from kilter.observe.profiler_window import Window

WINDOW_ITERATIONS = 10
GPU_WINDOW_ITERATIONS = 5
"""A window has so many on a GPU, whose times vary less; the first one is not used, since earlier
work may be under way."""
WINDOW_SHARE = 0.005
"""Windows may take this share of the program's time; the next one waits for that."""
CHECK_ITERATIONS = 200
"""At least so many iterations lie between one window and the next, while nothing changes."""


class SectionWindows:
    """At the start, after a change, and now and then in between."""

    def __init__(self) -> None:
        self.count = 0
        self.cost_s = 0.0
        self.failures = 0
        self.why_not = ""
        self._window: Window | None = None
        self._next = 0
        """The next window may open from this iteration end on."""

    @property
    def open(self) -> bool:
        return self._window is not None

    @property
    def needed(self) -> int:
        """Iterations that a script needs for the first answer."""
        from kilter.observe.trace_source import OPENS_AT

        return OPENS_AT + WINDOW_ITERATIONS + 1

    def due(self, run: Run) -> bool:
        return self._window is None and run.iterations.index >= self._next

    def begin(self, run: Run) -> None:
        on_gpu = run.iterations.device is not None
        self._window = run.trace.observe(GPU_WINDOW_ITERATIONS if on_gpu else WINDOW_ITERATIONS)

    def take(self, run: Run, marked_s: Mapping[int, float]) -> RankTrace | None:
        """What a window saw, once."""
        window = self._window
        if window is None or not window.over:
            return None
        self._window = None
        self.cost_s += sum(window.costs_s.values())
        trace = window.take(_reader(window, run, marked_s))
        usual_s = run.iterations.usual_s or 1.0
        wait = max(CHECK_ITERATIONS, self.cost_s / WINDOW_SHARE / usual_s)
        self._next = run.iterations.index + int(wait)
        if trace is None:
            self.failures += 1
            self.why_not = window.why_not or "the observation gave no trace"
            return None
        self.failures = 0
        self.count += 1
        return trace


def _reader(window: Window, run: Run, marked_s: Mapping[int, float]) -> Callable[[Path], RankTrace]:
    """Makes the rank's timeline of a window's file."""
    if run.iterations.device is None:
        from kilter.observe.host_timeline import read_host_rank  # imports numpy

        return partial(read_host_rank, ends_s=window.ends_s, rank=run.ranks.rank)
    marks = IterationMarks(
        annotated_s=window.ends_s,
        marked_s={n: marked_s[n] for n in window.ends_s if n in marked_s},
    )
    return partial(read_marked, marks=marks, rank=run.ranks.rank)
