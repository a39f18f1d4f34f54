"""Keeps the device behind the host while a pass is watched.

The host is slow then, and where the device has to wait for it, the wait would count as time of an
operation. So the device pauses before it has caught up: what is issued during a pause runs back to
back after it. That takes about as long as the host needs for the pass, or as the device does for
what is tried in it, whichever is more.
"""

from __future__ import annotations

from kilter.memory.engine.backend import Backend, CopyEvent

PAUSE_S = 1e-2
"""The device pauses so long at a time. It pauses again once it has come to the middle of the last
pause; the host has the other half to issue something more. Pauses are counted in cycles
(`Cuda.keep_busy`): a card with a faster clock than assumed has less to spare."""


class HeadStart:
    """Of the host over the device, in one pass."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._middle: CopyEvent = None
        """Of the last pause; None: there was none."""

    def renew(self) -> None:
        """To be called where a pause counts as time of no operation."""
        if self._middle is None or self._backend.reached(self._middle):
            self._backend.keep_busy(PAUSE_S / 2)
            self._middle = self._backend.mark()
            self._backend.keep_busy(PAUSE_S / 2)
