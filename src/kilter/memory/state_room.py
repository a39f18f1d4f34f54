"""How much device memory optimizer state has: as much as is missing for the budget leaves.

It may be missing in forward and backward, or after them: an optimizer's step that updates all
parameters at once takes temporary memory for each. State that leaves is updated in buckets, which
take hardly any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kilter.memory.engine.state import StateMover, StateReport
    from kilter.memory.plan.problem import Problem

SLACK = 0.1
"""More is offloaded than is missing, by this share of it: buckets of state, and weights, are
whole, and levels come out a little different."""
MOST_ROOMS = 2
"""Another room is given at most so many times because the budget was missed, or first guessed."""


def to_offload_bytes(missing_bytes: int, offloaded_bytes: int) -> int:
    """So much more is to be offloaded, beside what is, where so much is missing; less than 0: so
    much may come back. The slack is a share of what leaves, or of what has to stay on the host."""
    stays_bytes = max(0, offloaded_bytes + missing_bytes)
    return missing_bytes + int(SLACK * min(abs(missing_bytes), stays_bytes))


class StateRoom:
    """Each time that memory is missing a little more leaves. A first room that was a guess is set
    right, if need be upwards."""

    def __init__(self) -> None:
        self._given = 0
        """Room was given so many times."""
        self.guessed = False
        """The present room was set before anything was known."""
        self.over_bytes = 0
        """So far above the budget memory was last seen to be in use after backward."""
        self.unmeasured = False
        """Room was given for that, and it has not been measured since."""
        self.for_step = False
        """State has left for what is in use after backward: smaller passes give it no room."""

    def look(self, beside_peak_bytes: int | None, budget_bytes: int) -> None:
        """An iteration has ended in which so much was in use after backward; None: not measured."""
        if beside_peak_bytes is not None:
            self.over_bytes = max(0, beside_peak_bytes - budget_bytes)
            self.unmeasured = False

    def missing_bytes(self, problem: Problem) -> int:
        """So much is missing for the budget, in this pass or after it; less than 0: left."""
        in_pass_bytes = problem.floor_bytes - problem.budget_bytes
        known = self.over_bytes and not self.unmeasured
        return max(in_pass_bytes, self.over_bytes) if known else in_pass_bytes

    def give(self, mover: StateMover, report: StateReport, missing_bytes: int) -> bool:
        """Offload as much state as is missing, or fetch what there is room for. `False` where that
        is the present room, or room was given too often."""
        if self._given >= MOST_ROOMS:
            return False
        self.guessed = False
        total_bytes = report.state_bytes + report.offloaded_bytes
        more_bytes = to_offload_bytes(missing_bytes, report.offloaded_bytes)
        room_bytes = min(total_bytes, max(0, report.state_bytes - more_bytes))
        if room_bytes == (total_bytes if mover.room_bytes is None else mover.room_bytes):
            return False
        self._given += 1
        self.unmeasured = self.over_bytes > 0
        self.for_step |= self.unmeasured
        mover.make_room(room_bytes)
        return True
