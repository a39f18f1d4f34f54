"""Keeps Python's garbage collector from running while a pass is under way.

Forward leaves thousands of small objects with autograd, and backward takes them all away again. To
the collector, which counts how many more objects there are than before, that looks like growing
garbage: it ran a dozen times in every planned forward, and once in about ten iterations through
all that the process has (115 ms beside an iteration of 250). Nothing of it can be garbage yet. In
passes that are watched it would also count as time of operations, and always of the same ones. And
it ran while plans are made as a pass begins, which makes many objects: a sixth of that time.
"""

from __future__ import annotations

import gc

NEVER = 2**31 - 1
"""So many new objects are made before a collection, while it is held back. `gc.disable()` is not
used: the program may call that, or `gc.enable()`, or ask for the state, at any moment."""


class Collector:
    """Held back between `hold` and `let_go`. A threshold that the program sets meanwhile stays."""

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None

    def hold(self) -> None:
        before = gc.get_threshold()
        if before[0] not in (0, NEVER):
            self._before = before
            gc.set_threshold(NEVER, *before[1:])

    def let_go(self) -> None:
        before, self._before = self._before, None
        if before is not None and gc.get_threshold()[0] == NEVER:
            gc.set_threshold(*before)
