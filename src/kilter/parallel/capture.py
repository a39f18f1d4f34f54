"""CUDA graphs: one launch for a whole step. Inputs are copied in, outputs are copied out.

The raw graph is never exposed. It reads and writes fixed addresses: a caller who replaced an input
instead of copying it, or kept an output over the next replay, would get wrong numbers silently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from kilter.observe.torch_internals.branches import (
    copy_together,
    end_allocation_to_pool,
    raw_stream,
)
from kilter.parallel.streams import CudaStreams
from kilter.parallel.trace import without_collecting

WARM_UPS = 3
"""So many calls come before a capture: lazy initialisation, autotuning and workspaces must not be
captured."""

CAPTURE_SIDE = -1
"""Graphs are captured on the side stream of this number."""

_ONE_AT_A_TIME = threading.Lock()
"""The runtime allows one capture in a process at a time."""


class Turns:
    """Replays that share a memory pool run one after the other, whatever streams they are on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._done: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._raw = -1

    def begin(self, device: int) -> None:
        """The current stream waits for the last replay, if that was on another stream."""
        raw = raw_stream(device)
        if raw != self._raw:
            self._raw, self._stream = raw, torch.cuda.current_stream(device)
            if self._done is not None:
                self._stream.wait_event(self._done)

    def end(self) -> None:
        if self._done is None:
            self._done = torch.cuda.Event()
        self._done.record(self._stream)


class GraphPool:
    """Device memory that captured graphs share, and the graphs that use it now.

    Once the last graph of a pool is gone, the allocator accepts no new capture into that pool.
    """

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.graphs: WeakSet[Any] = WeakSet()

    def bytes(self) -> int:
        """Device memory that the pool holds."""
        return sum(
            int(segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", ())) == tuple(self.handle)
        )


def copy_all(to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy tensors onto others of the same shapes, by one launch where the dtypes agree: a launch
    for each of a step's inputs costs the host more time than the device."""
    if len(to) == 1:
        to[0].copy_(given[0])
    elif to:
        copy_together(to, given)


@contextmanager
def _clean(device: torch.device, pool: GraphPool) -> Iterator[None]:
    """No garbage collection inside: it may free another graph, which breaks a capture. After a
    failure, the random generator and the allocator are taken out of the capture, in which the
    framework leaves them."""
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
                end_allocation_to_pool(index, pool.handle)


def record(step: Callable[[], Any], device: torch.device, pool: GraphPool) -> tuple[Any, Any]:
    """The CUDA graph of a call and what the call returned. The caller has warmed it up and is on
    the capture stream."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with _clean(device, pool):
        # Only this thread's calls can break the capture: a data loader may pin memory.
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
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
    """On the capture stream, one capture at a time, after the work that the caller's stream has
    issued and before the work that it issues next. Memory allocated inside belongs to the capture
    stream and keeps its address."""
    backend = CudaStreams(device)
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
        pool: GraphPool,
        turns: Turns,
    ) -> None:
        self._pool, self._turns = pool, turns
        self._device = torch.cuda.current_device() if device.index is None else device.index
        # The graph reads weights and tables by address, so what the step holds must stay alive.
        self._step = step
        self._inputs = static_like(inputs)
        with capturing(device):
            for _ in range(WARM_UPS):
                step(self._inputs)
            self._graph, made = record(lambda: step(self._inputs), device, pool)
        self._outputs: list[Tensor] = list(made)
        self._released = False
        pool.graphs.add(self)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """The outputs; None if another thread has released the graph meanwhile."""
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
            self._pool.graphs.discard(self)
