"""How many saved storages there are, and how many bytes they hold: the one place where both are
counted, also by the compiled library (`hold` of position.h).
"""

from __future__ import annotations

from collections.abc import Callable


class SavedBytes:
    """Of all passes, but for the two peaks."""

    def __init__(self, tell: Callable[[int], None] | None) -> None:
        """`tell` hears of each change of what is held on the device."""
        self._tell = tell
        self.alive = 0
        """Autograd may still ask for so many saved storages."""
        self.evicted = 0
        """So many of them are not resident."""
        self.evicted_bytes = 0
        self.held_bytes = 0
        self.beside_bytes = 0
        """Saved tensors that the engine does not follow hold this as well."""
        self.held_peak_bytes = 0
        self.segment_peak_bytes = 0
        self.out_bytes = 0
        self.in_bytes = 0
        self.recomputed = 0

    @property
    def followed_bytes(self) -> int:
        """What is held, and what has left."""
        return self.held_bytes + self.evicted_bytes

    @property
    def on_device_bytes(self) -> int:
        """What all saved tensors hold, followed or not."""
        return self.held_bytes + self.beside_bytes

    def begin_pass(self) -> None:
        self.beside_bytes = 0
        self.held_peak_bytes = self.segment_peak_bytes = self.held_bytes

    def hold(self, change_bytes: int) -> None:
        self.held_bytes += change_bytes
        held_bytes = self.on_device_bytes
        if held_bytes > self.segment_peak_bytes:
            self.segment_peak_bytes = held_bytes
            if held_bytes > self.held_peak_bytes:
                self.held_peak_bytes = held_bytes
        if self._tell is not None:
            self._tell(held_bytes)
