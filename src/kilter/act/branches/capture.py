"""CUDA graphs: one launch for a whole step. Inputs are copied in, outputs are copied out.

The raw graph is never exposed: it reads and writes fixed addresses, so whoever replaced an input
instead of copying it, or kept an output over the next replay, would get wrong numbers silently.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from kilter.act.branches.streams import Cuda

WARM_UPS = 3
"""Calls before a capture: lazy initialisation, autotuning and workspaces must not be captured."""

CAPTURE_SIDE = -1
"""The number of the side stream that captures are made on."""

_ONE_AT_A_TIME = threading.Lock()
"""The runtime allows one capture in a process at a time."""


class Turns:
    """Replays that share a memory pool take turns, whichever stream they are called on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None


@contextmanager
def _clean(device: torch.device, pool: Any) -> Iterator[None]:
    """No garbage collection inside (it may free another graph, which breaks a capture); and after
    a failure the random generator and the allocator, which the framework leaves in the middle of
    it, are brought back."""
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    collecting = gc.isenabled()
    gc.disable()
    whole = False
    try:
        yield
        whole = True
    finally:
        if collecting:
            gc.enable()
        if not whole:
            generator.graphsafe_set_state(generator.clone_state())
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, pool)


class Captured:
    """A captured step. Not thread-safe by itself: `turns` makes it so."""

    def __init__(
        self,
        step: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        inputs: Sequence[Tensor],
        device: torch.device,
        *,
        pool: Any,
        turns: Turns,
    ) -> None:
        self._turns = turns
        # The graph reads weights and tables by address: whatever the step holds must stay alive.
        self._step = step
        # Runs on the capture stream, so that this memory belongs to it and stays where it is.
        backend = Cuda(device)
        stream = backend.side(CAPTURE_SIDE)
        stream.wait_stream(backend.current())
        self._graph = torch.cuda.CUDAGraph()
        self._inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                        for t in inputs]  # fmt: skip
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        stream.wait_stream(backend.current())
        with _ONE_AT_A_TIME, torch.cuda.device(device), torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step(self._inputs)
            torch.cuda.synchronize(device)
            with _clean(device, pool):
                # Only this thread's calls can break the capture: a data loader may pin memory.
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                whole = False
                try:
                    self._outputs = list(step(self._inputs))
                    whole = True
                finally:  # a capture left open would break every later launch
                    with nullcontext() if whole else suppress(RuntimeError):
                        self._graph.capture_end()
        backend.current().wait_stream(stream)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        turns = self._turns
        with turns.lock:
            stream = torch.cuda.current_stream(self._inputs[0].device if self._inputs else None)
            if turns.stream is not None and turns.stream != stream and turns.done is not None:
                stream.wait_event(turns.done)
            if self._inputs:
                torch._foreach_copy_(self._inputs, list(inputs))
            self._graph.replay()
            outputs = [t.clone() for t in self._outputs]
            turns.done = turns.done or torch.cuda.Event()
            turns.done.record(stream)
            turns.stream = stream
        return outputs

    def release(self) -> None:
        """Give the memory back to the pool."""
        with self._turns.lock:
            self._outputs.clear()
            self._inputs.clear()
            self._graph.reset()


def pool_bytes(pool: Any) -> int:
    """Device memory that a pool of graphs holds."""
    return sum(
        int(segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", ())) == tuple(pool)
    )
