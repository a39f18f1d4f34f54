"""Times of the steps of one rank: of the whole step, and of the rank's own work in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kilter.sharing.messages import RankStatus

_PUBLISH_EVERY_S = 0.25
_MOST_STEPS = 200


class Meter:
    """Watches one rank. On CUDA the own work is timed by events, else by the host's clock."""

    def __init__(self, cuda: bool, publish: Callable[[RankStatus], None]) -> None:
        self._cuda, self._publish = cuda, publish
        self._begun_s: float | None = None
        self._work_s: float | None = None
        self._events: tuple[Any, Any] | None = None
        self._steps: list[tuple[float, float]] = []
        self._pending: list[tuple[float, tuple[Any, Any]]] = []
        self._samples = 0
        self._published_s = 0.0

    def begin(self, samples: int) -> None:
        """A step begins."""
        if samples != self._samples:
            self._samples, self._steps, self._pending = samples, [], []
        self._begun_s, self._work_s, self._events = time.perf_counter(), None, None
        if self._cuda:
            self._events = (_event(), None)

    def work_done(self) -> None:
        """The last gradient of the step is ready (called from DDP's hook)."""
        if self._cuda and self._events is not None:
            self._events = (self._events[0], _event())
        elif self._begun_s is not None:
            self._work_s = time.perf_counter() - self._begun_s

    def end(self, iteration: int) -> None:
        """The step is over."""
        if self._begun_s is None:
            return
        step_s = time.perf_counter() - self._begun_s
        self._begun_s = None
        if self._events is not None and self._events[1] is not None:
            self._pending.append((step_s, self._events))
            self._read_events()
        else:
            self._steps.append((step_s, step_s if self._work_s is None else self._work_s))
        del self._steps[:-_MOST_STEPS]
        if not self._steps:
            return
        if time.monotonic() - self._published_s < _PUBLISH_EVERY_S:
            return
        self._published_s = time.monotonic()
        # The first step after a change carries its cost.
        steps = self._steps[1:] or self._steps
        count = len(steps)
        self._publish(
            RankStatus(
                iteration=iteration,
                samples=self._samples,
                steps=count,
                step_s=sum(step for step, _ in steps) / count,
                compute_s=sum(work for _, work in steps) / count,
                **(_memory() if self._cuda else {}),
            )
        )

    def _read_events(self) -> None:
        """Of steps that the GPU has finished: the host is never made to wait."""
        while self._pending and self._pending[0][1][1].query():
            step_s, (begun, done) = self._pending.pop(0)
            self._steps.append((step_s, begun.elapsed_time(done) * 1e-3))

    def idle(self, iteration: int) -> None:
        """The rank has no samples for now."""
        self._begun_s, self._steps, self._pending, self._samples = None, [], [], 0
        self._publish(RankStatus(iteration, 0, 0, 0.0, 0.0))


def _event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _memory() -> dict[str, int]:
    import torch

    free, _ = torch.cuda.mem_get_info()
    return {"reserved_bytes": int(torch.cuda.max_memory_reserved()), "free_bytes": int(free)}
