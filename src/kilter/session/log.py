"""What a run records and says: one door to the event file and to the listener."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kilter.controller import Hurried
from kilter.core.events import AnyEvent, Refused
from kilter.session.listener import RunListener
from kilter.session.recorder import Recorder


@dataclass(slots=True)
class Ending:
    """How far the end of a run has come; shared by the thread that ends it and the program's."""

    hurry: threading.Event = field(default_factory=threading.Event)
    """The program, or its user, waits no longer for what comes after the script."""
    rehearses: bool = False
    """A rehearsal is under way, so that a Ctrl-C is meant for it."""
    by_s: float = float("inf")
    """When `time.monotonic()` is later, kilter waits for no other rank and no thread."""


class RunLog:
    """The events of one run, and the notices that its user reads. May be used from any thread."""

    def __init__(
        self,
        recorder: Recorder,
        listener: RunListener,
        ending: Ending,
        *,
        began_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recorder = recorder
        self.rehearsed_iterations = 0
        """So many iterations were simulated after the script."""
        self._listener = listener
        self._ending = ending
        self._began_s = began_s
        self._clock = clock

    def __call__(self, event: AnyEvent) -> None:
        self.recorder(event)

    def now_s(self) -> float:
        """Seconds since the run began: the time of every event."""
        return self._clock() - self._began_s

    def refuse(self, subject: str, reason: str, code: str | None = None) -> None:
        """Something that the user asked for is not done; the summary says so."""
        self.recorder(Refused(t_s=self.now_s(), what=subject, reason=reason, code=code))

    def notice(self, text: str) -> None:
        """The user can mend this at once, or has to expect it from here on."""
        self._listener.noticed(text)

    def rehearsal_begins(self) -> None:
        """From here on Ctrl-C ends the rehearsal, and nothing else."""
        self._ending.rehearses = True

    def rehearsing(self, seconds: float) -> None:
        """Simulated seconds so far. Raises `Hurried` where the user does not wait for the rest."""
        if self._ending.hurry.is_set():
            raise Hurried
        self._listener.rehearsing(seconds)

    def rehearsal_ended(self) -> None:
        self._ending.rehearses = False
        self._listener.rehearsing(None)
