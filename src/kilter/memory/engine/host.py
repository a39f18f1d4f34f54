"""Host memory: one arena that all plans share, and a pool for what is offloaded without a plan.

A job whose shapes change asks for ever new sizes, and to reserve memory takes long. So the pool
reserves few large pieces. A tensor takes a part of one, where the smallest fits that is free, and
parts that are free side by side are one again (Knuth: The art of computer programming, volume 1,
section 2.5).
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kilter.memory.host_memory import HostMemoryError

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine.backend import Backend

PART_UNIT = 512
"""Parts begin at multiples of so many bytes, as the framework's own allocations do."""
GROWTH = 4
"""A new piece is at least one such part of what the pool has."""
IDLE_PASSES = 32
"""What is free is given back after so many passes under a plan in a row. To take it again costs
more than many passes, so the pool is kept where some passes have no plan."""


class _Piece:
    """Host memory that was reserved at one time."""

    def __init__(self, memory: torch.Tensor, size_bytes: int) -> None:
        self.memory = memory
        self.size_bytes = size_bytes
        self.free = [(0, size_bytes)]
        """Where each part that no tensor uses begins and ends, in order."""

    @property
    def unused(self) -> bool:
        return self.free == [(0, self.size_bytes)]

    def take(self, at: int, size_bytes: int) -> int:
        """The begin of so much of the free part with this index."""
        begin, end = self.free.pop(at)
        if begin + size_bytes < end:
            self.free.insert(at, (begin + size_bytes, end))
        return begin

    def put(self, begin: int, end: int) -> None:
        """This part is free again."""
        at = bisect(self.free, (begin, end))
        if at < len(self.free) and self.free[at][0] == end:
            end = self.free.pop(at)[1]
        if at and self.free[at - 1][1] == begin:
            at -= 1
            begin = self.free.pop(at)[0]
        self.free.insert(at, (begin, end))


class _Part(NamedTuple):
    """A free part, the smallest first."""

    size_bytes: int
    piece: int
    at: int


@dataclass(frozen=True, slots=True, eq=False)
class HostBlock:
    """Host memory that a tensor may use."""

    piece: _Piece
    begin: int
    size_bytes: int

    @property
    def memory(self) -> torch.Tensor:
        return self.piece.memory[self.begin : self.begin + self.size_bytes]


class HostPool:
    """Host memory in use and free, all reserved from one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pieces: list[_Piece] = []
        self._returned: list[HostBlock] = []
        """These are free, and are made parts of their pieces again at the next call. A tensor may
        go at any moment, in the middle of one too, where the collector finds it."""
        self._idle = 0
        """So many passes have taken nothing, since one that has."""
        backend.host.when_short(self.give_back)

    @property
    def taken_bytes(self) -> int:
        """All pieces take this together."""
        return sum(piece.size_bytes for piece in self._pieces)

    def take(self, size_bytes: int) -> HostBlock:
        """Part of a piece, of a new one if need be. `HostMemoryError` if there is none."""
        self._idle = 0
        self._join()
        size_bytes = -(-size_bytes // PART_UNIT) * PART_UNIT
        found = self._smallest(size_bytes)
        if found is None:
            self._pieces.append(self._new(size_bytes))
            found = _Part(size_bytes, len(self._pieces) - 1, 0)
        piece = self._pieces[found.piece]
        return HostBlock(piece, piece.take(found.at, size_bytes), size_bytes)

    def put(self, block: HostBlock) -> None:
        """The tensor no longer needs the block; copies may still be under way."""
        self._returned.append(block)

    def rest(self) -> None:
        """A pass has ended under a plan."""
        self._idle += 1
        if self._idle >= IDLE_PASSES and self._pieces:
            self.empty()

    def empty(self) -> None:
        """Give back the pieces that no tensor uses."""
        self.give_back(self.taken_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Give back so much of what no tensor uses, in whole pieces, the smallest first."""
        self._join()
        unused = [piece for piece in self._pieces if piece.unused]
        for piece in sorted(unused, key=lambda piece: piece.size_bytes):
            if size_bytes <= 0:
                return
            self._backend.give_back(piece.memory)
            self._pieces.remove(piece)
            size_bytes -= piece.size_bytes

    def forget(self) -> None:
        """The backend was closed, and all of its host memory went with that."""
        self._pieces.clear()
        self._returned.clear()

    def _join(self) -> None:
        while self._returned:
            block = self._returned.pop()
            block.piece.put(block.begin, block.begin + block.size_bytes)

    def _smallest(self, size_bytes: int) -> _Part | None:
        """The smallest free part of at least this size."""
        fitting = (
            _Part(end - begin, number, at)
            for number, piece in enumerate(self._pieces)
            for at, (begin, end) in enumerate(piece.free)
            if end - begin >= size_bytes
        )
        return min(fitting, default=None)

    def _new(self, size_bytes: int) -> _Piece:
        left_bytes = self._backend.host.left_bytes
        for ample_bytes in (max(size_bytes, self.taken_bytes // GROWTH), size_bytes):
            if ample_bytes > size_bytes and left_bytes is not None and ample_bytes > left_bytes:
                continue  # what is free elsewhere is not given back for that
            try:
                return _Piece(self._backend.reserve(ample_bytes), ample_bytes)
            except HostMemoryError:
                pass
        self.empty()  # the host itself may be short
        return _Piece(self._backend.reserve(size_bytes), size_bytes)


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
