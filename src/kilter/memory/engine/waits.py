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
        self._backend = backend
        self._marks: list[tuple[int | None, CopyEvent, CopyEvent]] = []

    def wait(self, event: CopyEvent, number: int | None = None) -> None:
        """For the load of this tensor; without one, for a copy to the host."""
        begin = self._backend.mark()
        self._backend.wait(event)
        self._marks.append((number, begin, self._backend.mark()))

    def read(self) -> dict[int | None, float]:
        """Seconds for each tensor that was loaded, and for all copies to the host together. Blocks
        until the device has come that far."""
        found: dict[int | None, float] = {}
        for number, begin, end in self._marks:
            seconds = self._backend.elapsed_s(begin, end)
            found[number] = found.get(number, 0.0) + (seconds if seconds > NOISE_S else 0.0)
        return found
