"""Runs the units of a step on several streams: fork, work, join.

The same code runs eagerly and inside a capture. `Backend` is the little it needs of a device, so
that the rules (every side stream joined, the main one issued first, no memory given back before
the join) are tested without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from kilter.act.branches.program import Program, Unit, store


class Backend(Protocol):
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
        """`tensor` was made on a side stream and is read on `stream` from now on."""


@cache
def _side_stream(device: int, number: int) -> torch.cuda.Stream:
    """One set of side streams for the process: the allocator keeps memory per stream, so a fresh
    set for each layer or capture would strand what the last one used."""
    return torch.cuda.Stream(device)


class Cuda:
    """CUDA streams of one device. Not inside a capture: `shared` tells the allocator."""

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
        if not self.capturing:  # inside a capture its event would never complete
            tensor.record_stream(stream)


def share(backend: Backend, unit: Unit, environment: list[Tensor | None], stream: Any) -> None:
    """What a unit made on a side stream is read on `stream` from now on."""
    for made in pytree.tree_leaves([environment[slot] for slot in unit.writes]):
        if isinstance(made, Tensor):
            backend.shared(made, stream)


AHEAD = -2
"""The number of the side stream for work that is done ahead of time."""


class ForkJoin:
    """Runs a step's units on the lanes it is given, step by step; what may be done ahead of time
    has a stream of its own and is joined by the step that needs it."""

    def __init__(self, backend: Backend, lanes: Sequence[Sequence[Sequence[int]]]) -> None:
        self.backend = backend
        self.lanes = lanes
        """For each step the units of each lane; the first lane is the stream we are called on."""
        self._done: dict[int, Any] = {}

    def __call__(self, index: int, program: Program, environment: list[Tensor | None]) -> None:
        step, lanes = program.steps[index], self.lanes[index]
        backend = self.backend
        main = backend.current()
        self._ahead(index, program, environment, main)
        forked = backend.record(main) if len(lanes) > 1 else None
        # The main lane first: a side stream issued first becomes the root of the captured graph,
        # and every layer then gets streams of its own when the graph is instantiated.
        try:
            self._issue(lanes[0], program, step, environment)
            for number, lane in enumerate(lanes[1:]):
                side = backend.side(number)
                backend.wait(side, forked)
                with backend.use(side):
                    self._issue(lane, program, step, environment)
        finally:  # also when a branch raises: whatever was forked is joined
            for number in range(len(lanes) - 1):
                backend.wait(main, backend.record(backend.side(number)))
        for lane in lanes[1:]:
            for position in lane:
                share(backend, step[position], environment, main)

    def _ahead(
        self, index: int, program: Program, environment: list[Tensor | None], main: Any
    ) -> None:
        backend = self.backend
        starting = [i for i, (start, _) in enumerate(program.ahead) if start == index]
        if starting:
            side = backend.side(AHEAD)
            backend.wait(side, backend.record(main))
            with backend.use(side):
                for number in starting:
                    _, unit = program.ahead[number]
                    store(unit, unit.run(*program.arguments(unit, environment)), environment)
                    self._done[number] = backend.record(side)
        for number, (_, unit) in enumerate(program.ahead):
            if number in self._done and program.needed(unit) == index:
                backend.wait(main, self._done.pop(number))
                share(backend, unit, environment, main)

    def _issue(
        self, lane: Sequence[int], program: Program, step: Any, environment: list[Tensor | None]
    ) -> None:
        for position in lane:
            unit = step[position]
            store(unit, unit.run(*program.arguments(unit, environment)), environment)
