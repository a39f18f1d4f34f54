"""Python's garbage collector, held back while a pass is under way.

Forward leaves thousands of small objects with autograd, and backward takes them all away again. To
the collector, which goes by how many more objects there are than before, that looks like garbage
piling up: it ran a dozen times in every planned forward, and once in about ten iterations through
all that the process has (115 ms beside an iteration of 250). Nothing of it can be garbage yet. In
passes that are watched it would also count as time of operations, and always of the same ones.
"""

from __future__ import annotations

import gc


class Collector:
    """Off between `hold` and `let_go`, unless the program has switched it off itself."""

    def __init__(self) -> None:
        self._held = False

    def hold(self) -> None:
        if not self._held and gc.isenabled():
            gc.disable()
            self._held = True

    def let_go(self) -> None:
        if self._held:
            self._held = False
            gc.enable()
