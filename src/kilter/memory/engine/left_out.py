"""Passes that leave out some of what their plan expects, such as layers that are dropped at random.

Where many kinds of passes begin alike, each may be another one. The plan of one with more events
serves those that lack some of them: they save less at each event. Layers that are alike cannot be
told apart by their events, so it is the last of them that is found missing. Where a tensor is saved
that the plan does not expect, the pass goes on at the next event at which the same module saves as
much, or one of a layer that is alike. In backward it goes on at the use of the tensor, unless the
plan has moves for another one whose last use comes before. Other uses, and tensors that are saved
once more, are extra events: nothing is to be done for them.
"""

from __future__ import annotations

from collections.abc import Callable

from kilter.memory.engine.module_path import ModulePaths
from kilter.memory.engine.ready import Ready
from kilter.memory.engine.store import Saved
from kilter.memory.layer_paths import without_numbers

MOST_EXTRA = 8
"""After so many extra events in a row the pass departs from its plan."""


class LeftOut:
    """What the present pass has left out of its plan so far."""

    def __init__(self) -> None:
        self.may = False
        """It may leave out some events."""
        self.some = False
        """It has."""
        self._used: set[int] = set()
        """The tensors with these numbers were used in an extra event."""
        self._extra = 0
        """So many extra events came in a row."""

    def begin(self, *, may: bool) -> None:
        """A pass begins."""
        self.may, self.some, self._extra = may, False, 0
        self._used.clear()

    def saves_at(
        self,
        plan: Ready,
        event: int,
        size_bytes: int,
        followed: Callable[[int], Saved | None],
    ) -> int | None:
        """The event of the plan, behind `event`, at which the present module saves a new tensor of
        this size, or else one of a layer that is alike; None if there is none. `followed` gives the
        tensor of this pass with a number of the plan."""
        module = ModulePaths().present()
        alike = without_numbers(module)
        found = [
            at
            for at in range(event + 1, plan.last_save + 1)
            if plan.steps[at].expected == size_bytes
            and without_numbers(plan.modules[at]) == alike
            and not (plan.steps[at].followed and followed(plan.steps[at].number))
        ]
        if not found:
            return None
        self.some, self._extra = True, 0
        return next((at for at in found if plan.modules[at] == module), found[0])

    def uses_at(
        self, plan: Ready, event: int, code: int, followed: Callable[[int], Saved | None]
    ) -> int | None:
        """The event of the plan, behind `event`, at which backward uses this tensor (`use_code`);
        None if there is none, or others are expected before. `followed`: as above, and not freed
        by autograd yet."""
        others = set[int]()
        for at in range(event, len(plan.events)):
            if plan.events[at] == code:
                if not others.issubset(plan.events[at:]):
                    break
                self.some, self._extra = True, 0
                return at
            number = plan.steps[at].number
            if number not in self._used and followed(number) is not None:
                others.add(plan.events[at])
        self._used.add((-1 - code) // 2)
        return None

    def takes_extra(self) -> bool:
        """An extra event comes. `False` if there were too many."""
        self._extra += 1
        return self._extra <= MOST_EXTRA
