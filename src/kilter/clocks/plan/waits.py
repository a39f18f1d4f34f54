"""When a long wait inside an iteration is worth a low clock: the reactive mode. Pure.

A wait that no window can predict (a late rank, a barrier, a checkpoint, an evaluation on rank 0) is
seen in the running iteration: it is overdue, and the device draws hardly more than it does while it
waits. After COUNTDOWN (Cesarini et al., IEEE TPDS 2021) the clock goes down only once the wait has
lasted for so long that the energy already spent pays for one return to computing, as in the ski
rental problem: then it costs at most twice what a planner that knew the length of the wait would
have spent.

What a return costs in time (the sensors have to show that the device computes again, and the switch
takes its time) is paid in advance, out of a budget that grows by `share` of the time that passes.
So the time lost stays within that share, as long as computation can be told by its power: a phase
of tiny kernels that draws no more than waiting is taken for a wait, and computation between two
waits that is shorter than the period of the sensors may be missed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal

import msgspec

from kilter.clocks.plan.time_budget import TimeBudget
from kilter.clocks.plan.worth import ClockCosts

READ_S = 0.1
"""How often the power is read while an iteration is overdue."""
OVERDUE = 1.5
"""An iteration is overdue after so many usual lengths."""
NEAR_WAITING = 0.25
"""A wait draws less than this share of the way from waiting to computing. Collectives over NVLink
were measured at 273 W where waiting takes 120 W and computing 676 W: they are no waits."""
COMPUTES = 0.5
"""At the low clock the device computes again above this share of the way."""
LEAST_RISE = 0.1
"""By so much of the waiting power, at least, computation has to stand out at the low clock."""
MOST_RETURNS = 10
"""The budget holds so many returns to computing, at most."""
INTERVALS = 9
"""The usual length is the median of so many iterations."""
LEAST_INTERVALS = 3


class WaitPlan(msgspec.Struct, frozen=True, kw_only=True):
    """When the clock goes down in a wait, and when it comes back."""

    sm_clock_hz: float
    after_s: float
    """A wait has to have lasted so long."""
    return_s: float
    """One return to computing may cost this time."""
    share: float
    """All returns together may cost this share of the time that passes."""
    high_w: float
    """At the default clock, the device computes above this power."""
    low_w: float
    """At the low clock, the device computes above this power."""
    rise_w: float
    """So does a rise by this over the lowest power of the present wait."""
    settle_s: float
    """After the command down, the sensors show the low clock after this time."""
    calls_per_s: float


def wait_plan(
    card: ClockCosts,
    *,
    max_slowdown: float,
    usual_w: float,
    compute_share: float,
    sensor_period_s: float,
) -> WaitPlan | None:
    """For a job that draws `usual_w` on average and computes for this share of its time. None: the
    contract leaves no time, no clock saves power in waits, or the job computes at so little power
    that it cannot be told from waiting."""
    if not card.levels or max_slowdown <= 0.0 or compute_share <= 0.0:
        return None
    level = card.levels[-1]
    above_w = min((usual_w - card.waiting_w) / compute_share, card.computing_w - card.waiting_w)
    rise_w = above_w / (card.computing_w - card.waiting_w) * (level.computing_w - level.waiting_w)
    if level.sm_clock_hz is None or level.saved_w <= 0.0 or rise_w < LEAST_RISE * level.waiting_w:
        return None
    down, up = card.switches(level)
    settle_s = down.quantile(0.95) + sensor_period_s
    blind_s = settle_s + READ_S + up.quantile(0.95)
    return_s = blind_s * (1.0 - 1.0 / level.stretch)
    # The same work at the low clock instead, and all other ranks wait for it.
    default_j = blind_s / level.stretch * (card.waiting_w + above_w)
    cost_j = blind_s * (level.waiting_w + rise_w) - default_j
    cost_j = max(0.0, cost_j) + return_s * card.waiting_w
    return WaitPlan(
        sm_clock_hz=level.sm_clock_hz,
        after_s=max(card.break_even_of_s(level), cost_j / level.saved_w),
        return_s=return_s,
        share=max_slowdown,
        high_w=card.waiting_w + NEAR_WAITING * above_w,
        low_w=level.waiting_w + COMPUTES * rise_w,
        rise_w=COMPUTES * rise_w,
        settle_s=settle_s,
        calls_per_s=card.calls_per_s,
    )


class WaitWatch:
    """Tell it every marker (`passed`), and read the power at `due_s` (`read`): it says when the
    clock should go down or up. `acts`: the low clock is really set; otherwise the power is always
    that of the default clock. Times are of one monotonic clock."""

    def __init__(self, plan: WaitPlan, *, acts: bool) -> None:
        self.plan = plan
        self._acts = acts
        self.last: tuple[int, float] | None = None
        """It has the number and the time of the last marker."""
        self._intervals: deque[float] = deque(maxlen=INTERVALS)
        self._budget = TimeBudget(MOST_RETURNS * plan.return_s)
        self._read_s = -math.inf
        self._quiet_s: float | None = None
        """Since then every reading was that of a wait."""
        self._low_s: float | None = None
        self._lowest_w = math.inf

    @property
    def low(self) -> bool:
        """The clock is down for a wait."""
        return self._low_s is not None

    @property
    def due_s(self) -> float:
        """When the power has to be read; infinite while the usual length is not known."""
        if self._low_s is not None:
            return self._read_s + READ_S
        if self.last is None or len(self._intervals) < LEAST_INTERVALS:
            return math.inf
        usual_s = statistics.median(self._intervals)
        return max(self.last[1] + OVERDUE * usual_s, self._read_s + READ_S)

    def passed(self, iteration: int, t_s: float) -> None:
        """The marker of an iteration was passed: no wait goes on."""
        self._budget.fill(t_s, self.plan.share)
        self.over(t_s)
        if self.last is not None and iteration > self.last[0]:
            ends = iteration - self.last[0]
            self._intervals.append((t_s - self.last[1]) / ends)
        self.last = (iteration, t_s)

    def busy(self, t_s: float) -> None:
        """The clock is somebody else's at the moment: look again later."""
        self._read_s = t_s
        self._quiet_s = None

    def over(self, t_s: float) -> None:
        """The clock is, or goes, up. If nobody has looked in time, what that may have cost is owed:
        it comes out of the budget of later waits."""
        if self._low_s is not None:
            self._budget.pay(max(0.0, t_s - self._read_s - READ_S))
        self._low_s = self._quiet_s = None
        self._lowest_w = math.inf

    def read(self, t_s: float, power_w: float) -> Literal["down", "up"] | None:
        """What is to be done at this power."""
        self._budget.fill(t_s, self.plan.share)
        before_s = self._read_s
        if self._low_s is not None:
            computes = self._computes(power_w, t_s - self._low_s)
            if computes:
                self.over(t_s)
            self._read_s = t_s
            return "up" if computes else None
        self._read_s = t_s
        if power_w >= self.plan.high_w:
            self._quiet_s = None
            return None
        if self._quiet_s is None or t_s > before_s + 2 * READ_S:
            self._quiet_s = t_s
        lasted_s = t_s - self._quiet_s
        if lasted_s < self.plan.after_s or self._budget.left_s < self.plan.return_s:
            return None
        self._budget.pay(self.plan.return_s)
        self._low_s = t_s
        return "down"

    def _computes(self, power_w: float, low_for_s: float) -> bool:
        """Does the device compute again, by its power at what its clock is by now?"""
        if not self._acts or low_for_s < self.plan.settle_s:
            return power_w >= self.plan.high_w
        self._lowest_w = min(self._lowest_w, power_w)
        return power_w >= min(self.plan.low_w, self._lowest_w + self.plan.rise_w)
