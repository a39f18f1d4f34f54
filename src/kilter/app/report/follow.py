"""Reads the event files of a run while they grow: whole lines only, each once.

Only the run's folder is read; the job is never asked and never noticed. What a long run would pile
up (readings of the sensors, states of memory) is thinned to what a screen can show.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from kilter.app.report.build import Rank, event_files, sort_events
from kilter.core.errors import FileError
from kilter.core.events import (
    MAX_EVENTS_BYTES,
    AnyEvent,
    Moved,
    Operated,
    Sampled,
    Sectioned,
    Started,
    decode_event,
)
from kilter.core.files import flaw_of

MOST_SAMPLES = 240
"""So many readings are kept of each rank: two minutes of a real device."""
_CHUNK_BYTES = 2**22


class GrowingFile:
    """The events of one rank as far as they are whole. `read` takes what has been added since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin_anew(0)

    def _begin_anew(self, inode: int) -> None:
        self._inode = inode
        self._offset = 0
        self._line = 0
        self._rest = b""
        self._flaw: FileError | None = None
        """It is the flaw of the last line: only a killed process leaves a broken one, and nothing
        after it."""
        self._samples: deque[Sampled] = deque(maxlen=MOST_SAMPLES)
        self._last: dict[type[AnyEvent], AnyEvent] = {}
        self._others: list[AnyEvent] = []
        self.written_s = 0.0
        """When the file was last written to, on the clock of its file system."""

    def read(self) -> None:
        """Take what is new. `FileError` for a line that is no event, for a file that was deleted,
        and for one that does not begin with the start of a run. A line that is not whole yet is
        left for the next time."""
        try:
            with open(self.path, "rb", opener=_without_waiting) as file:
                status = os.fstat(file.fileno())
                flaw = flaw_of(status, max_bytes=MAX_EVENTS_BYTES)
                if flaw is not None:
                    raise FileError(f"{self.path}: {flaw}; not read")
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._begin_anew(status.st_ino)
                self.written_s = status.st_mtime
                file.seek(self._offset)
                while chunk := file.read(_CHUNK_BYTES):
                    self._offset += len(chunk)
                    self._take(chunk)
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read ({error.strerror})") from error

    def _take(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if self._flaw is not None:
                raise self._flaw
            self._line += 1
            try:
                event = decode_event(line, self._line, self.path)
            except FileError as error:
                self._flaw = error
                continue
            if self._line == 1 and not isinstance(event, Started):
                raise FileError(f"{self.path}: does not begin with the start of a run")
            self._keep(event)

    def _keep(self, event: AnyEvent) -> None:
        if isinstance(event, Sampled):
            self._samples.append(event)
        elif isinstance(event, Moved | Sectioned | Operated):
            self._last[type(event)] = event
        else:
            self._others.append(event)

    def rank(self) -> Rank | None:
        """What is known of this rank; None before its first whole line."""
        return sort_events([*self._others, *self._last.values(), *self._samples])


class GrowingRun:
    """All ranks of a run; ranks whose files appear later are taken in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[Path, GrowingFile] = {}

    def read(self) -> None:
        """Take what is new in all files. `FileError` where there is no
        folder, no file of a run in it, or one that is damaged."""
        found = event_files(self.directory)
        if not self.directory.is_dir():
            raise FileError(f"{self.directory}: no such run")
        if not found and not self.files:
            raise FileError(
                f"{self.directory}: holds no run (no events-rank*.jsonl); a run makes its file "
                "when its program begins"
            )
        for path in found:
            self.files.setdefault(path, GrowingFile(path))
        for file in self.files.values():
            file.read()

    def ranks(self) -> list[Rank]:
        """Those whose first line is whole, in order."""
        found = [rank for file in self.files.values() if (rank := file.rank()) is not None]
        return sorted(found, key=lambda rank: rank.started.rank)

    @property
    def written_s(self) -> float:
        """When the last file was written to."""
        return max((file.written_s for file in self.files.values()), default=0.0)


def _without_waiting(path: str, flags: int) -> int:
    """A pipe of that name would hang the reader."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
