"""Joins the memory engine to a session.

import torch -> a waiting hook -> the first large tensor saved for backward -> backend, link,
budget -> `Swapper` -> plan -> the same at every iteration end: is there something to tell?
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kilter.controller import Run
from kilter.core.plan import MemoryBudget
from kilter.core.script_end import ScriptEnd
from kilter.core.units import MIB
from kilter.memory import messages
from kilter.memory.first_tensor import FirstTensor
from kilter.memory.governed_job import GovernedJob
from kilter.memory.host_memory import HostLimit
from kilter.memory.iteration_times import IterationTimes
from kilter.memory.kept_recompute import RecomputeHistory
from kilter.memory.plan_log import PlanLog
from kilter.memory.usable_bytes import card_memory
from kilter.observe.end_times import Iteration

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine.backend import Backend

GIVE_UP = 60
"""After this iteration end clocks no longer wait for a memory plan."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""What the framework's allocator is configured by. Where the program says nothing, segments may
grow: tensors of many sizes, allocated and freed, would leave fragments in fixed segments."""
GROWING = "expandable_segments:True"
LINK_BYTES = 64 * MIB
"""The link is measured with buffers of this size."""


class MemoryController:
    """Makes the program fit `budget`. All but `tick` and `end` belong to the program's threads."""

    def __init__(
        self,
        run: Run,
        budget: MemoryBudget,
        *,
        gradients: str = "auto",
        weights: str = "keep",
        recompute: str | None = None,
        history: Path | None = None,
        command: Sequence[str] = (),
    ) -> None:
        """`history` is the file of earlier runs, by whose rows a job that `command` runs again is
        recognised; None: none is kept."""
        self._run = run
        self._budget = budget
        self._host = HostLimit(run.goal.host_memory_bytes)
        self._gradients, self._weights = gradients, weights
        self._recompute = recompute
        self._history = RecomputeHistory(run, history, command, (gradients, weights))
        self._first = FirstTensor(self._meet, run.fence, on_gpu=run.info.backend == "nvml")
        self._grows = False
        """We have configured the framework's allocator."""
        self._times = IterationTimes()
        self._log = PlanLog(run)
        self._job: GovernedJob | None = None
        """It is None as long as no large tensor was saved."""

    def begin(self) -> None:
        """Begin as soon as the program has imported torch."""
        if "torch" not in sys.modules and not any(name in os.environ for name in ALLOCATOR):
            os.environ[ALLOCATOR[0]] = GROWING
            self._grows = True
        forked = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: _call(forked()))
        self._first.begin()

    def _forked(self) -> None:
        """A forked child has the hooks of its parent's thread, but is not governed."""
        self._stop()

    def _stop(self) -> None:
        self._first.stop()
        if self._job is not None:
            self._job.stop()

    def _meet(self, tensor: torch.Tensor) -> None:
        """The program has used the device: open it, and replace the waiting hooks by the
        engine's."""
        from kilter.memory.engine import CpuStandIn
        from kilter.memory.plan.problem import H200_PCIE5

        cuda = self._first.torch.cuda if self._first.device_type == "cuda" else None
        again: Callable[[], Backend] | None = None
        backend: Backend
        if cuda is not None:
            from kilter.memory.engine.cuda import Cuda, measure_link

            again = partial(Cuda.open, tensor.device.index, self._host)
            backend = again()
            link = measure_link(backend, size_bytes=LINK_BYTES)
        else:
            backend, link = CpuStandIn(host=self._host), H200_PCIE5
        job = GovernedJob(
            self._run,
            self._budget,
            backend,
            link,
            self._times,
            self._log,
            cuda=cuda,
            card=card_memory(self._first.torch.cuda, backend.device, self._run.info),
            # A stand-in's times say nothing of a GPU.
            recompute=self._recompute or ("operations" if cuda is None else "auto"),
            history=self._history,
        )
        self._first.leave()
        job.begin()
        self._job = job
        if again is not None and not self._run.dry_run:  # a stand-in counts activations alone
            used_bytes = backend.used_bytes() or 0
            job.move_state_and_weights(again, used_bytes, self._gradients, self._weights)

    def iteration_ended(self, index: int) -> None:
        """An iteration of the program ends here, in its thread."""
        self._times.index = index
        if self._job is None:
            self._first.wait_here()
        else:
            self._job.iteration_ended()

    def tick(self, finished: Sequence[Iteration], *, settled: bool) -> None:
        """Durations of iterations have become known; a plan may have come into force."""
        self._times.add(finished, self._run.trace.disturbs)
        self._log.save_schedule()
        if self._job is not None:
            self._job.tick()

    @property
    def settled(self) -> bool:
        """The clocks may be judged from here on: the job runs as it is going to run."""
        if self._job is None or self._run.dry_run or self._times.index >= GIVE_UP:
            return True
        return self._job.settled

    def script_ended(self) -> None:
        """The program is over: take the hooks out. Offloaded tensors that are still asked for
        are fetched."""
        self._stop()
        if os.environ.get(ALLOCATOR[0]) == GROWING and self._grows:
            del os.environ[ALLOCATOR[0]]  # the allocator has read it long ago
        if self._job is not None:
            self._job.close()
        self._first.remove_hooks()

    def end(self, finished: Sequence[Iteration], outcome: ScriptEnd) -> None:
        """Record the result, once all times are known, and how the program has ended."""
        self._times.add(finished, self._run.trace.disturbs)
        if self._job is not None:
            if outcome.out_of_memory:
                allocator = None if self._grows else f"{ALLOCATOR[0]}={GROWING}"
                self._log.refuse(
                    messages.out_of_memory(planned=self._job.was_planned, allocator=allocator)
                )
            self._job.conclude()
        elif self._first.torch is None:
            self._log.refuse(messages.NO_TORCH)
        else:
            on_gpu = self._first.device_type == "cuda"
            self._log.refuse(messages.nothing_saved(MIB, on_gpu=on_gpu))
        self._log.save_schedule()


def _call(method: Callable[[], None] | None) -> None:
    if method is not None:
        method()
