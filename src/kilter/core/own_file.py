"""A descriptor that we keep open in somebody else's program.

A program may close every descriptor that it does not know, as daemons do (`os.closerange`), and
the files that it opens next get the lowest numbers that are free. What we wrote then could land in
a checkpoint. So ours have high numbers, to which few programs come, also while one thread closes
them and another one is about to write. And the device and the inode of what we have opened are
compared before every use. A descriptor that is not ours any more is forgotten, and never closed.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

_FIRST = 3
"""The numbers below are for standard input, output and error, also while those are closed."""
_END = 1024
"""`select` watches no descriptors from this number on."""
_OURS = 64
"""So many numbers are set apart for us, where the process may have that many."""


class OwnFile:
    """One descriptor, which only this object closes."""

    def __init__(self, number: int) -> None:
        self._what = identity(number)
        self._number: int | None = _moved(number, self._what)

    @classmethod
    def open(cls, path: Path, flags: int, mode: int = 0o600) -> OwnFile:
        """Raises `OSError`."""
        return cls(os.open(path, flags | os.O_CLOEXEC, mode))

    @property
    def number(self) -> int | None:
        """To be asked for anew before every use. None: closed, by us or by the program."""
        if self._number is not None and identity(self._number) != self._what:
            self._number = None
        return self._number

    def reopen(self, path: Path, flags: int) -> None:
        """Open the same file again after the program has closed it, if it is still there. Raises
        `OSError`."""
        number = os.open(path, flags | os.O_CLOEXEC)
        opened = identity(number)
        if opened == self._what:
            self._number = _moved(number, opened)
        elif opened == identity(path):  # another file is there by now
            os.close(number)

    def close(self) -> None:
        """Twice is once."""
        number, self._number = self.number, None
        if number is not None:
            os.close(number)


class OwnStream(io.RawIOBase):
    """A file that is read or written through a descriptor of ours, which the program may close in
    the middle of it: every call raises `OSError` from then on."""

    def __init__(self, file: OwnFile) -> None:
        self._file = file

    def fileno(self) -> int:
        """The descriptor, for this moment."""
        number = self._file.number
        if number is None:
            raise OSError(errno.EBADF, "the program has closed it")
        return number

    def readable(self) -> bool:
        """Part of Python's protocol for streams, as is what follows."""
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        return os.readv(self.fileno(), [buffer])

    def write(self, raw: Any, /) -> int:
        return os.write(self.fileno(), raw)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return os.lseek(self.fileno(), offset, whence)

    def close(self) -> None:
        self._file.close()
        super().close()


def _moved(number: int, what: tuple[int, int] | None) -> int:
    """The same file under a number of ours. Where none is free it stays where it is, but not among
    the standard ones. If it is not `what` was opened any more, another thread of the program has
    closed it and opened a file of its own, which stays open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for least in (min(most, _END) - _OURS, _FIRST):
        if least > number:
            with suppress(OSError):
                moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, least)
                if identity(moved) != what:
                    os.close(moved)
                    return number
                if identity(number) == what:
                    os.close(number)
                return moved
    return number


def identity(file: int | Path) -> tuple[int, int] | None:
    """Device and inode of what is open under a number, or is at a path; None if nothing is."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino
