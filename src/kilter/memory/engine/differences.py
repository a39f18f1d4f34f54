"""Passes that differ from what their plan expects: some leave out layers at random, others save
tensors of other sizes, such as those of the objects that were found in an image.

Where many kinds of passes begin alike, each may be another one. The plan of one with more events
serves those that lack some of them: they save less at each event. Layers that are alike cannot be
told apart by their events, so it is the last of them that is found missing. Where a tensor is saved
that the plan does not expect, the pass goes on at the next event at which the same module saves as
much, or one of a layer that is alike. If there is none, it goes on at the next event of the same
module, before those of modules inside: the tensor has another size. In backward the pass goes on at
the use of the tensor, unless the plan has moves for another one whose last use comes before. Other
uses, and tensors that are saved once more, are extra events: nothing is to be done for them. Where
sizes vary, so are new tensors, which were too small to be followed before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from kilter.memory.engine.module_path import ModulePaths
from kilter.memory.engine.pass_record import use_code
from kilter.memory.engine.ready import Ready, ReadyStep
from kilter.memory.engine.store import Saved
from kilter.memory.layer_paths import without_numbers

MOST_EXTRA = 8
"""After so many extra events in a row the pass departs from its plan."""


def code_of_extra(plan: Ready) -> int:
    """Event: a tensor is used that this plan does not know."""
    return use_code(len(plan.events))


class _Paths:
    """At which events of a plan modules save."""

    def __init__(self, plan: Ready) -> None:
        self.events = plan.events
        self.alike: dict[str, list[int]] = {}
        """By the path of a module, those of all that are alike."""
        self.containers = set[str]()
        """Modules inside of these save."""
        for at in range(plan.last_save + 1):
            path = plan.modules[at]
            self.alike.setdefault(without_numbers(path), []).append(at)
            while path := path.rpartition(".")[0]:
                self.containers.add(path)


class Differences:
    """How the present pass differs from its plan so far."""

    def __init__(self) -> None:
        self.may = False
        """It may differ."""
        self.some = False
        """It has left out events of the plan."""
        self._used: set[int] = set()
        """The tensors with these numbers were used in an extra event."""
        self._extra, self._extra_at = 0, -1
        """So many extra events came in a row, before this one of the plan."""
        self.sizes: dict[int, int] = {}
        """The tensors with these numbers have so many bytes, otherwise than planned."""
        self._fitted: list[tuple[Ready, int, int]] = []
        """In these plans the tensor with this number is to have so many bytes in the next pass."""
        self._most_bytes: int | None = None
        """At most so much was in use until the pass began."""
        self._paths = ModulePaths()
        self._of_plan: _Paths | None = None

    def begin(self, *, may: bool, most_bytes: int | None) -> None:
        """A pass begins. So much was in use before at most, if that is known."""
        self.may, self.some, self._extra = may, False, 0
        self._most_bytes = most_bytes
        self._used.clear()
        self.sizes.clear()

    def end(self) -> None:
        """The pass has ended: the next one begins with the sizes of the plan."""
        for plan, number, size_bytes in self._fitted:
            plan.fit(number, size_bytes)
        self._fitted.clear()

    def peak_bytes(self, most_bytes: int | None) -> int | None:
        """Of the pass, which is over, if it had other sizes than planned and took more than all
        before it: `most_bytes`."""
        before_bytes = self._most_bytes
        if not self.sizes or before_bytes is None or most_bytes is None:
            return None
        return most_bytes if most_bytes > before_bytes else None

    def comes(self, step: ReadyStep, size_bytes: int) -> bool:
        """Whether a tensor of this size is saved at this event of the plan."""
        expected = step.expected or 0
        return expected > 0 and size_bytes == self.sizes.get(step.number, expected)

    def takes_size(self, plan: Ready, step: ReadyStep, size_bytes: int) -> bool:
        """A tensor of another size than planned is saved for the first time. `False` if it is to
        stay, since there is no room for it on the host."""
        assert step.expected is not None
        self.sizes[step.number] = size_bytes
        self._fitted.append((plan, step.number, step.expected))
        return plan.fit(step.number, size_bytes)

    def saves_at(
        self,
        plan: Ready,
        event: int,
        size_bytes: int,
        followed: Callable[[int], Saved | None],
    ) -> int | None:
        """The event of the plan, from `event` on, for a new tensor of this size that the present
        module saves; None if there is none. `followed` gives the tensor of this pass with a number
        of the plan."""
        paths, steps = self._paths, plan.steps
        module = paths.present()
        if steps[event].varies and plan.events[event] > 0 and plan.modules[event] == module:
            return event  # the usual case where sizes vary, at no cost
        if self._of_plan is None or self._of_plan.events is not plan.events:
            self._of_plan = _Paths(plan)
        known = self._of_plan.alike.get(without_numbers(module), [])
        rest = [
            at
            for at in known[bisect_left(known, event) :]
            if not (steps[at].followed and followed(steps[at].number))
        ]
        found = [at for at in rest if steps[at].expected == size_bytes and not steps[at].varies]
        until = plan.last_save + 1
        if paths.outermost or module in self._of_plan.containers:
            # What modules inside save is still to come.
            inside = (
                at
                for at in range(event, until)
                if plan.modules[at] != module
                and (paths.outermost or plan.modules[at].startswith(f"{module}."))
            )
            until = next(inside, until)
        resized = [at for at in rest if plan.events[at] > 0 and at < until]
        same = [at for at in (*found, *resized) if plan.modules[at] == module]
        best = next(iter(same or found), event if event in resized else None)
        if best is not None and best != event:
            self.some, self._extra = True, 0
        return best

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

    def takes_extra(self, event: int) -> bool:
        """An extra event comes, before this one of the plan. `False` if there were too many."""
        self._extra = self._extra + 1 if event == self._extra_at else 1
        self._extra_at = event
        return self._extra <= MOST_EXTRA
