"""The trace of one iteration, for whoever needs it, and further windows of the profiler for those
who read its file themselves: each is opened only on demand, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kilter.core.script_end import ScriptEnd
from kilter.core.trace import IterationTrace
from kilter.observe.end_times import Iteration
from kilter.observe.iteration_clock import IterationClock
from kilter.observe.profiler_window import Window, WindowState
from kilter.observe.run_files import RunFiles

OPENS_AT = 10
"""The window opens at this iteration end: by then caches and tuners have settled."""
SLOW_ITERATIONS = 3
"""So many iteration ends lead from the one at which the window opens to the last one that is slow
because of it."""
ABANDON_S = 30.0
"""After an error of ours: how long the program may take to reach the point where a profiler that is
on can be switched off."""
LOOK_S = 0.01


class TraceSource:
    """Nothing is recorded before `want` is called. `trace` is None until it has been read."""

    def __init__(
        self,
        iterations: IterationClock,
        files: RunFiles,
        *,
        patient: bool,
        run_fenced: Callable[..., bool],
    ) -> None:
        self._iterations = iterations
        self._files = files
        self._patient = patient
        self._run_fenced = run_fenced
        self._window: Window | None = None
        self._due = False
        """The trace of `_window` has not been read yet."""
        self._observing: Window | None = None
        """It is the last of the further windows."""
        self._failed: str | None = None
        """How the script has ended, where that was early."""
        self.trace: IterationTrace | None = None

    def want(self) -> None:
        """From here on a trace is recorded as soon as that is possible. Twice is once."""
        if self._window is None:
            self._open(OPENS_AT)

    def again(self) -> None:
        """Record another trace, of the next iterations, which takes the place of the present one
        when it has been read."""
        self._open(max(OPENS_AT, self._iterations.index + 2))

    def _open(self, after: int) -> None:
        window = Window(self._iterations, after=after, patient=self._patient, run=self._run_fenced)
        window.start()
        self._window, self._due = window, True

    def observe(self, iterations: int) -> Window | None:
        """A further window with times alone, of so many iterations from the next ones on; None
        while another one is under way. There is no need to close it."""
        if any(window is not None and not window.over for window in self._windows):
            return None
        after = max(OPENS_AT, self._iterations.index + 2)
        self._observing = Window(
            self._iterations, after=after, iterations=iterations, plain=True, run=self._run_fenced
        )
        self._observing.start()
        return self._observing

    @property
    def _windows(self) -> tuple[Window | None, Window | None]:
        return self._window, self._observing

    def iteration_ended(self, index: int) -> None:
        """In the program's thread."""
        for window in self._windows:
            if window is not None:
                window.iteration_ended(index)

    def look(self) -> None:
        """Take the trace if it is there."""
        if self._due and self._window is not None and self._failed is None:
            trace = self._window.trace()
            if trace is not None:
                self.trace, self._due = self._files.save_operations(trace), False

    @property
    def reading(self) -> bool:
        """The trace is recorded and `look` has not read it yet."""
        return self._due and self._window is not None and self._window.state == WindowState.SAVED

    def disturbs(self, iteration: Iteration) -> bool:
        """Whether the profiler was switched on, off or open in this iteration."""
        opened = [window.opened_at for window in self._windows if window is not None]
        return any(0 < at <= iteration.index <= at + SLOW_ITERATIONS for at in opened)

    def script_ended(self, outcome: ScriptEnd) -> None:
        """Whoever reads the traceback of a script that failed does not wait for a trace."""
        if not outcome.finished:
            self._failed = f"the script ended early ({outcome})"
        if self._observing is not None:
            self._observing.abandon("the script has ended")
        if self._window is not None and self._failed is not None:
            self._window.abandon(self._failed)
        elif self._window is not None:
            self._window.close()

    def abandon(self, over: threading.Event) -> None:
        """After an error of ours. A profiler can only be switched off in the thread that it was
        switched on in; left on, it would fill the memory. In a thread of ours: wait until the
        program gets there, or until the script is `over`."""
        by_s = time.monotonic() + ABANDON_S
        for window in self._windows:
            if window is None:
                continue
            if threading.current_thread().name.startswith("kilter"):
                while window.busy and time.monotonic() < by_s and not over.is_set():
                    time.sleep(LOOK_S)
            window.abandon("kilter stepped aside after an error")

    def why_not(self, too_few: Callable[[int], str]) -> str:
        """Why there is no trace; `too_few(n)` says that a script ended before n iterations."""
        if self._window is None:
            return "nothing needed one; --trace records one"
        if self._failed is not None:
            return self._failed
        if self._iterations.index + 1 <= OPENS_AT + SLOW_ITERATIONS:
            return too_few(OPENS_AT + SLOW_ITERATIONS + 1)
        if self.reading:
            return "the trace was not read in time: an iteration has too many operations"
        return self._window.why_not or "the observation gave no trace"
