"""Passes that leave out some of what their plan expects, such as layers that are dropped at random.

Where many kinds of passes begin alike, each may be another one. The plan of one with more events
serves those that lack some of them: they save less at each event. Layers that are alike cannot be
told apart by their events, so it is the last of them that is found missing. Where a tensor is saved
that the plan does not expect, the pass goes on at the next event at which the same module saves as
much. In backward it goes on at the use of the tensor, if all that the plan expects before it was
left out. Of what has no such place the plan does not hear.
"""

from __future__ import annotations

from collections.abc import Callable

from kilter.memory.engine.module_path import ModulePaths
from kilter.memory.engine.pass_record import FOREIGN
from kilter.memory.engine.ready import Ready
from kilter.memory.engine.store import Saved

MOST_BESIDE = 8
"""After so many events in a row of which the plan does not hear, the pass departs from it."""


class LeftOut:
    """What the present pass has left out of its plan so far."""

    def __init__(self) -> None:
        self.may = False
        """It may leave out some events."""
        self.some = False
        """It has."""
        self._gone: set[int] = set()
        """No use is to come of the tensors with these numbers."""
        self._beside = 0
        """So many events in a row had no place in the plan."""

    def begin(self, *, may: bool) -> None:
        """A pass begins."""
        self.may, self.some, self._beside = may, False, 0
        self._gone.clear()

    def saves_at(
        self,
        plan: Ready,
        event: int,
        size_bytes: int,
        saved: Saved | None,
        followed: Callable[[int], Saved | None],
    ) -> int | None:
        """The event of the plan, `event` or behind it, at which a tensor of this size is saved that
        is not expected at `event`; None: there is none. Where the engine follows it already
        (`saved`), nothing has to be done for it, and it is `event`. `followed` gives the tensor of
        this pass with a number of the plan.
        """
        if saved is not None:
            return event if self._one_more() else None
        module = ModulePaths().present()
        for at in range(event + 1, plan.last_save + 1):
            step = plan.steps[at]
            if step.expected != size_bytes or plan.modules[at] != module:
                continue
            if step.followed and followed(step.number) is not None:
                continue
            missed = (each for each in range(event, at) if plan.events[each] > 0)
            self._gone.update(plan.steps[each].number for each in missed)
            self.some, self._beside = True, 0
            return at
        return None

    def uses_at(self, plan: Ready, event: int, code: int) -> int | None:
        """The same for a tensor that backward uses (`use_code`)."""
        if not self.may or code == FOREIGN:
            return None
        for at in range(event, len(plan.events)):
            if plan.events[at] == code:
                self.some, self._beside = True, 0
                return at
            if plan.steps[at].number not in self._gone:
                break
        self._gone.add((-1 - code) // 2)
        return event if self._one_more() else None

    def _one_more(self) -> bool:
        self._beside += 1
        return self._beside <= MOST_BESIDE
