"""Saves memory on gradients and optimizer state, where activations are not enough or cost more.

Gradients come first: they are consumed as they arrive, where nothing forbids it. Where the user has
not asked for that (`consume`), they are watched only if no plan for activations alone meets the
budget. Then it is decided once how much optimizer state streams: so much that activations and state
together cost the least time (`memory/plan/state.py`), or, where gradients are kept, as much as is
missing for the budget, in forward and backward or in the optimizer's step.

Where all of that is not enough and the user has allowed it, weights are offloaded between their use
in forward and in backward: as much as is missing.

A job whose weights, gradients and state do not fit together would run out of memory in its first
step. The size of its weights shows that: its state is then created bucket by bucket, and each
bucket is offloaded at once. A job whose state does not fit beside the largest operations would run
out of memory in its second forward. Its first pass shows that: its state is offloaded as soon as
it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kilter.core.reasons import Reason
from kilter.core.units import MIB, show_bytes, show_time
from kilter.memory import messages
from kilter.memory.first_step import FirstStep
from kilter.memory.state_room import StateRoom, to_offload_bytes
from kilter.memory.state_streaming import StateStreaming
from kilter.memory.usable_bytes import countable_bytes
from kilter.memory.weight_room import WeightRoom

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine import Swapper
    from kilter.memory.engine.backend import Backend
    from kilter.memory.engine.engine import SwapReport
    from kilter.memory.engine.pass_record import PassRecord
    from kilter.memory.engine.state import StateMover, StateReport
    from kilter.memory.engine.weights import WeightReport
    from kilter.memory.plan.problem import Link, Problem
    from kilter.session.fence import Fence

STAY = "gradients and optimizer state stay"
"""It is the report where neither gradients nor state are moved."""
COSTS = 0.01
"""A plan for activations that costs no more of the iteration than this is left alone."""
KNOWN_PASSES = 2
"""After so many passes of one kind its levels are known: the first makes gradients and state."""
PAUSE = 3
"""After so many iteration ends what was decided is in force."""
POLICY_PATIENCE = 24
"""After so many iteration ends gradients that are still watched count as kept, and iterations that
could not be timed are judged by those that could."""
CROWDED = 0.9
"""Weights, gradients and two moments (four times the weights) may take this share of the budget
before state leaves as it is made."""


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
        weights: str = "keep",
        min_bytes: int = MIB,
    ) -> None:
        """`gradients` is one of `GRADIENTS`, `weights` one of `WEIGHTS`."""
        self._swapper = swapper
        self._backend = backend
        self._link = link
        self._fence = fence
        self._gradients = gradients
        self._min_bytes = min_bytes
        self.mover: StateMover | None = None
        self._first_step: FirstStep | None = None
        """It is None where the first step is over, or of no interest."""
        self.streaming = StateStreaming(swapper, link)
        offload = weights == "offload"
        self.weights = WeightRoom(swapper, backend, link, fence, min_bytes, offload=offload)
        self._iteration_ends = 0
        """So many have passed since something was changed."""
        self._room = StateRoom()
        self.settled = False
        """Nothing is left to decide."""
        self._smaller = False
        """Activations take less than what was decided for."""
        self.report: StateReport | None = None
        """How it stood at the last iteration end: optimizers may be gone at the end."""

    def begin(self, used_bytes: int, budget_bytes: int) -> None:
        """In the first forward, when little more than weights is on the device."""
        if 4 * used_bytes > CROWDED * budget_bytes:
            self._open(room_bytes=max(0, budget_bytes - 2 * used_bytes) // 2)
        else:
            self._first_step = FirstStep(used_bytes)

    def iteration_ended(self, report: SwapReport, budget_bytes: int, now_s: float) -> None:
        """An iteration has ended; the swapper stands like this."""
        self._iteration_ends += 1
        mover = self.mover
        if mover is not None:
            mover.keep_within(budget_bytes)
            self.report = mover.report()
        self.weights.iteration_ended()
        if self.settled:
            if self._smaller and mover is not None and self._swapper.planned and report.settled:
                self._fetch_what_fits(mover, report, budget_bytes)
            return
        self._room.look(self._swapper.beside_peak_bytes, budget_bytes)
        self.streaming.iteration_ended(now_s, counts=self._swapper.planned and report.settled)
        if mover is not None:
            self._decide(mover, report, budget_bytes)
        elif not self._make_way(report):
            self._consider(report, budget_bytes)

    @property
    def refused(self) -> tuple[Reason, ...]:
        """What does not make the room that it was to make, and why."""
        over_bytes = self._room.over_bytes
        exceeds = self.settled and over_bytes > 0
        found = (
            self.streaming.taken_back,
            messages.WEIGHTS_KEPT if self.weights.kept else None,
            messages.step_exceeds(over_bytes) if exceeds else None,
        )
        return tuple(reason for reason in found if reason is not None)

    def activations_are_smaller(self) -> None:
        """From now on, since they are recomputed in another way, or another thread trains: state
        that left for them comes back once passes have their plan, as far as it fits."""
        self._smaller = True

    def _fetch_what_fits(self, mover: StateMover, report: SwapReport, budget_bytes: int) -> None:
        self._smaller = False
        if self._room.for_step:
            return
        assert self.report is not None
        on_host_bytes = self.report.offloaded_bytes
        spare_bytes = budget_bytes - max((plan.peak_bytes for plan in report.plans), default=0)
        fits_bytes = min(on_host_bytes, -to_offload_bytes(-spare_bytes, on_host_bytes))
        if fits_bytes >= self._min_bytes:
            room_bytes = max(self.report.state_bytes, mover.room_bytes or 0) + fits_bytes
            if room_bytes >= self.report.state_bytes + on_host_bytes:
                self.streaming.plan = None
            mover.make_room(room_bytes)

    def _decide(self, mover: StateMover, report: SwapReport, budget_bytes: int) -> None:
        """How much state streams, once it is known what becomes of gradients."""
        assert self.report is not None
        patient = self._iteration_ends < POLICY_PATIENCE
        watching = self.report.watching and patient
        self._swapper.may_plan = not watching  # what a plan is for changes with the gradients
        if watching or self._iteration_ends < PAUSE or not self._swapper.tried:
            return
        choice = self.report.consuming and not self.streaming.chosen
        timed = self.streaming.timed or not patient
        if self.streaming.on_trial:
            if timed:
                self._iteration_ends = 0
                self.streaming.judge(mover, self.report)
            return
        if choice and report.plans and not timed:
            return
        record, problem = self._problem(budget_bytes)
        if record is None or problem is None:
            return
        if choice and self.streaming.choose(mover, record, problem):
            self._iteration_ends = 0
            return
        if self._room.unmeasured and patient:
            return
        missing_bytes = self._room.missing_bytes(problem)
        guessed = self._room.guessed and not self.streaming.chosen
        fits = missing_bytes <= 0 and not guessed
        if not fits and self._room.give(mover, self.report, missing_bytes):
            self._iteration_ends = 0
        else:
            self._move_weights(missing_bytes)

    def _make_way(self, report: SwapReport) -> bool:
        """The first step has just made the state, and the second forward does not fit beside it?
        Then it leaves now."""
        if self._first_step is None:
            return False
        first, self._first_step = self._first_step, None
        first.remove()
        if not report.spilled or self._swapper.records():  # it fitted, or was not the first
            return False
        room_bytes = first.room_bytes(self._swapper.offload_above_bytes)
        if room_bytes is None:
            return False
        mover = self._open(room_bytes=room_bytes)
        for optimizer in first.optimizers:
            mover.take_over(optimizer)
        return True

    def _consider(self, report: SwapReport, budget_bytes: int) -> None:
        """Whether to look at gradients and state at all."""
        asked = self._gradients == "consume"  # else they are touched only where that is needed
        if report.plans:
            costs = any(p.iteration_s > (1 + COSTS) * p.compute_s for p in report.plans)
            if (asked and costs) or (report.settled and self._room.over_bytes):
                self._open()
            self.settled = report.settled and self.mover is None
        elif asked and report.spilled:
            self._open()  # the budget binds already
        elif self._swapper.tried:
            _, problem = self._problem(budget_bytes)
            if problem is not None and problem.floor_bytes > problem.budget_bytes:
                self._open()

    def _problem(self, budget_bytes: int) -> tuple[PassRecord | None, Problem | None]:
        """The largest pass, once its levels are known."""
        record = self._swapper.largest_pass()
        if record is None or record.passes < KNOWN_PASSES:
            return None, None
        problem, _ = record.problem(
            link=self._link,
            budget_bytes=countable_bytes(budget_bytes),
            min_bytes=self._min_bytes,
        )
        return record, record.as_it_runs(problem, self._min_bytes)

    def close(self) -> None:
        """Fetch everything."""
        if self._first_step is not None:
            self._first_step.remove()
        self.weights.close()
        if self.mover is not None:
            self.mover.__exit__(None, None, None)
            self.mover = None

    def _open(self, room_bytes: int | None = None) -> StateMover:
        from kilter.memory.engine.state import StateMover

        self._iteration_ends = 0
        self._room.guessed = room_bytes is not None
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
        self.mover = mover
        return mover

    def _before_update(self, parameters: Iterable[torch.Tensor]) -> None:
        parameters = list(parameters)
        self.weights.before_update(parameters)
        self._swapper.before_update(parameters)

    def _changed(self) -> None:
        """Between two iterations: gradients and state take another amount of memory from now on."""
        self.streaming.changed(None if self.mover is None else self.mover.visits())

    def _move_weights(self, missing_bytes: int) -> None:
        """The last resort: offload weights for what is still missing, a little more each time."""
        self._iteration_ends = 0
        more_bytes = to_offload_bytes(missing_bytes, 0)
        self.settled = missing_bytes <= 0 or not self.weights.make(more_bytes, self.streaming.taken)


def words(report: StateReport, weights: WeightReport | None = None) -> str:
    """What is done with gradients, state and weights, in words."""
    parts = []
    if report.consuming:
        parts.append(f"gradients are used up as they arrive ({show_bytes(report.gradient_bytes)})")
    if report.offloaded_bytes:
        text = f"{show_bytes(report.offloaded_bytes)} of optimizer state are on the host"
        if report.step_wait_s:
            text += f", for which the step waits {show_time(report.step_wait_s)} [simulated]"
        parts.append(text)
    if weights is not None and weights.offloaded_bytes:
        moved = show_bytes(weights.offloaded_bytes)
        parts.append(f"{moved} of weights are on the host between forward and backward")
    return ", ".join(parts) or STAY
