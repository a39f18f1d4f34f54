"""Times of the steps of one rank: of the whole step, and of the rank's own work in it."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from kilter.observe import torch_internals
from kilter.sharing.messages import RankStatus

T = TypeVar("T")

_PUBLISH_EVERY_S = 0.25
_PARTS_EVERY_S = 0.1
_MEMORY_EVERY_S = 2.0
_MOST_STEPS = 200
_MOST_PARTS = 50


class Guard(Protocol):
    """What keeps our errors from the script: the fence of the session."""

    def ask(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Its result, or nothing if it failed, which has been told then."""

    def run(self, function: Callable[..., Any], *args: Any) -> bool:
        """Whether it came to its end."""


class Meter:
    """Watches one rank. Every step is timed as a whole, by the host's clock; the parts of a few
    steps in a second are timed as well, on CUDA by events. The host is never made to wait for the
    GPU."""

    def __init__(self, cuda: bool, publish: Callable[[RankStatus], None], guard: Guard) -> None:
        self._now: Callable[[], Any] = _event if cuda else time.perf_counter
        self._cuda, self._publish, self._guard = cuda, publish, guard
        self._samples = 0
        self._begun_s: float | None = None
        self._marks: list[Any] = []
        """They are a timed step's beginning, the end of the rank's work, and the end."""
        self._memory: dict[str, int] = {}
        self._published_s = 0.0
        self._forget()

    def _forget(self) -> None:
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self._parts: deque[tuple[float, float]] = deque(maxlen=_MOST_PARTS)
        self._pending: deque[list[Any]] = deque()
        self._parts_s = self._memory_s = 0.0

    def begin(self, samples: int) -> None:
        if samples != self._samples:
            self._forget()
            self._samples = samples
        self._begun_s = time.perf_counter()
        wanted = self._begun_s >= self._parts_s + _PARTS_EVERY_S
        self._marks = [self._now()] if wanted else []

    def in_backward(self) -> None:
        """Call within a backward pass, before DDP has taken the last gradient. What is queued here
        is called when the rank's gradients are ready, and what is queued then, after DDP has
        waited for the sums."""
        if not self._marks:
            return
        torch_internals.queue_callback(functools.partial(self._guard.run, self._ready))

    def _ready(self) -> None:
        self.work_done()
        torch_internals.queue_callback(functools.partial(self._guard.run, self.reduced))

    def work_done(self) -> None:
        """The rank's last gradient of the step is ready. Of several calls the last counts."""
        if self._marks:
            self._marks[1:] = [self._now()]

    def reduced(self) -> None:
        """The last gradients of all ranks are summed up."""
        if self._marks:
            self._marks[2:] = [self._now()]

    def end(self, iteration: int) -> None:
        if self._begun_s is None:
            return
        now = time.perf_counter()
        self._steps.append(now - self._begun_s)
        self._begun_s = None
        if len(self._marks) == 3:
            self._pending.append(self._marks)
            self._parts_s = now
        self._marks = []
        self._read()
        if self._parts and now >= self._published_s + _PUBLISH_EVERY_S:
            self._published_s = now
            self._publish(self._status(iteration, now))

    def _status(self, iteration: int, now: float) -> RankStatus:
        if self._cuda and now >= self._memory_s + _MEMORY_EVERY_S:
            self._memory, self._memory_s = _memory(), now
        work_s, comm_s = map(_mean, zip(*self._parts, strict=True))
        steps = len(self._steps)
        ended_s = time.monotonic()
        return RankStatus(
            iteration,
            self._samples,
            steps,
            _mean(self._steps),
            work_s,
            comm_s,
            ended_s=ended_s,
            **self._memory,
        )

    def _read(self) -> None:
        """The parts of steps that the GPU has finished."""
        while self._pending and (not self._cuda or self._pending[0][2].query()):
            begun, worked, reduced = self._pending.popleft()
            if self._cuda:
                work_s = begun.elapsed_time(worked) * 1e-3
                comm_s = worked.elapsed_time(reduced) * 1e-3
            else:
                work_s, comm_s = worked - begun, reduced - worked
            self._parts.append((work_s, max(comm_s, 0.0)))

    def idle(self, iteration: int) -> None:
        """The rank has no samples for now."""
        self._forget()
        self._begun_s, self._samples = None, 0
        self._publish(RankStatus(iteration, 0, 0, 0.0, 0.0, 0.0))


def _mean(of_steps: Sequence[float]) -> float:
    """Without the first step after a change, which carries its cost."""
    later = list(of_steps)[1:] or of_steps
    return sum(later) / len(later)


def _event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _memory() -> dict[str, int]:
    import torch

    free, _ = torch.cuda.mem_get_info()
    return {"reserved_bytes": int(torch.cuda.max_memory_reserved()), "free_bytes": int(free)}
