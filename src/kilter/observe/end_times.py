"""Turns the ends of iterations into their durations, by the GPU's own clock where there is one.

On a GPU an event is recorded on the current stream at each iteration end and read a few iterations
later, when it has passed, so that nobody ever waits for the GPU.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Iteration:
    """One finished iteration: from iteration end `index - 1` to iteration end `index`."""

    index: int
    end_s: float
    """When the host passed the iteration end, on the clock of `IterationClock`; of a simulated GPU
    in its virtual time."""
    duration_s: float
    timeline: str = "gpu"
    """Whose clock `duration_s` is from: `gpu` or `host`."""
    skipped: int = 0
    """A gradient scaler left out so many optimizer steps: the interval holds so many more
    iterations, and is not the time of one."""


@dataclass(slots=True)
class IterationEnd:
    """The moment at which one iteration is over."""

    index: int
    t_s: float
    event: Any
    """It is a recorded CUDA event, or None."""
    epoch: int
    """Intervals between iteration ends of different epochs are not iterations."""


class EndTimes:
    """Pairs of iteration ends, as durations. Belongs to the threads that end iterations."""

    def __init__(self) -> None:
        self.device: Any = None
        """The last iteration end was on this CUDA device."""
        self.scaled = False
        """A gradient scaler may leave out steps."""
        self._epoch = 0
        self._pending: deque[IterationEnd] = deque()
        self._finished: deque[Iteration] = deque(maxlen=4096)
        self._recent: deque[float] = deque(maxlen=31)
        self._pool: list[Any] = []
        """These events can be recorded again."""

    @property
    def usual_s(self) -> float | None:
        """Median time of the last iterations (at most 31); None before the first."""
        return statistics.median(self._recent) if self._recent else None

    def finished(self) -> list[Iteration]:
        """Iterations whose time has become known since the last call, oldest first."""
        done = []
        while self._finished:
            done.append(self._finished.popleft())
        return done

    def begin_anew(self) -> None:
        """The next end has nothing to do with the last one."""
        self._epoch += 1

    def record(self, device: Any) -> Any:
        """An event at this point of the GPU's work; None without a GPU, and in a capture."""
        if device != self.device:
            # Events belong to the device on which they were recorded, and so do the times between.
            self.device = device
            self._pool.clear()
            self._epoch += 1
        if device is None:
            return None
        if self._captures():
            return None
        cuda = sys.modules["torch"].cuda
        event = self._pool.pop() if self._pool else cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(device))
        return event

    def end(self, index: int, t_s: float, event: Any, changed: int) -> IterationEnd:
        """An iteration has ended; `changed` is another number whenever iterations are others."""
        ended = IterationEnd(index, t_s, event, self._epoch + changed)
        if self._captures():  # what ends here runs each time that the graph is played
            self.begin_anew()
            return ended
        self._pending.append(ended)
        self._harvest()
        return ended

    def _captures(self) -> bool:
        """The program captures its operations into a CUDA graph now."""
        if self.device is None:
            return False
        return bool(sys.modules["torch"].cuda.is_current_stream_capturing())

    def _harvest(self) -> None:
        """Turn pairs of passed iteration ends into times.

        Only here, in the program's own thread and never in another one, and not while it captures
        a CUDA graph: asking after an event breaks that. One pair at each iteration end keeps up;
        the second catches up.
        """
        for _ in range(2):
            if len(self._pending) < 2:
                return
            first, second = self._pending[0], self._pending[1]
            if second.event is not None and not second.event.query():
                return
            self._pending.popleft()
            if first.epoch == second.epoch:
                self._finish(first, second)
            if first.event is not None and first.epoch == self._pending[-1].epoch:
                self._pool.append(first.event)

    def _finish(self, first: IterationEnd, second: IterationEnd) -> None:
        on_gpu = first.event is not None and second.event is not None
        if on_gpu:
            duration_s = first.event.elapsed_time(second.event) * 1e-3
        else:
            duration_s = second.t_s - first.t_s
        skipped = self._skipped(duration_s) if self.scaled else 0
        if not skipped:
            self._recent.append(duration_s)
        timeline = "gpu" if on_gpu else "host"
        self._finished.append(Iteration(second.index, second.t_s, duration_s, timeline, skipped))

    def _skipped(self, duration_s: float) -> int:
        """How many steps a gradient scaler left out. The scaler does not report them, but the
        interval between steps doubles."""
        if len(self._recent) < 3:
            return 0
        ratio = duration_s / statistics.median(self._recent)
        times = round(ratio)
        return times - 1 if 2 <= times <= 8 and abs(ratio - times) < 0.2 * times else 0
