"""Optimizer state that streams beside activations: chosen by prediction, judged by measurement.

State and activations are planned as one problem, in which an iteration takes the least time
(`memory/plan/state.py`). The prediction is checked: iterations with streaming state are
compared with those before it, and if they are not faster, all state is fetched.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from kilter.core.errors import PlanError
from kilter.core.reasons import Reason
from kilter.memory import messages

if TYPE_CHECKING:
    from kilter.memory.engine import Swapper
    from kilter.memory.engine.pass_record import PassRecord
    from kilter.memory.engine.state import StateMover, StateReport
    from kilter.memory.plan.problem import Link, Problem
    from kilter.memory.plan.state import StatePlan, Visits

SPARE_SHARE = 0.01
"""This share of the budget stays free of state: levels come out a little different."""
JUDGED_ITERATIONS = 6
"""A plan with streaming state is held against the one before by the median of so many
iterations."""


class StateStreaming:
    """Chooses once. Times are those of iterations under a plan that holds."""

    def __init__(self, swapper: Swapper, link: Link) -> None:
        self._swapper = swapper
        self._link = link
        self.plan: StatePlan | None = None
        """How state streams, where that was chosen and not taken back."""
        self.chosen = False
        self.taken_back: Reason | None = None
        """Why state does not stream any more."""
        self._events: tuple[int, ...] = ()
        """It was chosen for passes with these events."""
        self._backward_s = 0.0
        """From the first visit on the pass takes this, with all waiting."""
        self._awaiting = False
        """State is moved at the next step, and then passes are watched and planned anew."""
        self._before_s: float | None = None
        """An iteration without streaming state took this, while those with it are to be judged."""
        self._last_s: float | None = None
        """The last iteration end was then, if the iteration before it ran under a plan that
        holds."""
        self._times_s: list[float] = []
        """Such iterations in a row took these."""

    @property
    def taken(self) -> float:
        """Share of the link to the device that state takes."""
        if self.plan is None or self._backward_s == 0:
            return 0.0
        rate = self._link.to_device_bytes_per_s * self._link.shared
        return self.plan.moved_bytes / (rate * self._backward_s)

    @property
    def on_trial(self) -> bool:
        """The iterations with streaming state are still to be judged."""
        return self._before_s is not None

    @property
    def timed(self) -> bool:
        """Enough iterations were timed to be judged."""
        return len(self._times_s) >= JUDGED_ITERATIONS

    def iteration_ended(self, now_s: float, *, counts: bool) -> None:
        """`counts` says that the iteration ran under a plan that holds."""
        if counts and self._last_s is not None:
            self._times_s.append(now_s - self._last_s)
        self._last_s = now_s if counts else None

    def choose(self, mover: StateMover, record: PassRecord, problem: Problem) -> bool:
        """Decide how memory and link are shared between activations and state; whether anything
        changes by that."""
        from kilter.memory.plan.state import beside, stream

        visits = mover.visits()
        if visits is None:
            return False
        streaming = visits.plan is not None
        # Levels were seen while some of the state was offloaded.
        levels = beside(problem, visits, seen=True).resident_bytes
        problem = replace(problem, resident_bytes=levels)
        spare_bytes = int(SPARE_SHARE * problem.budget_bytes)
        tight = replace(problem, budget_bytes=problem.budget_bytes - spare_bytes)
        try:
            found = stream(tight, visits.buckets, visits.at)
        except PlanError:
            return False
        self.chosen = True
        if not found.streamed and not streaming:
            return False
        if self._times_s and not streaming:
            self._before_s = statistics.median(self._times_s)
        self.plan, self._events, self._awaiting = found, record.events, True
        self._backward_s = found.iteration_s - sum(problem.operation_s[: visits.at[0]])
        mover.make_room(found.peak_bytes, found)
        return True

    def judge(self, mover: StateMover, report: StateReport) -> None:
        """If iterations with streaming state are not faster than those before, fetch all state."""
        assert self._before_s is not None
        before_s, self._before_s = self._before_s, None
        now_s = statistics.median(self._times_s) if self._times_s else float("inf")
        if now_s > before_s:
            self.taken_back = messages.streaming_slower(now_s, before_s)
            self.plan, self._awaiting = None, True
            mover.make_room(report.state_bytes + report.offloaded_bytes)

    def changed(self, visits: Visits | None) -> None:
        """Between two iterations: gradients and state take another amount of memory from now on."""
        self._last_s = None
        self._times_s.clear()
        streams = self.plan is not None and visits is not None and visits.plan is not None
        if not (self._awaiting and streams):
            self._before_s = None
        self._awaiting &= not streams
        self._swapper.weigh_anew(None if self.plan is None else visits, self._events)
