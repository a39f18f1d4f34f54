"""The marker word: how far the device's timeline has come, for a process beside the program's.

Sixteen bytes of memory that two processes share: the number of the last iteration end, and the
time at which it was passed. The program's thread writes them and never waits; the conductor polls.
On a CPU the host's time is the device's, so the word is written at the iteration end itself.
"""

from __future__ import annotations

import mmap
import os
import time

from kilter.core.own_file import OwnFile

_BYTES = 16
NONE = -1
"""In place of a number, before the first iteration end."""


class Marker:
    """The program's end. `file` is handed to the other process."""

    def __init__(self) -> None:
        self.file = OwnFile(os.memfd_create("kilter-marker", os.MFD_CLOEXEC))
        assert self.file.number is not None
        os.ftruncate(self.file.number, _BYTES)
        self._words = memoryview(mmap.mmap(self.file.number, _BYTES)).cast("q")
        self._words[0] = NONE

    def mark(self, index: int) -> None:
        """Iteration end `index` is passed now."""
        self._words[1] = time.monotonic_ns()
        self._words[0] = index

    def close(self) -> None:
        """The other process keeps what it has."""
        self.file.close()


class MarkerReader:
    """The other process's end."""

    def __init__(self, number: int) -> None:
        self._words = memoryview(mmap.mmap(number, _BYTES, prot=mmap.PROT_READ)).cast("q")

    def last(self) -> tuple[int, float]:
        """Number and time of the last iteration end. Both belong together: the number is written
        last, and read again."""
        while True:
            index, t_ns = self._words[0], self._words[1]
            if self._words[0] == index:
                return index, t_ns * 1e-9
