"""How much device memory optimizer state has: as much as is missing for the budget leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kilter.memory.engine.state import StateMover, StateReport

SLACK = 0.1
"""More is offloaded than is missing, by this share of it: buckets of state, and weights, are
whole."""
MOST_ROOMS = 2
"""Another room is given at most so many times because the budget was missed, or first guessed."""


class StateRoom:
    """Each time that memory is missing a little more leaves. A first room that was a guess is set
    right, if need be upwards."""

    def __init__(self) -> None:
        self._given = 0
        """Room was given so many times."""
        self.guessed = False
        """The present room was set before anything was known."""

    def give(self, mover: StateMover, report: StateReport, missing_bytes: int) -> bool:
        """Offload as much state as is missing, or fetch what there is room for. `False` where that
        is the present room, or room was given too often."""
        if self._given >= MOST_ROOMS:
            return False
        self.guessed = False
        total_bytes = report.state_bytes + report.offloaded_bytes
        more_bytes = int(missing_bytes + SLACK * abs(missing_bytes))
        room_bytes = min(total_bytes, max(0, report.state_bytes - more_bytes))
        if room_bytes == (total_bytes if mover.room_bytes is None else mover.room_bytes):
            return False
        self._given += 1
        mover.make_room(room_bytes)
        return True
