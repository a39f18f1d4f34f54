"""How often something that goes on for as long as a run is worth a line in its record.

The interval grows with the age of the run, so that the record, and the time and memory that it
takes to read it, grow with the logarithm of the run's length: after thirty days there are a dozen
times the lines of the first quarter of an hour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LINES = 1000
"""Before anything is left out, and again whenever the run is e times as old."""


@dataclass(slots=True)
class Pace:
    """One kind of line. `least_s`: the interval in a young run."""

    least_s: float = 0.0
    _last_s: float = -math.inf

    def due(self, now_s: float) -> bool:
        """Whether to write one at `now_s` (seconds since the run began); then it counts as done."""
        if now_s - self._last_s < max(self.least_s, now_s / LINES):
            return False
        self._last_s = now_s
        return True
