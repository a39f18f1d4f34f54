"""Keeps the device behind the host while a pass is watched.

The host is slow then, and where the device has to wait for it, the wait would count as time of an
operation. So the device pauses before it has caught up: what is issued during a pause runs back to
back after it. That takes about as long as the host needs for the pass, however many events it has.
"""

from __future__ import annotations

import time

from kilter.memory.engine.backend import Backend

PAUSE_S = 1e-2
"""The device pauses so long at a time."""
SPARE_S = 3e-3
"""It pauses again if it might have caught up before the host has issued so much more. Pauses are
counted in cycles (`Cuda.keep_busy`): a card with a faster clock than assumed has less to spare."""


class HeadStart:
    """Of the host over the device, in one pass."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._paused_until_s = 0.0
        """The device has not come further than its last pause before this time."""

    def renew(self) -> None:
        """To be called where a pause counts as time of no operation."""
        now_s = time.perf_counter()
        if now_s > self._paused_until_s - SPARE_S:
            self._backend.keep_busy(PAUSE_S)
            self._paused_until_s = now_s + PAUSE_S
