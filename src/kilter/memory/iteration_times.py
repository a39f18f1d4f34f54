"""How long iterations take with everything kept, and how long under a memory plan."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence

from kilter.observe.end_times import Iteration

MEASURED = 10
"""Of so many iterations under plans of one sort the median counts."""
FEW, ALIKE = 5, 1.01
"""Of so few if the longest of them takes at most so many times the shortest."""
MIXED = 20
"""The same where shapes keep changing: iterations differ more there, and have mostly no plan."""
PATIENCE = 64
"""They have to be planned and measured within so many iterations."""


class IterationTimes:
    """Durations by what the iteration was. Iterations are noted in the program's thread as they
    end; their durations become known later, in the session's thread."""

    def __init__(self) -> None:
        self.index = -1
        """The last iteration end has this number."""
        self._was_planned = False
        self._durations_s: dict[int, list[deque[float]]] = {}
        """It says, by iteration end, where the duration of the iteration that it ends belongs."""
        self.plain_s: deque[float] = deque(maxlen=64)
        """Iterations with everything kept, and without the engine, took these."""
        self.planned_s: deque[float] = deque(maxlen=512)
        """Iterations that were under a plan from their begin to their end took these."""
        self.others_s: deque[float] = deque(maxlen=512)
        """Iterations since then whose last pass was not under a plan took these."""
        self.mixed_s: deque[float] = deque(maxlen=MIXED)
        """The last iterations took these, under a plan or not, unless their last pass was
        watched."""
        self.counts = {"planned": 0, "others": 0}
        """So many iterations have ended with a pass under a plan of this sort, and without, since
        the first one was timed."""
        self._left = PATIENCE

    def was_plain(self) -> None:
        """The iteration that ends here ran without the engine."""
        self._durations_s[self.index] = [self.plain_s]

    def planned(self, *, now: bool, watched: bool = False) -> None:
        """Whether a plan is in force at this iteration end, and whether the last pass was
        watched."""
        of = self._durations_s.setdefault(self.index, [])
        if now and self._was_planned:
            of.append(self.planned_s)
        elif not now and self.planned_s:
            of.append(self.others_s)
        if not (watched or any(each is self.plain_s for each in of)):
            of.append(self.mixed_s)
        if self.planned_s:
            self.counts["planned" if now else "others"] += 1
        self._was_planned = now

    def begin_plan(self) -> None:
        """Iterations from here on run under plans of another sort: they are timed on their own."""
        self.planned_s, self.others_s = deque(maxlen=512), deque(maxlen=512)
        self.mixed_s = deque(maxlen=MIXED)
        self.counts = dict.fromkeys(self.counts, 0)
        self._was_planned = False
        self._left = PATIENCE

    def measured_s(self) -> float | None:
        """An iteration under these plans takes this in the median; None: not known yet."""
        known_s = list(self.planned_s)
        alike = len(known_s) >= FEW and max(known_s) <= ALIKE * min(known_s)
        return statistics.median(known_s) if alike or len(known_s) >= MEASURED else None

    def mixed_measured_s(self) -> float | None:
        """An iteration takes this in the median, under a plan or not; None: not known yet."""
        return median_s(self.mixed_s) if len(self.mixed_s) >= MIXED else None

    @property
    def usual_s(self) -> float | None:
        """An iteration takes about this, whatever it is; None: none was timed yet."""
        return median_s(self.planned_s or self.mixed_s or self.plain_s)

    def passes_each(self, passes: int) -> float:
        """An iteration has so many passes in the mean, if there were so many in all."""
        return max(1.0, passes / max(1, self.index))

    def in_vain(self) -> bool:
        """After each iteration in which that is waited for: it was waited for long enough."""
        self._left -= 1
        return self._left <= 0

    def add(self, finished: Sequence[Iteration], disturbed: Callable[[Iteration], bool]) -> None:
        """Durations have become known; those of disturbed iterations do not count."""
        for iteration in finished:
            found = self._durations_s.pop(iteration.index, [])
            if found and not disturbed(iteration):
                for durations_s in found:
                    durations_s.append(iteration.duration_s)


def median_s(durations_s: deque[float]) -> float | None:
    """None where there are none. Durations may be added at the same time."""
    known_s = list(durations_s)
    return statistics.median(known_s) if known_s else None
