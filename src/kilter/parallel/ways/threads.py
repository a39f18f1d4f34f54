"""`threads`: the units of a step run at the same time, each in a host thread of its own.

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

from kilter.parallel.candidates import Built, Site
from kilter.parallel.program import BranchProgram, Unit, arguments, run_unit, store
from kilter.parallel.streams import CudaStreams, share
from kilter.parallel.ways.way import ThreadedWay


class Threads(ThreadedWay):
    name = "threads"
    about = "Python threads, a stream each"
    works_on = ("cpu", "cuda")
    tried_on = ("cpu",)
    """On a GPU a graph removes the launches that threads would spread."""
    differentiable = True
    same_kernels = True
    calls_branches = True

    def build(self, program: BranchProgram, site: Site) -> Built:
        threads = ThreadPool(site.request.device, site.streams)
        return Built(site.eager(program, threads), threads.close)


class ThreadPool:
    """Runs a step's units in threads, which start with the first step and end with `close`."""

    def __init__(self, device: torch.device, workers: int) -> None:
        self.device = device
        self.workers = workers
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._intra_op = max(1, torch.get_num_threads() // workers)

    def __call__(
        self, index: int, program: BranchProgram, environment: list[Tensor | None]
    ) -> None:
        step = program.steps[index]
        if len(step) == 1:
            run_unit(step[0], environment)
            return
        cuda = CudaStreams(self.device) if self.device.type == "cuda" else None
        mode = _Modes(self.device)
        main = cuda.current() if cuda else None
        forked = cuda.record(main) if cuda else None
        futures: list[Future[Any]] = []
        with self._lock:  # the threads are not ended between two units of a step
            pool = self._started()
            for number, unit in enumerate(step):
                given = arguments(unit, environment)
                lane = number % self.workers
                futures.append(pool.submit(self._task, unit, given, mode, cuda, lane, forked))
        # All are waited for before an error is passed on: no branch runs on after the call.
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
        given: list[Any],
        mode: _Modes,
        cuda: CudaStreams | None,
        lane: int,
        forked: Any,
    ) -> Any:
        with mode.applied():
            if cuda is None:
                return unit.run(*given)
            with torch.cuda.device(self.device):
                stream = cuda.side(lane)
                cuda.wait(stream, forked)
                with cuda.use(stream):
                    return unit.run(*given)

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
        """End the threads after their last task."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


def _wait_a_moment() -> None:
    """Long enough for the pool to start a thread for each of its first tasks."""
    torch.zeros(1).add_(1)


class _Modes:
    """The modes of the calling thread, to be set in another thread."""

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
