"""Optimizer state that streams beside activations: chosen by prediction, judged by measurement.

State and activations are given the shares of memory and link with which an iteration takes the
least time (`memory/plan/joint.py`). The prediction is checked: iterations with streaming state are
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
    from kilter.memory.engine.state import StateMover, StateReport, Visits
    from kilter.memory.plan.joint import Joint
    from kilter.memory.plan.problem import Link, Problem

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
        self.joint: Joint | None = None
        """How state streams, where that was chosen and not taken back."""
        self.chosen = False
        self.taken_back: Reason | None = None
        """Why state does not stream any more."""
        self._shared: tuple[PassRecord, Problem] | None = None
        """A room was chosen for this pass, as it is with all state on the device."""
        self._awaiting = False
        """State is moved at the next step, and then the pass is planned anew."""
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
        return 0.0 if self.joint is None else self.joint.taken

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
        from kilter.memory.plan.joint import joint

        visits = mover.visits()
        if visits is None:
            return False
        streaming = visits.plan is not None
        if streaming:  # seen while some of the state was offloaded
            levels = zip(problem.resident_bytes, offloaded_by(visits, problem), strict=True)
            problem = replace(problem, resident_bytes=tuple(a + b for a, b in levels))
        spare_bytes = int(SPARE_SHARE * problem.budget_bytes)
        tight = replace(problem, budget_bytes=problem.budget_bytes - spare_bytes)
        try:
            found = joint(tight, visits.buckets, visits.at)
        except PlanError:
            return False
        self.chosen = True
        if not found.state.streamed and not streaming:
            return False
        if self._times_s and not streaming:
            self._before_s = statistics.median(self._times_s)
        self.joint, self._shared, self._awaiting = found, (record, problem), True
        mover.make_room(found.room_bytes, due_s=found.due_s, link=found.left)
        return True

    def judge(self, mover: StateMover, report: StateReport) -> None:
        """If iterations with streaming state are not faster than those before, fetch all state."""
        assert self._before_s is not None
        before_s, self._before_s = self._before_s, None
        now_s = statistics.median(self._times_s) if self._times_s else float("inf")
        if now_s > before_s:
            self.taken_back = messages.streaming_slower(now_s, before_s)
            self.joint, self._awaiting = None, True
            mover.make_room(report.state_bytes + report.offloaded_bytes, link=self._link)

    def changed(self, visits: Visits | None) -> None:
        """Between two iterations: gradients and state take another amount of memory from now on."""
        self._last_s = None
        self._times_s.clear()
        if not self._awaiting or self._shared is None or visits is None or visits.plan is None:
            self._before_s = None
            self._swapper.weigh_anew(self.taken)
            return
        self._awaiting = False
        record, problem = self._shared
        offloaded = offloaded_by(visits, problem)
        levels = [a - b for a, b in zip(problem.resident_bytes, offloaded, strict=True)]
        self._swapper.relevel(record, levels, self.taken)


def offloaded_by(visits: Visits, problem: Problem) -> list[int]:
    """State on the host in each operation of the pass."""
    from kilter.memory.plan.joint import offloaded_bytes

    assert visits.plan is not None
    return offloaded_bytes(visits.plan, visits.buckets, visits.at, len(problem.operation_s))
