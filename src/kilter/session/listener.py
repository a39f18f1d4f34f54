"""The interface through which a session reports a run while it goes on. Only the listener of rank 0
prints anything."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kilter.core.events import Started
from kilter.session.options import Options


class RunListener(Protocol):
    """What a session says to the user."""

    def started(self, started: Started) -> None:
        """The one line at the start."""

    def failed(self, error: str) -> None:
        """An error of kilter, told once, when it happens."""

    def noticed(self, text: str) -> None:
        """Something that the user can mend at once, or has to expect from here on."""

    def rehearsing(self, seconds: float | None) -> None:
        """Progress of a rehearsal after the script: simulated seconds; None when it is over."""

    def ended(self, run: Path, options: Options, *, keep: bool) -> None:
        """The summary; writes the report, unless the run is not worth keeping."""


class SilentListener:
    def started(self, started: Started) -> None: ...
    def failed(self, error: str) -> None: ...
    def noticed(self, text: str) -> None: ...
    def rehearsing(self, seconds: float | None) -> None: ...
    def ended(self, run: Path, options: Options, *, keep: bool) -> None: ...
