"""Lets gradients and optimizer state make room, where activations cannot and where it pays.

Gradients go first: they are used up as they arrive, where nothing forbids it; without being asked
(`consume`) only where no plan for activations alone meets the budget. Then it is decided
once how much optimizer state streams: so much that activations and state together cost the least
time (`memory/plan/joint.py`), or, where gradients are kept, so much as is missing for the budget.

Predicting is not enough: the iterations with streaming state are held against those before it, and
if they are not faster, all state comes back.

Where all of that is not enough, weights leave between their use in forward and their need in
backward: so much as is missing.

A job whose weights, gradients and state do not fit together would run out of memory in its first
step. The size of its weights shows that: its state is then created bucket by bucket, and each
bucket is offloaded at once. A job whose state does not fit beside the largest operations would run
out of memory in its second forward. Its first pass shows that: its state is offloaded as soon as
it exists.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kilter.core.errors import PlanError
from kilter.core.reasons import Reason
from kilter.core.units import MIB, show_bytes
from kilter.memory import messages

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine import Swapper
    from kilter.memory.engine.backend import Backend
    from kilter.memory.engine.engine import SwapReport
    from kilter.memory.engine.pass_record import PassRecord
    from kilter.memory.engine.state import StateMover, StateReport, Visits
    from kilter.memory.engine.weights import WeightMover, WeightReport
    from kilter.memory.plan.joint import Joint
    from kilter.memory.plan.problem import Link, Problem
    from kilter.session.fence import Fence

STAY = "gradients and optimizer state stay"
"""What is said of them where nothing came of looking."""
SLACK = 0.1
"""More state goes than what is missing, as a share of it: buckets are whole."""
SPARE_SHARE = 0.01
"""Of the budget, what is left when state is shared out: levels come out a little different."""
COSTS = 0.01
"""Of the iteration: a plan for activations that costs no more is left alone."""
KNOWN_PASSES = 2
"""Passes of one kind after which its levels are known: the first makes gradients and state."""
PAUSE = 3
"""Iteration ends after which what was decided is in force."""
MOST_ROOMS = 2
"""Times that another room is given because the budget was missed, or first guessed."""
POLICY_PATIENCE = 24
"""Iteration ends after which gradients that are watched still count as kept, and iterations that
could not be timed are judged by those that could."""
JUDGED_ITERATIONS = 6
"""Iterations by whose median a plan with streaming state is held against the one before."""
LEFT_TO_WEIGHTS = 0.5
"""Of the way to the device, however much state takes: loaded much earlier, weights would be in the
way of what they make room for."""
CROWDED = 0.9
"""Of the budget: what weights, gradients and two moments (four times the weights) may take before
state leaves as it is made."""
FULL = 0.75
"""Of the level at which data leave: what weights and state may take in the second iteration. Casts
of weights and data on their way out need the rest."""


class StateAndWeightPolicy:
    """Decides for one job. Created with the swapper; `iteration_ended` is called after each
    iteration."""

    def __init__(
        self,
        swapper: Swapper,
        backend: Callable[[], Backend],
        link: Link,
        fence: Fence,
        gradients: str = "auto",
        min_bytes: int = MIB,
    ) -> None:
        self._swapper = swapper
        self._backend = backend
        self._link = link
        self._fence = fence
        self._gradients = gradients
        self._min_bytes = min_bytes
        self._mover: StateMover | None = None
        self._weights: WeightMover | None = None
        self._weight_bytes = 0
        """That are to be away at the end of forward."""
        self._begun_bytes = 0
        """In use when the first data were saved."""
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers, in the first iteration."""
        self._first_step: Any = None
        """Our hook in front of it."""
        self._iteration_ends = 0
        self._rooms = 0
        """That were set for what is missing."""
        self._guessed = False
        """The room was set before anything was known."""
        self._shared: tuple[PassRecord, Problem] | None = None
        """The pass that a room was chosen for, as it is with all state on the device."""
        self._awaiting = False
        """State comes or goes at the next step, and then the pass is planned anew."""
        self._before_s: float | None = None
        """An iteration without streaming state, while those with it are to be judged."""
        self._last_s: float | None = None
        """The last iteration end, if the iteration before it ran under a plan that holds."""
        self._times_s: list[float] = []
        """Of such iterations in a row."""
        self.joint: Joint | None = None
        """How state streams, where that was chosen and not taken back."""
        self._chosen = False
        self.taken_back: Reason | None = None
        """Why state does not stream any more."""
        self.settled = False
        """Nothing is left to decide."""
        self.report: StateReport | None = None
        """How it stood at the last iteration end: optimizers may be gone at the end."""
        self.weights: WeightReport | None = None

    @property
    def room_bytes(self) -> int | None:
        """Optimizer state that stays on the device; None: all of it."""
        return None if self._mover is None else self._mover.room_bytes

    def begin(self, used_bytes: int, budget_bytes: int) -> None:
        """In the first forward, when little more than weights is on the device."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._begun_bytes = used_bytes
        if 4 * used_bytes > CROWDED * budget_bytes:
            self._open(room_bytes=max(0, budget_bytes - 2 * used_bytes) // 2)
        else:
            # A hook before the step: the end of an iteration is noticed in a hook after the step,
            # and a hook of that kind cannot be removed from inside one.
            self._first_step = register_optimizer_step_pre_hook(
                lambda optimizer, *_: self._stepped.add(optimizer)
            )

    def iteration_ended(self, report: SwapReport, budget_bytes: int, now_s: float) -> None:
        """An iteration has ended; the swapper stands like this."""
        self._iteration_ends += 1
        mover = self._mover
        if mover is not None:
            self.report = mover.report()
        if self._weights is not None:
            self.weights = self._weights.report()
        if self.settled:
            return
        self._time(now_s, counts=self._swapper.planned and report.settled)
        if mover is not None:
            self._decide(mover, report, budget_bytes)
        elif not self._make_way(report):
            self._consider(report, budget_bytes)

    def _time(self, now_s: float, *, counts: bool) -> None:
        if counts and self._last_s is not None:
            self._times_s.append(now_s - self._last_s)
        self._last_s = now_s if counts else None

    def _decide(self, mover: StateMover, report: SwapReport, budget_bytes: int) -> None:
        """How much state streams, once it is known what becomes of gradients."""
        assert self.report is not None
        patient = self._iteration_ends < POLICY_PATIENCE
        watching = self.report.watching and patient
        self._swapper.may_plan = not watching  # what a plan is for changes with the gradients
        if watching or self._iteration_ends < PAUSE or not self._swapper.tried:
            return
        choice = self.report.consuming and not self._chosen
        timed = len(self._times_s) >= JUDGED_ITERATIONS or not patient
        if self._before_s is not None:
            if timed:
                self._judge(mover, self._before_s)
            return
        if choice and report.plans and not timed:
            return
        record, problem = self._problem(budget_bytes)
        if record is None or problem is None or (choice and self._share(mover, record, problem)):
            return
        missing_bytes = problem.floor_bytes - problem.budget_bytes
        fits = missing_bytes <= 0 and not self._guessed
        if fits or self._rooms >= MOST_ROOMS or not self._set_room(mover, missing_bytes):
            self._move_weights(missing_bytes)

    def _make_way(self, report: SwapReport) -> bool:
        """The first step has just made the state, and the second forward does not fit beside it?
        Then it leaves now."""
        if self._first_step is None:
            return False
        self._first_step.remove()
        self._first_step = None
        if not report.spilled or self._swapper.records():  # it fitted, or was not the first
            return False
        level_bytes = self._swapper.leave_above_bytes
        state_bytes = sum(state_bytes_of(optimizer) for optimizer in self._stepped)
        if not state_bytes or self._begun_bytes + state_bytes <= FULL * level_bytes:
            return False
        mover = self._open(room_bytes=max(0, level_bytes - self._begun_bytes) // 2)
        for optimizer in self._stepped:
            mover.take_over(optimizer)
        return True

    def _consider(self, report: SwapReport, budget_bytes: int) -> None:
        """Are gradients and state of interest at all?"""
        asked = self._gradients == "consume"  # else they are touched only where that is needed
        if report.plans:
            if asked and any(p.iteration_s > (1 + COSTS) * p.compute_s for p in report.plans):
                self._open()
            self.settled = report.settled and self._mover is None
        elif asked and report.spilled:
            self._open()  # the budget binds already
        elif self._swapper.tried:
            _, problem = self._problem(budget_bytes)
            if problem is not None and problem.floor_bytes > problem.budget_bytes:
                self._open()

    def _problem(self, budget_bytes: int) -> tuple[PassRecord | None, Problem | None]:
        """The largest pass, once its levels are known."""
        from kilter.memory.engine.kinds import ALLOCATION_ROUNDING_BYTES

        record = self._swapper.largest_pass()
        if record is None or record.passes < KNOWN_PASSES:
            return None, None
        problem, _ = record.problem(
            link=self._link,
            budget_bytes=budget_bytes - budget_bytes // ALLOCATION_ROUNDING_BYTES,
            min_bytes=self._min_bytes,
        )
        return record, problem

    def close(self) -> None:
        """Bring everything home."""
        if self._first_step is not None:
            self._first_step.remove()
        if self._weights is not None:
            self._swapper.stand_behind(lambda pack, unpack: (pack, unpack))
            self._weights.__exit__(None, None, None)
            self._weights = None
        if self._mover is not None:
            self._mover.__exit__(None, None, None)
            self._mover = None

    def _open(self, room_bytes: int | None = None) -> StateMover:
        from kilter.memory.engine.state import StateMover

        self._iteration_ends = 0
        self._guessed = room_bytes is not None
        mover = StateMover(
            self._backend(),
            link=self._link,
            gradients=self._gradients,
            room_bytes=room_bytes,
            before_update=self._before_update,
            changed=self._changed,
            event=lambda: self._swapper.event,
            fence=self._fence,
        )
        mover.__enter__()
        self._mover = mover
        return mover

    def _before_update(self, parameters: Iterable[torch.Tensor]) -> None:
        parameters = list(parameters)
        if self._weights is not None:
            self._weights.before_update(parameters)
        self._swapper.before_update(parameters)

    def _changed(self) -> None:
        """Between two iterations: gradients and state take another amount of memory from now on."""
        self._last_s = None
        self._times_s.clear()
        visits = None if self._mover is None else self._mover.visits()
        if not self._awaiting or self._shared is None or visits is None or visits.plan is None:
            self._before_s = None
            self._swapper.forget()
            return
        self._awaiting = False
        record, problem = self._shared
        away = away_of(visits, problem)
        levels = [a - b for a, b in zip(problem.resident_bytes, away, strict=True)]
        self._swapper.relevel(record, levels, self._taken)

    @property
    def _taken(self) -> float:
        """Share of the way to the device that state takes."""
        return 0.0 if self.joint is None else self.joint.taken

    def _share(self, mover: StateMover, record: PassRecord, problem: Problem) -> bool:
        """Decide how memory and link are shared between activations and state; whether anything
        changes by that."""
        from kilter.memory.plan.joint import joint

        visits = mover.visits()
        if visits is None:
            return False
        streaming = visits.plan is not None
        if streaming:  # seen while some of the state was away
            levels = zip(problem.resident_bytes, away_of(visits, problem), strict=True)
            problem = replace(problem, resident_bytes=tuple(a + b for a, b in levels))
        spare_bytes = int(SPARE_SHARE * problem.budget_bytes)
        tight = replace(problem, budget_bytes=problem.budget_bytes - spare_bytes)
        try:
            found = joint(tight, visits.buckets, visits.at)
        except PlanError:
            return False
        self._chosen, self._guessed = True, False
        if not found.state.streamed and not streaming:
            return False
        if self._times_s and not streaming:
            self._before_s = statistics.median(self._times_s)
        self.joint, self._shared = found, (record, problem)
        self._iteration_ends, self._awaiting = 0, True
        mover.make_room(found.room_bytes, due_s=found.due_s, link=found.left)
        return True

    def _judge(self, mover: StateMover, before_s: float) -> None:
        """Does the plan with streaming state keep its promise? If not, everything comes back."""
        self._iteration_ends, self._before_s = 0, None
        now_s = statistics.median(self._times_s) if self._times_s else float("inf")
        if now_s > before_s:
            assert self.report is not None
            self.taken_back = messages.streaming_slower(now_s, before_s)
            self.joint, self._awaiting = None, True
            mover.make_room(self.report.state_bytes + self.report.away_bytes, link=self._link)

    def _set_room(self, mover: StateMover, missing_bytes: int) -> bool:
        """So much state goes as is missing, a little more each time, or comes back where the room
        was a guess; whether that is another room."""
        report = self.report
        assert report is not None
        self._guessed = False
        total_bytes = report.state_bytes + report.away_bytes
        more_bytes = int(missing_bytes + SLACK * abs(missing_bytes))
        room_bytes = min(total_bytes, max(0, report.state_bytes - more_bytes))
        if room_bytes == (total_bytes if mover.room_bytes is None else mover.room_bytes):
            return False
        self._rooms += 1
        self._iteration_ends = 0
        mover.make_room(room_bytes)
        return True

    def _move_weights(self, missing_bytes: int) -> None:
        """The last resort: so much as is still missing, a little more each time."""
        from kilter.memory.engine.weights import WeightMover

        before_bytes = self._weight_bytes
        if self.weights is not None:  # it may be less than was asked for
            self.settled = not self.weights.moving or self.weights.away_bytes < before_bytes
        if missing_bytes <= 0 or self.settled:
            self.settled = True
            return
        self._iteration_ends = 0
        self._weight_bytes = before_bytes + int((1 + SLACK) * missing_bytes)
        if self._weights is not None:
            self._weights.make_room(self._weight_bytes)
            return
        weights = WeightMover(
            self._backend(),
            link=self._link.less(min(self._taken, 1 - LEFT_TO_WEIGHTS)),
            away_bytes=self._weight_bytes,
            own_hooks=False,
            min_bytes=self._min_bytes,
            changed=self._swapper.forget,
            fence=self._fence,
        )
        weights.__enter__()
        if self._swapper.stand_behind(weights.around):
            self._weights = weights
        else:  # the program has put hooks of its own about the loop
            weights.__exit__(None, None, None)
            self.settled = True


def away_of(visits: Visits, problem: Problem) -> list[int]:
    """State on the host in each operation of the pass."""
    from kilter.memory.plan.joint import away_bytes

    assert visits.plan is not None
    return away_bytes(visits.plan, visits.buckets, visits.at, len(problem.operation_s))


def state_bytes_of(optimizer: Any) -> int:
    """Of the tensors that it keeps beside the parameters."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if hasattr(value, "nbytes"))


def words(report: StateReport, weights: WeightReport | None = None) -> str:
    """What became of gradients, state and weights."""
    parts = []
    if report.consuming:
        parts.append(f"gradients are used up as they arrive ({show_bytes(report.gradient_bytes)})")
    if report.away_bytes:
        parts.append(f"{show_bytes(report.away_bytes)} of optimizer state wait on the host")
    if weights is not None and weights.away_bytes:
        moved = show_bytes(weights.away_bytes)
        parts.append(f"{moved} of weights are on the host between forward and backward")
    return ", ".join(parts) or STAY
