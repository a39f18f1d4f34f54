"""One training of a framework under `kilter.govern`: what the callbacks of all frameworks share.

Behind the fence: whatever fails of ours, or of a logger that is given our rows, is reported once on
stderr, and the training goes on.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec

import kilter
from kilter.core.codec import read
from kilter.core.errors import FileError
from kilter.core.ranks import ranks
from kilter.session.fence import Fence
from kilter.session.lifecycle import Session


class TrainingLeft(Exception):
    """The training was left by an exception that its framework does not tell callbacks of."""


class Governing:
    """`begin`, `mark` after each optimizer step, `end`; any number of trainings in turn. The
    options are those of `kilter.govern`; a wrong one raises where the callback is made."""

    _open: ClassVar[Governing | None] = None
    """One such object at most governs a process."""

    def __init__(self, options: dict[str, Any]) -> None:
        kilter.govern(**options)
        self._options = options
        self._context: AbstractContextManager[Session] | None = None
        self._session: Session | None = None
        self._fence = Fence(_say)

    def begin(self) -> None:
        """The training is about to begin. One that was left by an exception is ended first."""
        if Governing._open is not None:
            Governing._open._leave()
        self.hand(self._begin)

    def _begin(self) -> None:
        context = kilter.govern(**self._options)
        self._session = context.__enter__()
        self._context = context
        Governing._open = self
        # A framework without a callback for errors leaves the end to the end of the process.
        atexit.register(self._leave)

    def mark(self) -> None:
        """An iteration ends here."""
        if self._session is not None:
            self._session.mark()

    def end(self, error: BaseException | None = None) -> dict[str, float]:
        """The training is over: restore, report. Returns the rows of the summary, on rank 0; none
        if nothing was governed. Twice is once."""
        context, session = self._context, self._session
        self._context = self._session = None
        if context is None or session is None:
            return {}
        Governing._open = None
        atexit.unregister(self._leave)
        self.hand(_close, context, error)
        if session.run is None or ranks(os.environ).rank != 0:
            return {}
        found = self._fence.ask(rows, session.run)
        return found[0] if found else {}

    def hand(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call what may fail, a logger for example, on behalf of the training."""
        self._fence.run(function, *args, **kwargs)

    def _leave(self) -> None:
        error = getattr(sys, "last_value", None)
        self.end(error or TrainingLeft())
        if type(error) is KeyboardInterrupt:
            _die_of_interrupt()


def _close(context: AbstractContextManager[Session], error: BaseException | None) -> None:
    context.__exit__(None if error is None else type(error), error, None)


def _die_of_interrupt() -> None:
    """After a Ctrl-C that nobody caught, the interpreter dies of SIGINT; it ends with 1 instead if
    source code has run since, as it does when a module with a dataclass is imported. The last that
    ran counts."""
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _say(where: str, error: str) -> None:
    if sys.stderr is not None:
        print(f"kilter: the training goes on without it ({where}): {error}", file=sys.stderr)


_OF_RUN = {
    "saving": "saving",
    "slowdown": "slowdown",
    "default_iteration_s": "baseline.iteration_s",
    "default_energy_j": "baseline.energy_j",
    "governed_iteration_s": "governed.iteration_s",
    "governed_energy_j": "governed.energy_j",
    "run_energy_j": "energy_j",
}
_OF_MEMORY = {
    "memory_budget_bytes": "budget_bytes",
    "memory_default_peak_bytes": "peak_before_bytes",
    "memory_peak_bytes": "peak_bytes",
    "memory_host_bytes": "host_bytes",
}
"""It maps a metric to where `report.json`, and its part `memory`, have the value."""


def rows(run: Path) -> dict[str, float]:
    """The summary of a run as metrics for a logger: what is known of it, with its label in the
    name, since a logger has no other place for it (`kilter/measured/saving`)."""
    try:
        report = msgspec.json.decode(read(run / "report.json"))
    except FileError:
        return {}  # the session has said so
    known: dict[str, float] = {}
    for part, names in ((report, _OF_RUN), (report.get("memory") or {}, _OF_MEMORY)):
        for name, place in names.items():
            value: Any = part
            for key in place.split("."):
                value = value and value.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                known[f"kilter/{part['label']}/{name}"] = float(value)
    return known
