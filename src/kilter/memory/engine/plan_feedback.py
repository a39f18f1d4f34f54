"""What passes under plans have shown of them: their peaks, and by how much the next plan of a kind
is to differ from the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilter.memory.engine.ready import Ready

LISTEN_EVERY = 200
"""After so many passes without it, waiting for copies is timed again."""
CHECK_AFTER = 16
"""After so many passes under a plan that holds it is looked whether it still does: what the program
keeps beside the passes may have grown. The next time after twice as many, up to `LISTEN_EVERY`."""
MAX_EXCESSES = 4
"""At most so many plans of one kind are replaced because their measured peak was above the
budget."""
MAX_ANSWERS = 8
"""At most so many plans of one kind are made because its passes waited for copies."""
MAX_SHIFTS = 2
"""In so many plans in a row loads may start earlier: if loads are still late then, the link is too
slow."""


class PassPeaks:
    """The measured peaks of passes."""

    def __init__(self) -> None:
        self.planned_bytes: list[int] = []
        """Those of the first passes under each plan, in order of planning."""
        self.unplanned_bytes = 0
        """The largest one of passes without a plan since the newest plan was made."""
        self.most_bytes = 0
        """The largest one of all passes since the budget is in force."""

    def counted(self, planned: Ready | None, peak_bytes: int) -> None:
        """A pass, under a plan or not, has ended with this peak."""
        self.most_bytes = max(self.most_bytes, peak_bytes)
        if planned is None:
            self.unplanned_bytes = max(self.unplanned_bytes, peak_bytes)
        else:
            planned.use.peak_bytes = max(planned.use.peak_bytes, peak_bytes)


@dataclass(slots=True)
class Corrections:
    """How the plans of one kind of pass have erred."""

    less_bytes: int = 0
    """So much is taken off the budget because passes under a plan measured more than predicted."""
    slow: tuple[float, float] = (1.0, 1.0)
    """How many times as long as by the link's table transfers take, out and back."""
    excesses: int = 0
    """So many plans measured above the budget."""
    shifts: int = 0
    """In so many plans in a row late loads start earlier than in the plan before."""
    answers: int = 0
    """So many plans were made for what passes under the one before had waited for."""

    def exceeded(self, over_bytes: int) -> bool:
        """A pass took so much more than the budget. Whether another plan is to be made; more is
        taken off for it each time, since it errs by another amount."""
        if self.excesses == MAX_EXCESSES:
            return False
        self.excesses += 1
        self.less_bytes += self.excesses * over_bytes
        return True

    def slower(self, out: float, back: float) -> None:
        """Transfers take so many times as long as the last plan has assumed."""
        self.shifts = 0
        self.slow = (self.slow[0] * out, self.slow[1] * back)


@dataclass(slots=True)
class PlanChecks:
    """When it is looked whether a plan still holds."""

    passes: int = 0
    """So many have run under the plan since then."""
    after: int = CHECK_AFTER

    def due(self) -> bool:
        """A pass begins. Gives whether it is time to look."""
        self.passes += 1
        if self.passes < self.after:
            return False
        self.passes, self.after = 0, min(2 * self.after, LISTEN_EVERY)
        return True
