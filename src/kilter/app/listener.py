"""What a session says to the user: one line at the start, one summary at the end, on stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kilter.app.report.words import ascii_line, start_line
from kilter.core.codec import write_atomically
from kilter.core.events import Started
from kilter.core.own_file import identity
from kilter.session.options import Options

if TYPE_CHECKING:
    from kilter.app.factors import Factors
    from kilter.app.report.build import Report

PROGRESS_EVERY_S = 1.0
_STDERR = 2


class StderrListener:
    """What `kilter run` and `kilter.govern` say. stdout belongs to the script."""

    def __init__(self, factors: Factors | None = None) -> None:
        self._factors = factors
        self._descriptor = identity(_STDERR)
        self._said_s = 0.0
        self._progressed = False
        self.why_not_kept = "kilter did not come to the end of the run"
        """Why it is not known that the job kept its memory budget; empty: it did."""

    def started(self, started: Started) -> None:
        self._say(start_line(started))

    def failed(self, error: str) -> None:
        self._say(f"kilter: stepped aside after an error of its own, not the script's: {error}")

    def noticed(self, text: str) -> None:
        self._say(f"kilter: {ascii_line(text)}")

    def rehearsing(self, seconds: float | None) -> None:
        """A line that overwrites itself, on a terminal only."""
        if not self._open or not sys.stderr.isatty():
            return
        if seconds is None:
            if self._progressed:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._said_s > PROGRESS_EVERY_S:
            self._said_s, self._progressed = time.monotonic(), True
            text = (
                "kilter: the script has ended; rehearsing its iteration "
                f"({seconds:.0f} simulated seconds; Ctrl-C ends this)"
            )
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    def ended(self, run: Path, options: Options, *, keep: bool) -> None:
        from kilter.app.report import build as report
        from kilter.app.report import summary

        found = report.build(run, self._factors)
        memory = found.memory
        self.why_not_kept = "memory was left alone" if memory is None else memory.why_not_kept
        if keep:
            self._write(found, run)
        if options.json_summary:
            self._say(report.to_json(found).decode().rstrip())
        else:
            self._say(summary.summary(found, run if keep else None))

    def not_kept(self, options: Options) -> None:
        """Why the exit code is not the script's own. (JSON is one line, and has the peaks.)"""
        if not options.json_summary:
            self._say(f"kilter: --strict: {self.why_not_kept}; exit code 1")

    def _write(self, found: Report, run: Path) -> None:
        from kilter.app.report import build as report
        from kilter.app.report import html
        from kilter.app.report.memory import chrome_of

        write_atomically(run / "report.json", report.to_json(found))
        pass_ = html.write(found, run, run / "report.html")
        if pass_ is not None:
            chrome = msgspec.json.encode(chrome_of(pass_.problem, pass_.schedule))
            write_atomically(run / "memory.chrome.json", chrome)

    def _say(self, text: str) -> None:
        """A closed stderr (a daemon, a broken pipe) is no reason to fail."""
        try:
            if self._open:
                print(text, file=sys.stderr, flush=True)
        except (OSError, ValueError):
            return

    @property
    def _open(self) -> bool:
        """There is a stderr, and behind its descriptor is what was there when we began: not a file
        that the program has opened since it closed its stderr."""
        if sys.stderr is None:  # closed by `2>&-`; `print` would take stdout instead
            return False
        try:
            number = sys.stderr.fileno()
        except (AttributeError, OSError, ValueError):  # a notebook's, or one that is closed
            return True
        return number != _STDERR or identity(_STDERR) == self._descriptor
