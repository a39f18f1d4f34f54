"""CUDA graphs: one launch for a whole step. Inputs are copied in, outputs are copied out.

The raw graph is never exposed: it reads and writes fixed addresses, so whoever replaced an input
instead of copying it, or kept an output over the next replay, would get wrong numbers silently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from kilter.act.branches.streams import Cuda
from kilter.act.branches.tracing import without_collecting

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
        self._done: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._raw = -1

    def begin(self, device: int) -> None:
        """The stream that is current waits for the last replay, if that was on another."""
        raw = torch._C._cuda_getCurrentRawStream(device)
        if raw != self._raw:
            self._raw, self._stream = raw, torch.cuda.current_stream(device)
            if self._done is not None:
                self._stream.wait_event(self._done)

    def end(self) -> None:
        if self._done is None:
            self._done = torch.cuda.Event()
        self._done.record(self._stream)


def copy_all(to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copies tensors onto others of the same shapes, all by one launch where dtypes agree: at the
    size of a step's inputs a launch of its own costs the host more than the device."""
    if len(to) == 1:
        to[0].copy_(given[0])
    elif to:
        torch._foreach_copy_(to, given)


@contextmanager
def _clean(device: torch.device, pool: Any) -> Iterator[None]:
    """No garbage collection inside (it may free another graph, which breaks a capture); and after
    a failure the random generator and the allocator, which the framework leaves in the middle of
    it, are brought back."""
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    whole = False
    try:
        with without_collecting():
            yield
        whole = True
    finally:
        if not whole:
            generator.graphsafe_set_state(generator.clone_state())
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, pool)


def record(step: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Any, Any]:
    """The CUDA graph of a call and what the call returned; warm, and on the capture stream."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with _clean(device, pool):
        # Only this thread's calls can break the capture: a data loader may pin memory.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        whole = False
        try:
            made = step()
            whole = True
        finally:  # a capture left open would break every later launch
            with nullcontext() if whole else suppress(RuntimeError):
                graph.capture_end()
    return graph, made


@contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """On the capture stream, alone; behind what the caller's stream has issued, and before what it
    issues next. Memory made inside belongs to that stream and stays where it is."""
    backend = Cuda(device)
    main, stream = backend.current(), backend.side(CAPTURE_SIDE)
    stream.wait_stream(main)
    with _ONE_AT_A_TIME, torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    main.wait_stream(stream)


def static_like(given: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same shapes and strides, at addresses of their own, with the same values."""
    made = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in given]
    for static, tensor in zip(made, given, strict=True):
        static.copy_(tensor)
    return made


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
        self._device = torch.cuda.current_device() if device.index is None else device.index
        # The graph reads weights and tables by address: whatever the step holds must stay alive.
        self._step = step
        self._inputs = static_like(inputs)
        with capturing(device):
            for _ in range(WARM_UPS):
                step(self._inputs)
            self._graph, made = record(lambda: step(self._inputs), device, pool)
        self._outputs: list[Tensor] = list(made)
        self._released = False

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """The outputs; None if another thread has given the graph up meanwhile."""
        turns = self._turns
        with turns.lock:
            if self._released:
                return None
            turns.begin(self._device)
            copy_all(self._inputs, inputs)
            self._graph.replay()
            outputs = [torch.empty_like(t) for t in self._outputs]
            copy_all(outputs, self._outputs)
            turns.end()
        return outputs

    def release(self) -> None:
        """Give the memory back to the pool."""
        with self._turns.lock:
            self._released = True
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
