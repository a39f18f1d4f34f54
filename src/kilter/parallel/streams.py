"""Runs the units of a step on several streams: fork, work, join.

The same code runs eagerly and inside a capture. `StreamBackend` is what it needs of a device,
so that its rules are tested without one: every side stream is joined, the main stream is issued
first, and no memory is given back before the join.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from kilter.observe.torch_internals.branches import pytree
from kilter.parallel.program import BranchProgram, Unit, run_unit


class StreamBackend(Protocol):
    """Streams and events of one device."""

    def current(self) -> Any:
        """The stream that work is issued to now."""

    def side(self, number: int) -> Any:
        """Side stream `number`, the same one at every call."""

    def record(self, stream: Any) -> Any:
        """An event behind everything issued to `stream` so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Later work of `stream` starts after `event`."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue work to `stream`."""

    def shared(self, tensor: Tensor, stream: Any) -> None:
        """`tensor` was allocated on a side stream and is read on `stream` from now on."""


@cache
def _side_stream(device: int, number: int) -> torch.cuda.Stream:
    """One set of side streams for the process. The allocator keeps memory for each stream, so with
    new streams for each layer or capture the memory of the old ones would not be used again."""
    return torch.cuda.Stream(device)


class CudaStreams:
    """CUDA streams of one device."""

    def __init__(self, device: torch.device, *, capturing: bool = False) -> None:
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.capturing = capturing

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def side(self, number: int) -> torch.cuda.Stream:
        return _side_stream(self.device, number)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        on: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return on

    def shared(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        if not self.capturing:  # inside a capture the event of this call would never complete
            tensor.record_stream(stream)


def share(
    backend: StreamBackend, unit: Unit, environment: list[Tensor | None], stream: Any
) -> None:
    """A unit's results, made on a side stream, are read on `stream` from now on."""
    for made in pytree.tree_leaves([environment[slot] for slot in unit.writes]):
        if isinstance(made, Tensor):
            backend.shared(made, stream)


CALLS_AHEAD = -2
"""The side stream for work that runs ahead of time has this number."""


class ForkJoin:
    """Runs each step's units on the given lanes. Work that may run ahead of time has its own stream
    and is joined by the step that needs it."""

    def __init__(self, backend: StreamBackend, lanes: Sequence[Sequence[Sequence[int]]]) -> None:
        self.backend = backend
        self.lanes = lanes
        """It has, for each step, the units of each lane; the first lane is the caller's stream."""
        self._done: dict[int, Any] = {}

    def __call__(
        self, index: int, program: BranchProgram, environment: list[Tensor | None]
    ) -> None:
        step, lanes = program.steps[index], self.lanes[index]
        backend = self.backend
        main = backend.current()
        self._ahead(index, program, environment, main)
        forked = backend.record(main) if len(lanes) > 1 else None
        # The main lane is issued first. If a side stream were first, it would be the root of the
        # captured graph, and the graph would get new streams for every layer when instantiated.
        try:
            self._issue(lanes[0], step, environment)
            for number, lane in enumerate(lanes[1:]):
                side = backend.side(number)
                backend.wait(side, forked)
                with backend.use(side):
                    self._issue(lane, step, environment)
        finally:  # also when a branch raises: every fork is joined
            for number in range(len(lanes) - 1):
                backend.wait(main, backend.record(backend.side(number)))
        for lane in lanes[1:]:
            for position in lane:
                share(backend, step[position], environment, main)

    def _ahead(
        self, index: int, program: BranchProgram, environment: list[Tensor | None], main: Any
    ) -> None:
        backend = self.backend
        starting = [i for i, (start, _) in enumerate(program.ahead) if start == index]
        if starting:
            side = backend.side(CALLS_AHEAD)
            backend.wait(side, backend.record(main))
            with backend.use(side):
                for number in starting:
                    _, unit = program.ahead[number]
                    run_unit(unit, environment)
                    self._done[number] = backend.record(side)
        for number, (_, unit) in enumerate(program.ahead):
            if number in self._done and program.needed(unit) == index:
                backend.wait(main, self._done.pop(number))
                share(backend, unit, environment, main)

    def _issue(
        self, lane: Sequence[int], step: Sequence[Unit], environment: list[Tensor | None]
    ) -> None:
        for position in lane:
            run_unit(step[position], environment)
