"""Writes the events of a run, one line each, as they happen."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import msgspec

from kilter.core.errors import FileError
from kilter.core.events import AnyEvent
from kilter.core.own_file import OwnFile

_APPEND = os.O_WRONLY | os.O_APPEND


class Recorder:
    """Appends to one file; a line is whole or (when killed in the middle) the last one.

    A disk that refuses ends the recording, not the run: `lost` says why from then on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost: str | None = None
        self._lock = threading.Lock()
        self._encode = msgspec.json.Encoder(enc_hook=str).encode
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # unbuffered: what was written survives a kill of the process
            self._file = OwnFile.open(path, _APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
            if path.exists():
                why = "another run has begun to write there; choose another place"
            raise FileError(f"{path}: {why}") from error
        self._closed = False
        self._writing: tuple[int, bytes] | None = None
        """It holds the size of the file, and what is being appended. An exception that came from a
        signal handler of the program leaves it behind: the next call appends what has not
        arrived."""

    def __call__(self, event: AnyEvent) -> None:
        line = self._encode(event) + b"\n"
        with self._lock:
            if self.lost is not None or self._closed:
                return
            try:
                self._append_now_or_again(line)
            except OSError as error:
                if error.errno is None:  # of a signal handler of the program, say a TimeoutError
                    raise
                self.lost = f"{self.path}: {error.strerror}"

    def _append_now_or_again(self, line: bytes) -> None:
        """Another thread of the program may close the file at this very moment."""
        try:
            self._append(line)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            noted = self._writing is not None and self._writing[1].endswith(line)
            self._append(b"" if noted else line)

    def _append(self, line: bytes) -> None:
        if self._file.number is None:
            self._file.reopen(self.path, _APPEND)
        number = self._file.number
        if number is None:
            self.lost = f"{self.path}: closed by the program, and another file by now"
            return
        size_bytes = os.fstat(number).st_size
        if self._writing is not None:
            begin, last = self._writing
            line = last[max(0, size_bytes - begin) :] + line
        self._writing = size_bytes, line
        if os.write(number, line) < len(line):
            self.lost = f"{self.path}: the disk is full"
        self._writing = None

    def close(self) -> None:
        """Twice is once."""
        with self._lock:
            self._file.close()
            self._closed = True
