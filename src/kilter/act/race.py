"""Ways to run one job, each for some iterations; the fastest stays.

What a plan costs the host, no plan knows: that can only be measured.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kilter.plan.swap.mix import EACH_S

if TYPE_CHECKING:
    from kilter.plan.swap.joint import Joint

JUDGED = 6
"""Iterations by whose median a way is judged."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a pass may run within its budget."""

    joint: Joint | None = None
    """By which optimizer state streams; None: it stays as it is."""
    each_s: float = EACH_S
    """What plans count for each thing that the host has to have made again."""


class Race:
    """Times iterations, and says which way is next."""

    def __init__(self) -> None:
        self.now = Way()
        self.running = False
        self.results: list[tuple[float, Way]] = []
        """Median of an iteration, for each way that was judged."""
        self._ways: deque[Way] = deque()
        self._last_s: float | None = None
        """The last border, if the iteration before it counts."""
        self._times_s: list[float] = []

    def border(self, now_s: float, *, counts: bool) -> None:
        """An iteration has ended; it counts if it ran under a plan whose peak is known to hold."""
        if counts and self._last_s is not None:
            self._times_s.append(now_s - self._last_s)
        self._last_s = now_s if counts else None

    @property
    def timed(self) -> bool:
        """The present way can be judged."""
        return len(self._times_s) >= JUDGED

    def restart(self) -> None:
        """What was timed so far was another way to run."""
        self._last_s = None
        self._times_s.clear()

    def start(self, *ways: Way) -> Way:
        """These against the present one, if that was timed; the first of them."""
        self.running = True
        self._ways.extend(ways)
        if self._times_s:
            return self.turn()
        self.now = self._ways.popleft()
        return self.now

    def turn(self) -> Way:
        """The present way was timed, or is not going to be: the one to go on with. If that was the
        last one, the race is over."""
        median_s = statistics.median(self._times_s) if self._times_s else float("inf")
        self.results.append((median_s, self.now))
        self.restart()
        if self._ways:
            self.now = self._ways.popleft()
        else:
            self.running = False
            self.now = min(self.results, key=lambda result: result[0])[1]
        return self.now
