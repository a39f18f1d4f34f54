"""Host threads: the units of a step run at the same time, each in a thread of its own.

On a CPU every thread gets an equal share of the cores; on a GPU it gets a stream. Grad mode,
autocast, device and current stream belong to a thread, so each is set in every task.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from kilter.act.branches.program import Program, Unit, store
from kilter.act.branches.streams import Cuda, share


class Threads:
    """Runs a step's units on a pool. Threads start with the first step and end with `close`."""

    def __init__(self, device: torch.device, workers: int) -> None:
        self.device = device
        self.workers = workers
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._intra_op = max(1, torch.get_num_threads() // workers)

    def __call__(self, index: int, program: Program, environment: list[Tensor | None]) -> None:
        step = program.steps[index]
        if len(step) == 1:
            store(step[0], step[0].run(*program.arguments(step[0], environment)), environment)
            return
        cuda = Cuda(self.device) if self.device.type == "cuda" else None
        mode = _Mode(self.device)
        main = cuda.current() if cuda else None
        forked = cuda.record(main) if cuda else None
        futures: list[Future[Any]] = []
        with self._lock:  # nobody ends the threads between two of a step
            pool = self._started()
            for number, unit in enumerate(step):
                arguments = program.arguments(unit, environment)
                lane = number % self.workers
                futures.append(pool.submit(self._task, unit, arguments, mode, cuda, lane, forked))
        # All are waited for before an error is passed on: nothing runs on behind the caller's back.
        errors = [future.exception() for future in futures]
        if cuda:
            for lane in range(min(self.workers, len(step))):
                cuda.wait(main, cuda.record(cuda.side(lane)))
        for error in errors:
            if error is not None:
                raise error
        for unit, future in zip(step, futures, strict=True):
            store(unit, future.result(), environment)
            if cuda:
                share(cuda, unit, environment, main)

    def _task(
        self,
        unit: Unit,
        arguments: list[Any],
        mode: _Mode,
        cuda: Cuda | None,
        lane: int,
        forked: Any,
    ) -> Any:
        with mode.applied():
            if cuda is None:
                return unit.run(*arguments)
            with torch.cuda.device(self.device):
                stream = cuda.side(lane)
                cuda.wait(stream, forked)
                with cuda.use(stream):
                    return unit.run(*arguments)

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            before = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(
                self.workers, "kilter-branch", lambda: torch.set_num_threads(self._intra_op)
            )
            for future in [self._pool.submit(_wait_a_moment) for _ in range(self.workers)]:
                future.result()
            torch.set_num_threads(before)
        return self._pool

    def close(self) -> None:
        """End the threads, when they have done what they were given."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


def _wait_a_moment() -> None:
    """Long enough for the pool to start a thread for each of its first tasks."""
    torch.zeros(1).add_(1)


class _Mode:
    """What the calling thread has set, to be set in another."""

    def __init__(self, device: torch.device) -> None:
        self.kind = device.type
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = torch.is_autocast_enabled(self.kind)
        self.dtype = torch.get_autocast_dtype(self.kind)

    def applied(self) -> ExitStack:
        stack = ExitStack()
        if self.inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self.grad))
        stack.enter_context(torch.autocast(self.kind, self.dtype, enabled=self.autocast))
        return stack
