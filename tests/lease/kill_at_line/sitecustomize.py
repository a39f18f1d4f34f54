"""Kills a process (SIGKILL) at the n-th line that it executes of the lease's protocol.

First on `PYTHONPATH`, this is imported by every Python; it acts in a watcher if the environment
asks for it, and in whatever process calls `Lines.start`.
"""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

FILES = ("lease/journal.py", "lease/lease.py", "lease/watcher.py")


class Lines:
    """Counts the lines of functions in `FILES`, in this thread."""

    def __init__(self, at: int, report: Path, before: Callable[[], None] = lambda: None) -> None:
        self._at = at
        self._report = report
        self._before = before
        self._count = 0

    def start(self) -> None:
        sys.settrace(self._enter)

    def stop(self) -> None:
        """Leave the count to whoever wants to kill at each line next time."""
        sys.settrace(None)
        self._report.write_text(f"count {self._count}")

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        return self._line if is_function and code.co_filename.endswith(FILES) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._count += 1
            if self._count == self._at:
                sys.settrace(None)
                self._before()
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                self._report.write_text(f"killed {where}")
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line


if "kilter.lease.watcher" in sys.orig_argv and "KILL_WATCHER_AT" in os.environ:
    _report = Path(os.environ["KILL_WATCHER_REPORT"])
    _lines = Lines(int(os.environ["KILL_WATCHER_AT"]), _report)
    _started_by = os.getpid()
    # Only the process that stays reports its count: not the one that the job waits for.
    atexit.register(lambda: os.getpid() != _started_by and _lines.stop())
    _lines.start()
