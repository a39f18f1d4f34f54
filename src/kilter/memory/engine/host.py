"""Host memory: one arena that all plans share, and blocks for what is offloaded without a plan.

A job whose shapes change asks for ever new sizes. Sizes are rounded up to classes, a block serves
whatever it is large enough for and not more than twice as large as, and blocks that nothing uses
are given back before the pool grows beyond twice the most that was in use at one time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kilter.memory.host_memory import HostMemoryError

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine.backend import Backend

CLASSES = 8
"""Each doubling of the size has so many size classes: a new block is at most an eighth too
large."""
LARGER_BLOCK = 2
"""A block is used for a tensor of at least half its size. At the limit any larger block is used."""
SPARE = 2
"""The pool takes at most so many times the most that was in use at one time."""
IDLE_PASSES = 32
"""What is free is given back after so many passes under a plan in a row. To take it again costs
more than many passes, so the pool is kept where some passes have no plan."""


def class_bytes(size_bytes: int) -> int:
    """The size class: the size rounded up by less than one part in `CLASSES`."""
    step = max(1, 1 << (size_bytes.bit_length() - 1) >> (CLASSES.bit_length() - 1))
    return -(-size_bytes // step) * step


@dataclass(frozen=True, slots=True, eq=False)
class HostBlock:
    """Host memory that a tensor may use."""

    memory: torch.Tensor
    size_bytes: int


class HostPool:
    """Blocks in use and free ones, all reserved from one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._free: list[HostBlock] = []
        """The block that has been free for the longest time comes first."""
        self.taken_bytes = 0
        """All blocks take this together."""
        self._used_bytes = 0
        self._most_used_bytes = 0
        self._idle = 0
        """So many passes have taken nothing, since one that has."""

    def take(self, size_bytes: int) -> HostBlock:
        """The smallest block that fits, new if need be. `HostMemoryError` if there is none."""
        block = self._smallest(size_bytes, LARGER_BLOCK * size_bytes) or self._new(size_bytes)
        self._idle = 0
        self._used_bytes += block.size_bytes
        self._most_used_bytes = max(self._most_used_bytes, self._used_bytes)
        return block

    def put(self, block: HostBlock) -> None:
        """The tensor no longer needs the block; copies may still be under way."""
        self._used_bytes -= block.size_bytes
        self._free.append(block)

    def rest(self) -> None:
        """A pass has ended under a plan."""
        self._idle += 1
        if self._idle >= IDLE_PASSES and self._free:
            self.empty()

    def empty(self) -> None:
        """Give back what no tensor uses."""
        while self._free:
            self._give_back_oldest()
        self._most_used_bytes = self._used_bytes

    def forget(self) -> None:
        """The backend was closed, and all of its host memory went with that."""
        self._free.clear()
        self.taken_bytes = self._used_bytes = self._most_used_bytes = 0

    def _smallest(self, least_bytes: int, most_bytes: int | None = None) -> HostBlock | None:
        fitting = [
            block
            for block in self._free
            if block.size_bytes >= least_bytes
            and (most_bytes is None or block.size_bytes <= most_bytes)
        ]
        if not fitting:
            return None
        block = min(fitting, key=lambda block: block.size_bytes)
        self._free.remove(block)
        return block

    def _new(self, size_bytes: int) -> HostBlock:
        new_bytes = class_bytes(size_bytes)
        used_bytes = max(self._most_used_bytes, self._used_bytes + new_bytes)
        while self._free and self.taken_bytes + new_bytes > SPARE * used_bytes:
            self._give_back_oldest()
        while True:
            try:
                memory = self._backend.reserve(new_bytes)
            except HostMemoryError:
                block = self._smallest(size_bytes)
                if block is not None:
                    return block
                if not self._free:
                    raise
                self._give_back_oldest()
                continue
            self.taken_bytes += new_bytes
            return HostBlock(memory, new_bytes)

    def _give_back_oldest(self) -> None:
        block = self._free.pop(0)
        self._backend.give_back(block.memory)
        self.taken_bytes -= block.size_bytes


class HostArena:
    """Memory in which every plan has a place for each tensor that it offloads."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.memory: torch.Tensor | None = None
        self._outgrown: list[torch.Tensor] = []
        """Tensors of an older graph may still lie in this earlier memory."""

    @property
    def size_bytes(self) -> int:
        return 0 if self.memory is None else self.memory.numel()

    @property
    def host_bytes(self) -> int:
        """All that is taken, with what was outgrown."""
        return self.size_bytes + sum(int(memory.numel()) for memory in self._outgrown)

    def forget(self) -> None:
        """The backend was closed, and all of its host memory went with that."""
        self.memory = None
        self._outgrown.clear()

    def room_bytes(self, *, in_use: bool) -> int:
        """How large the arena may be. `in_use`: tensors of an older graph may lie in it."""
        left_bytes = self._backend.host.left_bytes or 0
        return max(self.size_bytes, left_bytes) if in_use else self.size_bytes + left_bytes

    def grow(self, size_bytes: int, *, in_use: bool) -> None:
        """At least this large. `HostMemoryError` if that is more than there is; the arena is as
        before then."""
        if not in_use:
            while self._outgrown:
                self._backend.give_back(self._outgrown.pop())
        if size_bytes <= self.size_bytes:
            return
        before, self.memory = self.memory, None
        if before is not None and not in_use:  # both at once may be more than the host has
            self._backend.give_back(before)
        try:
            self.memory = self._backend.reserve(size_bytes)
        except HostMemoryError:
            if before is not None:
                self.memory = before if in_use else self._backend.reserve(before.numel())
            raise
        if before is not None and in_use:
            self._outgrown.append(before)
