"""Passes as sequences of ticks, by which weights are moved: a module has run, a gradient
arrived."""

from __future__ import annotations

from collections.abc import Callable

from kilter.memory.engine.backend import CopyEvent

Tick = tuple[str, int, int]
"""What happened (a module ran or a gradient arrived), the identity of the module or parameter, and
the how-many-th time in the pass."""


class WeightPass:
    """The ticks of the present pass, in order."""

    def __init__(self) -> None:
        self.number = 0
        """So many passes have begun so far; 0: none."""
        self.steps = 0
        """So many steps of optimizers have ended so far."""
        self._steps_before = -1
        """So many had ended when the pass began."""
        self.ticks: list[Tick] = []
        self.marks: list[CopyEvent] = []
        """These are the moments of the ticks, while they are timed."""
        self.turn: int | None = None
        """It is its first tick of backward."""
        self.timed = True
        self._runs: dict[int, int] = {}

    @property
    def ended(self) -> bool:
        """A module that runs now belongs to another pass: backward or a step came after forward."""
        return self.turn is not None or self.steps != self._steps_before

    def begin(self, *, timed: bool) -> None:
        """The first module of a forward has run."""
        self.number += 1
        self._steps_before = self.steps
        self.ticks, self.marks, self.turn = [], [], None
        self.timed = timed
        self._runs.clear()

    def add(self, what: str, key: int, mark: Callable[[], CopyEvent]) -> Tick:
        """One more tick, of the module or parameter with this identity."""
        run = self._runs[key] = self._runs.get(key, 0) + 1
        tick = (what, key, run)
        self.ticks.append(tick)
        if self.timed:
            self.marks.append(mark())
        return tick
