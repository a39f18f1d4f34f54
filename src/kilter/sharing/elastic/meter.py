"""Times of the steps of one rank: of the whole step, and of the rank's own work in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kilter.sharing.messages import RankStatus

_PUBLISH_EVERY_S = 0.25
_MOST_STEPS = 200


class Meter:
    """Watches one rank. On CUDA the parts of a step are timed by events, else by the host's clock;
    the host is never made to wait for the GPU."""

    def __init__(self, cuda: bool, publish: Callable[[RankStatus], None]) -> None:
        self._now: Callable[[], Any] = _event if cuda else time.perf_counter
        self._cuda, self._publish = cuda, publish
        self._begun_s: float | None = None
        self._marks: list[Any] = []
        self._pending: list[tuple[float, list[Any]]] = []
        self._steps: list[tuple[float, float, float]] = []
        self._samples = 0
        self._published_s = 0.0

    def begin(self, samples: int) -> None:
        if samples != self._samples:
            self._forget()
            self._samples = samples
        self._begun_s, self._marks = time.perf_counter(), [self._now()]

    def work_done(self) -> None:
        """The rank's last gradient of the step is ready (called from DDP's hook)."""
        self._marks[1:] = [self._now()]

    def reduced(self) -> None:
        """The last gradients of all ranks are summed up."""
        self._marks[2:] = [self._now()]

    def end(self, iteration: int) -> None:
        if self._begun_s is None:
            return
        if len(self._marks) == 3:
            self._pending.append((time.perf_counter() - self._begun_s, self._marks))
        self._begun_s = None
        self._read()
        if not self._steps or time.monotonic() - self._published_s < _PUBLISH_EVERY_S:
            return
        self._published_s = time.monotonic()
        # The first step after a change carries its cost.
        steps = self._steps[1:] or self._steps
        step_s, work_s, comm_s = (sum(part) / len(steps) for part in zip(*steps, strict=True))
        more: dict[str, Any] = _memory() if self._cuda else {}
        more["ended_s"] = time.monotonic()
        self._publish(
            RankStatus(iteration, self._samples, len(steps), step_s, work_s, comm_s, **more)
        )

    def _read(self) -> None:
        """Of steps that the GPU has finished."""
        while self._pending and (not self._cuda or self._pending[0][1][2].query()):
            step_s, (begun, worked, reduced) = self._pending.pop(0)
            if self._cuda:
                work_s = begun.elapsed_time(worked) * 1e-3
                comm_s = worked.elapsed_time(reduced) * 1e-3
            else:
                work_s, comm_s = worked - begun, reduced - worked
            self._steps.append((step_s, work_s, max(comm_s, 0.0)))
        del self._steps[:-_MOST_STEPS]

    def _forget(self) -> None:
        self._steps, self._pending = [], []

    def idle(self, iteration: int) -> None:
        """The rank has no samples for now."""
        self._forget()
        self._begun_s, self._samples = None, 0
        self._publish(RankStatus(iteration, 0, 0, 0.0, 0.0, 0.0))


def _event() -> Any:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _memory() -> dict[str, int]:
    import torch

    free, _ = torch.cuda.mem_get_info()
    return {"reserved_bytes": int(torch.cuda.max_memory_reserved()), "free_bytes": int(free)}
