"""Which of two ways to recompute is faster, by what iterations took in turns of the two.

A machine that others use as well is slower for minutes now and then, so checkpointing has its turn
between two of single operations, and again until it differs from them by more than they do from
each other. Calls have one turn beside single operations, since their plans take long to make.
"""

from __future__ import annotations

from kilter.core.units import show_time
from kilter.memory.kept_recompute import RecomputeWay

TURNS = 3
"""The model's own checkpointing has at most so many turns."""
FASTER = 0.98
"""Another way stays where an iteration takes at most this share of the time."""


class WayComparison:
    """Turns of `base` and of `other`, `base` first."""

    def __init__(self) -> None:
        self.base = RecomputeWay.OPERATIONS
        self.other: RecomputeWay | None = None
        """It is None until the job was looked at."""
        self.on_demand = False
        """Shapes keep changing: where nothing is checkpointed and there is no plan, tensors are
        offloaded on demand."""
        self._turns_s: list[float] = []
        """An iteration takes so many seconds in each turn of the two."""
        self.measured_s: dict[RecomputeWay, float] = {}
        """What came of that, in the present comparison and those before."""

    @property
    def begun(self) -> bool:
        """A turn was measured."""
        return bool(self._turns_s)

    def add(self, turn_s: float | None) -> bool:
        """An iteration of the turn took this; None: it was not measured. Whether it is clear now
        what iterations take in either way; then `base` is the way that stays of the two."""
        if turn_s is not None:
            self._turns_s.append(turn_s)
        found, other = self._compared(), self.other
        self.measured_s |= found
        if other in found and found[other] <= FASTER * found[self.base]:
            self.base = other
        return bool(found)

    def go_on_with(self, other: RecomputeWay) -> None:
        """Compare another way with the one that stays."""
        self.other = other
        self._turns_s = [self.measured_s[self.base]]

    @property
    def words(self) -> str:
        """What was measured; empty: nothing."""
        names = {way: way.value for way in RecomputeWay}
        if self.on_demand:
            names[RecomputeWay.OPERATIONS] = "tensors recomputed by plans or offloaded on demand"
        each = [f"{show_time(time_s)} with {names[way]}" for way, time_s in self.measured_s.items()]
        measured = ", ".join(each).replace(" with", " an iteration with", 1)
        return f"{measured} [measured]" if each else ""

    def _compared(self) -> dict[RecomputeWay, float]:
        """What an iteration takes in either way; empty if that is not clear yet."""
        turns_s, other = self._turns_s, self.other
        if other is None or len(turns_s) < 2:
            return {}
        if {other, self.base} == {RecomputeWay.CALLS, RecomputeWay.OPERATIONS}:
            return {other: turns_s[1], self.base: turns_s[0]}
        between = [turns_s[i - 1 : i + 2] for i in range(1, len(turns_s) - 1, 2)]
        if len(turns_s) % 2 == 0:
            return {}
        before_s, other_s, after_s = min(between, key=lambda turns_s: _drift(*turns_s[::2]))
        base_s = (before_s + after_s) / 2
        clear = _drift(base_s, other_s) > _drift(before_s, after_s)
        if not clear and len(between) < TURNS:
            return {}
        return {other: other_s, self.base: base_s}


def _drift(a_s: float, b_s: float) -> float:
    """How many times the shorter the longer is."""
    return max(a_s, b_s) / min(a_s, b_s)
