"""When an idle GPU goes to its lowest clock, and when it comes back: pauses between the iterations
of a job (an evaluation on the CPU, a data loader that hangs). Pure.

A pause is long once the GPU has had nothing to do for `after_s`. Then the clock goes down, unless
the GPU has lowered it by itself, and comes back with the first reading that shows work. What that
costs is measured each time: from the last idle reading until the clock is seen to be back the job
may have run at the low clock, and at worst all of it has followed the clock. So much time is paid
from a budget of the contract (as for waits inside an iteration, `plan/waits`). If the returns cost
more than there is, the clock is left alone from then on.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from enum import Enum
from typing import Literal

import msgspec

from kilter.clocks.plan.time_budget import TimeBudget
from kilter.core.setting import Sample, Supported
from kilter.core.units import show_clock, show_time

LONG_PAUSE_S = 5.0
RETURNS_WAITED = 10.0
"""A pause is long after so many times what a return takes, at least."""
LATE = 2.0
"""A return may take so many times as long as the sensors and the switch of the clock say."""
BACK = 0.8
"""The clock is back at this share of the one before the pause: a limit may hold it lower."""
USUAL_READINGS = 9
"""The clock before the pause is the median of so many readings with work: the last ones may show a
clock that falls already."""
AWAKE = 1.1
"""Above this multiple of the low clock an idle GPU has not lowered its clock by itself."""
GIVE_UP_S = 10.0
"""A clock that is not back by then will not come back soon."""
SAVED_UP = 10
"""The budget holds so many returns, at most."""


class PausePlan(msgspec.Struct, frozen=True, kw_only=True):
    """For one GPU."""

    sm_clock_hz: float
    """The clock is this in long pauses."""
    after_s: float
    """A pause has to have lasted so long."""
    return_s: float
    """It leads from the first work until the clock is back, as far as known before the first
    return."""


def pause_plan(
    supported: Supported, *, sensor_period_s: float, switch_latency_s: float | None
) -> PausePlan | None:
    """None: the GPU has no clock to lower."""
    if not supported.sm_clocks_hz:
        return None
    return_s = LATE * (sensor_period_s + (switch_latency_s or sensor_period_s))
    return PausePlan(
        sm_clock_hz=supported.sm_clocks_hz[0],
        after_s=max(LONG_PAUSE_S, RETURNS_WAITED * return_s),
        return_s=return_s,
    )


def time_budget(plan: PausePlan) -> TimeBudget:
    """What returns may lose: some of them are saved up, at most."""
    return TimeBudget(SAVED_UP * plan.return_s)


def slack(max_slowdown: float, time_ratio: float) -> float:
    """The share of the present time that the contract leaves to returns, beside a setting of this
    time ratio to the default."""
    return max(0.0, max_slowdown - max(0.0, time_ratio - 1.0))


class _At(Enum):
    WORK = "work"
    IDLE = "idle"
    LOW = "low"
    RETURN = "return"


class PauseWatch:
    """Tell it every reading of the sensors: it says when the clock is to go down or up."""

    def __init__(self, plan: PausePlan) -> None:
        self.plan = plan
        self.budget = time_budget(plan)
        """What returns may lose; whoever reads the sensors fills it."""
        self._at = _At.WORK
        self._worked_hz: deque[float] = deque(maxlen=USUAL_READINGS)
        self._since_s = 0.0
        """The pause, or the return, began then."""
        self._idle_s = 0.0
        """The last reading without work was then."""
        self.returns_s: list[float] = []
        """What each return has cost, at most."""
        self.ended: str | None = None
        """Why the clock goes down no more; None: it does."""

    @property
    def works(self) -> bool:
        """The GPU has work, and its usual clock as far as that can be waited for."""
        return self._at is _At.WORK

    @property
    def lowered(self) -> bool:
        """The clock is down, or not yet seen to be back."""
        return self._at in (_At.LOW, _At.RETURN)

    def __str__(self) -> str:
        count, most = len(self.returns_s), show_time(max(self.returns_s, default=0.0))
        return (
            f"the idle GPU went to {show_clock(self.plan.sm_clock_hz)} in {count} long "
            f"{'pause' if count == 1 else 'pauses'}; coming back cost at most {most} each, and "
            f"{show_time(sum(self.returns_s))} together"
        )

    def read(
        self,
        sample: Sample,
        *,
        resting: bool = True,
        busy: bool = False,
        asked_hz: float | None = None,
    ) -> Literal["down", "up"] | None:
        """One more reading. The clock may go down while nobody else uses it (`resting`). `busy`:
        the job is known to work, whatever the sensors say. `asked_hz` is what the clock is to come
        back to, where that is known."""
        works = busy or sample.sm_utilisation != 0.0  # a GPU that does not tell is not idle
        if self._at is _At.LOW and works:
            self._at, self._since_s = _At.RETURN, self._idle_s
            return "up"
        if self._at is _At.RETURN:  # readings without work are iterations' own waits
            self._return(sample, asked_hz or math.inf)
        elif works:
            self._at = _At.WORK
            if sample.sm_clock_hz is not None:
                self._worked_hz.append(sample.sm_clock_hz)
        elif self._at is _At.WORK:
            self._at, self._since_s = _At.IDLE, sample.t_s
        if not works:
            self._idle_s = sample.t_s
        if self._at is _At.IDLE and resting and self._pays(sample):
            self._at = _At.LOW
            return "down"
        return None

    def _pays(self, sample: Sample) -> bool:
        if self.ended is not None or not self._worked_hz or sample.sm_clock_hz is None:
            return False
        if sample.sm_clock_hz <= AWAKE * self.plan.sm_clock_hz:
            return False
        lasted_s = sample.t_s - self._since_s
        return lasted_s >= self.plan.after_s and self.budget.left_s >= self._expected_s()

    def _expected_s(self) -> float:
        return max(self.returns_s, default=self._lost_s(self.plan.return_s))

    def _lost_s(self, seconds: float) -> float:
        """At most, of these seconds at the low clock."""
        return seconds * max(0.0, 1.0 - self.plan.sm_clock_hz / self._usual_hz)

    @property
    def _usual_hz(self) -> float:
        return statistics.median(self._worked_hz)

    def _return(self, sample: Sample, asked_hz: float) -> None:
        took_s = sample.t_s - self._since_s
        back_hz = BACK * min(self._usual_hz, asked_hz)
        back = sample.sm_clock_hz is None or sample.sm_clock_hz >= back_hz
        if not back and took_s < GIVE_UP_S:
            return
        lost_s = self._lost_s(took_s)
        self.returns_s.append(lost_s)
        self.budget.pay(lost_s)
        self._at = _At.WORK
        if self.budget.left_s < 0.0:
            self.ended = (
                f"coming back from {show_clock(self.plan.sm_clock_hz)} took {show_time(took_s)} "
                f"(as much as {show_time(lost_s)} lost), more than the contract leaves for it: the "
                "clock stays up in pauses from now on"
            )
