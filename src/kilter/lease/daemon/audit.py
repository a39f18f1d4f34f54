"""The audit log: one JSON object a line for every set, and for what became of it.

The file is opened anew for each line, so that `logrotate` may move it, and starts again beside a
copy (`.1`) at 64 MiB, so that no user can fill the disk.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from kilter.core.errors import FileError
from kilter.core.files import flaw_of

FULL_BYTES = 64 * 2**20


class Audit:
    """Constructing one touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **what: Any) -> None:
        """Add a line. Raises `FileError`: what cannot be written down is not done."""
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        line = msgspec.json.encode({"time": now, "event": event, **what}) + b"\n"
        try:
            self._append(line)
        except OSError as error:
            raise FileError(f"{self.path}: no audit log ({error.strerror})") from error

    def note(self, event: str, **what: Any) -> None:
        """Add a line if that is possible: nothing is left unrestored for want of a log."""
        try:
            self.write(event, **what)
        except FileError as error:
            with suppress(OSError):
                print(f"kilter daemon: {error}: {event} {what}", file=sys.stderr, flush=True)

    def _append(self, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.path, flags, 0o640)
        try:
            status = os.fstat(handle)
            flaw = flaw_of(status, owners={os.geteuid()})
            if flaw is not None:
                raise FileError(f"{self.path}: {flaw}; no audit log")
            if os.write(handle, line) != len(line):
                raise OSError(28, os.strerror(28))
        finally:
            os.close(handle)
        if status.st_size > FULL_BYTES:
            os.replace(self.path, f"{self.path}.1")
