"""Writes the events of a run, one line each, as they happen."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from kilter.core.errors import FileError
from kilter.core.events import AnyEvent


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
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o644)
        except OSError as error:
            raise FileError(f"{path}: cannot be written ({error.strerror})") from error

    def __call__(self, event: AnyEvent) -> None:
        """Append one event. From any thread."""
        line = self._encode(event) + b"\n"
        with self._lock:
            if self.lost is not None or self._file < 0:
                return
            try:
                written = os.write(self._file, line)
                if written < len(line):
                    self.lost = f"{self.path}: the disk is full"
            except OSError as error:
                self.lost = f"{self.path}: {error.strerror}"

    def close(self) -> None:
        """Twice is once."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
