"""The marker word: how far the device's timeline has come, for a process beside the program's.

One page of memory that two processes share, with two words: the number of the last iteration end
plus one, and the time at which it was passed. Who writes never waits; the conductor polls.
On a CPU the host's time is the device's, so the host writes both words at the iteration end itself.
On a GPU the program's stream writes the number (`stream_marker`), and the time stays 0: then the
time is that of the look that found the number.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from kilter.core.own_file import OwnFile

_NUMBER, _TIME = 0, 1
NONE = -1
"""It stands in place of a number, before the first iteration end."""


class Marker:
    """The program's end, written by the host. `file` is handed to the other process."""

    def __init__(self) -> None:
        self.file = OwnFile(os.memfd_create("kilter-marker", os.MFD_CLOEXEC))
        assert self.file.number is not None
        os.ftruncate(self.file.number, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.file.number, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        """The page is there; its first eight bytes are the number."""

    @property
    def last(self) -> int:
        """The last iteration end that was passed, or `NONE`."""
        return int(self._words[_NUMBER]) - 1

    def mark(self, index: int) -> None:
        """Iteration end `index` is passed now."""
        self._words[_TIME] = time.monotonic_ns()
        self._words[_NUMBER] = index + 1

    def without_times(self) -> None:
        """From here on only another writer (the GPU's stream) changes the number."""
        self._words[_TIME] = 0

    def close(self) -> None:
        """The other process keeps what it has."""
        self.file.close()


class Passed(NamedTuple):
    """An iteration end that was passed."""

    iteration: int
    t_s: float
    """It is read from `time.monotonic()`."""
    within_s: float
    """How far the true time may be from it, in either direction."""


class MarkerReader:
    """The other process's end."""

    def __init__(self, number: int, clock: Callable[[], float] = time.monotonic) -> None:
        page = mmap.mmap(number, mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._words = memoryview(page).cast("q")
        self._clock = clock
        self._seen = self._words[_NUMBER]
        self._looked_s = clock()

    @property
    def tells_time(self) -> bool:
        """The time stands beside the number, so that a late look costs nothing."""
        return bool(self._words[_TIME])

    def look(self) -> Passed | None:
        """The last iteration end, if it is another one than at the look before."""
        while True:  # both words belong together: the number is written last, and read again
            number, t_ns = self._words[_NUMBER], self._words[_TIME]
            if self._words[_NUMBER] == number:
                break
        before_s, self._looked_s = self._looked_s, self._clock()
        if number == self._seen:
            return None
        self._seen = number
        if t_ns:
            return Passed(number - 1, t_ns * 1e-9, 0.0)
        half_s = (self._looked_s - before_s) / 2
        return Passed(number - 1, self._looked_s - half_s, half_s)
