"""A device under a lease that goes to its lowest clock in long pauses of a job (`plan/pauses`): an
evaluation on the CPU, a checkpoint, a data loader that hangs.

    conductor -> apply -> PausingActuator -> lease      (in a pause: once the clock is back)
    our thread -> look -------^

Each rank looks at its own GPU, in the session's thread; a GPU that waits inside of a collective is
busy. Ranks keep pace, so an iteration of the job loses what its slowest rank loses. Each rank tells
it with the result of its next block, rank 0 keeps the account, and the next order says how much
is left: pauses need no message of their own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from kilter.clocks.actuator import DeviceActuator, Paced, Sensors
from kilter.clocks.plan.pauses import PausePlan, PauseWatch, slack, time_budget
from kilter.core.setting import DeviceInfo, Sample, Setting
from kilter.lease.lease import Lease

BLIND_S = 1.0
BLIND_PERIODS = 10
"""Sensors without a reading for the longer of the two cannot show the end of a pause."""
REMEMBERED = 16
"""So many pauses are kept; a block is judged before there are more."""


class PausingActuator(DeviceActuator):
    """As `DeviceActuator`, with pauses once `govern` has been called."""

    def __init__(
        self,
        sampler: Sensors,
        info: DeviceInfo,
        marks: Paced,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(sampler, info, marks, clock=clock)
        self.watch: PauseWatch | None = None
        self._wanted = Setting()
        """What the conductor has asked for last."""
        self._seen: tuple[Sample | None, int] = (None, -1)
        """The reading and the iteration are those that were looked at last."""
        self._down: tuple[float, int] = (0.0, -1)
        """When the clock went down, and in which iteration."""
        self._low: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        """It says from when until when the clock was not what the conductor had asked for."""
        self._lost: dict[int, float] = {}

    def govern(self, lease: Lease, plan: PausePlan | None) -> None:
        """Set from now on; `plan` is None for a device without a clock to lower."""
        self.lease = lease
        self.watch = None if plan is None else PauseWatch(plan)

    def apply(self, setting: Setting) -> None:
        self._wanted = setting
        if not self._lowered:
            super().apply(setting)

    def settled(self) -> bool:
        return super().settled() and not self._lowered

    @property
    def _lowered(self) -> bool:
        """The end of a lease, for any reason, is the end of a pause, too."""
        held = self.lease is not None and self.lease.outcome is None
        return held and self.watch is not None and self.watch.lowered

    def look(self, index: int) -> None:
        """A few times a second, whether iterations end or not: lower the clock, or raise it.
        `index` is that of the last iteration. Raises the lease's errors."""
        watch, sample = self.watch, self._sampler.record.latest
        if watch is None or sample is None:
            return
        if watch.lowered:
            self.check()
        # an iteration that ends is work, which short kernels may hide from the sensors
        busy = index != self._seen[1] or (watch.lowered and self._blind(sample))
        if sample is self._seen[0] and not (busy and watch.lowered):
            return
        self._seen = (sample, index)
        returns = len(watch.returns_s)
        act = watch.read(sample, busy=busy, asked_hz=self._wanted.sm_clock_hz)
        if act == "down":
            self._down = (sample.t_s, index)
            super().apply(self._wanted.with_(sm_clock_hz=watch.plan.sm_clock_hz))
        elif act == "up":
            super().apply(self._wanted)
        if len(watch.returns_s) > returns:
            began_s, paused = self._down
            self._low.append((began_s, sample.t_s))
            self._lost[paused] = self._lost.get(paused, 0.0) + watch.returns_s[-1]

    def _blind(self, sample: Sample) -> bool:
        long_s = max(BLIND_S, BLIND_PERIODS * self._sampler.record.period_s)
        return self._clock() - sample.t_s > long_s

    # For the conductor ----------------------------------------------------------------------

    def allow(self, seconds: float) -> None:
        """Returns may lose so much until this is called again."""
        if self.watch is not None:
            self.watch.budget.grant(seconds)

    def take_lost(self) -> dict[int, float]:
        """Seconds that iterations have lost, by number, since the last call."""
        lost, self._lost = self._lost, {}
        return lost

    def touched(self, begin_s: float, end_s: float) -> bool:
        """Whether the clock was low for a pause at any time of this stretch."""
        if self._lowered and self._down[0] < end_s:
            return True
        return any(low_s < end_s and begin_s < back_s for low_s, back_s in self._low)


class PauseAccount:
    """Rank 0's: what the returns of all ranks may lose. `time_ratio` is that of what stands."""

    def __init__(
        self, plan: PausePlan, max_slowdown: float, time_ratio: Callable[[], float]
    ) -> None:
        self._budget = time_budget(plan)
        self._max_slowdown = max_slowdown
        self._time_ratio = time_ratio

    def left_s(self, now_s: float, lost: Mapping[int, float]) -> float:
        """After another block, in which iterations have lost so much by number."""
        self._budget.fill(now_s, slack(self._max_slowdown, self._time_ratio()))
        self._budget.pay(sum(lost.values()))
        return max(0.0, self._budget.left_s)
