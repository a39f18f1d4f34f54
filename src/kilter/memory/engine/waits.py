"""How long the computing stream waits for copies, in the few passes in which that is timed.

Timing costs events around each wait, so other passes do without (`Store.waits` is None).
"""

from __future__ import annotations

from kilter.memory.engine.backend import Backend, CopyEvent

NOISE_S = 2e-5
"""Two marks may be this far apart without a wait in between, where the host issues work late."""


class Waits:
    """The waits of one pass."""

    def __init__(self, backend: Backend) -> None:
        """The pass begins."""
        self._backend = backend
        self._begin = self._end = backend.mark()
        self._marks: list[tuple[int | None, CopyEvent, CopyEvent]] = []

    def wait(self, event: CopyEvent, number: int | None = None) -> None:
        """For the load of this tensor; without one, for a copy to the host."""
        begin = self._backend.mark()
        self._backend.wait(event)
        self._marks.append((number, begin, self._backend.mark()))

    def over(self) -> None:
        """The pass is over, and what the program did after it."""
        self._end = self._backend.mark()

    def took_s(self) -> float:
        """Device time from the beginning of this pass to that of the next one."""
        return self._backend.elapsed_s(self._begin, self._end)

    def read(self) -> dict[int | None, float]:
        """Seconds for each tensor that was loaded, and for all copies to the host together. Blocks
        until the device has come that far."""
        found: dict[int | None, float] = {}
        for number, begin, end in self._marks:
            seconds = self._backend.elapsed_s(begin, end)
            found[number] = found.get(number, 0.0) + (seconds if seconds > NOISE_S else 0.0)
        return found
