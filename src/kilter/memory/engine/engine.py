"""The engine: carries a memory schedule out at the events of saved tensors.

One *pass* is from the first save to the moment when nothing saved is alive any more: a forward with
its backward. Passes are distinguished by their events, the large tensors saved and used. A new kind
of pass is watched first (large tensors are offloaded only where the budget forces that: the
patent's demand-swapped first iterations), then its recipes are tried against the real tensors, then
it is planned; from then on each event runs the few commands that the plan attached to it.

Whatever happens, the numbers are those of the plain run: a tensor is copied back from the host, or
recomputed by a recipe that was read in this very pass, or was never evicted. The plan decides only
the moments; a tensor that the program still holds when it is due to be offloaded stays until the
program drops it. A pass that departs from the events of its plan drops the plan in the middle and
goes on like a watched one.

This file has the engine as others see it, and where passes begin and end. `next_pass.py` decides
what the pass that begins is to be, `pass_under_plan.py` carries a plan out, `watch.py` watches, and
`demand.py` offloads what has no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kilter.core.memory_record import MemoryCounts
from kilter.core.reasons import Reason
from kilter.core.units import MIB
from kilter.memory import messages
from kilter.memory.engine.backend import Backend
from kilter.memory.engine.backward_calls import BackwardCalls
from kilter.memory.engine.collector import Collector
from kilter.memory.engine.demand import Demand
from kilter.memory.engine.next_pass import NextPass
from kilter.memory.engine.pass_kinds import Kinds, PassKinds, PlanTerms
from kilter.memory.engine.pass_record import (
    FOREIGN,
    PassRecord,
    SavedSegment,
    again_code,
    use_code,
)
from kilter.memory.engine.pass_under_plan import PassUnderPlan
from kilter.memory.engine.reach import Reach
from kilter.memory.engine.store import (
    EVICTED,
    Pass,
    Store,
    View,
    called,
    kept,
    whole,
)
from kilter.memory.engine.tensor_hooks import TensorHooks
from kilter.memory.engine.watch import Watch
from kilter.memory.kept_calls import KeptCalls
from kilter.memory.plan.choose import MemoryPlan
from kilter.memory.plan.problem import Link, Problem
from kilter.memory.plan.state import Visits
from kilter.observe import optimizer_steps, torch_internals

if TYPE_CHECKING:
    from kilter.session.fence import Fence


class PassPlan(NamedTuple):
    """The plan of one kind of pass."""

    record: PassRecord
    plan: MemoryPlan
    problem: Problem
    numbers: tuple[int, ...]
    """The tensor with this number is behind each interval of the problem."""
    segments: tuple[SavedSegment, ...]
    """Each of these calls of modules was one interval, with the number of its first tensor."""


class SwapReport(MemoryCounts, frozen=True, kw_only=True):
    """What the engine did so far, and its present state."""

    watched: int
    """So many passes were watched, or tried."""
    watched_every: int
    """Of passes without a plan one in this many is watched; more than 1 where shapes keep changing.
    """
    serves_sizes: bool
    """Plans serve passes of other sizes than their own."""
    tries_sizes: bool
    """Plans for more sizes may come."""
    held_peak_bytes: int
    """Saved tensors had at most so many bytes on the device at one time, in the last pass that was
    watched, or among the first under a plan."""
    plans: tuple[MemoryPlan, ...]
    settled: bool
    """There is a plan, and every plan was measured and holds."""
    hopeless: bool
    """Some kind of pass gets no plan, as things are now."""
    highest_bytes: int
    """The largest measured peak of passes of all kinds, each as it runs now, is this; 0: not
    measured."""
    peaks_bytes: tuple[int, ...]
    """The first passes under each plan had these measured peaks, in order of planning."""
    refused: tuple[Reason, ...]
    """Why something could not be planned, or was planned otherwise."""


@cache
def leave_uncompiled() -> None:
    """Dynamo would compile our own frames when it meets them beside the user's. A wrapper
    (`torch.compiler.disable`) would cost each call more than an ordinary event does."""
    torch_internals.trace_rules.add("kilter")


class Swapper(AbstractContextManager["Swapper"]):
    """Keeps the training inside the `with` block within `budget_bytes` of device memory.

    `link` is the measured table of this machine. Storages below `min_bytes` are left alone. What
    goes wrong in here ends at the `fence`, where there is one: from then on tensors are only
    fetched.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        budget_bytes: int,
        link: Link,
        planner: str = "mix",
        min_bytes: int = MIB,
        fence: Fence | None = None,
        segments: bool = False,
        alone_s: float = 0.0,
    ) -> None:
        """With `segments` what calls of modules saved may be recomputed as a whole. In plans each
        tensor that is recomputed alone or offloaded counts `alone_s` of the host's time."""
        self._collector = Collector()
        self._store = Store(backend, guard=called if fence is None else fence.run)
        self._demand = Demand(self._store)
        self.budget_bytes = budget_bytes
        """The next plans are made for this budget."""
        self.may_plan = True
        """If False, no plans are made: passes are watched, tensors are offloaded on demand."""
        terms = PlanTerms(link=link, planner=planner, min_bytes=min_bytes, alone_s=alone_s)
        self._kinds = PassKinds(self._store, terms)
        self._next = NextPass(self._kinds)
        self._planned = PassUnderPlan(
            self._store, self._kinds, self._demand, self._collector, self._next_event
        )
        self._planned.segments.on = segments
        self.hooks = TensorHooks(
            self._store, backend.device, min_bytes, self._save, self._use, fence
        )
        self._fence = fence
        self._entered = ExitStack()
        """It has what is to be done when the block is left."""
        self._open = False
        """A pass has begun and has not ended."""
        self._boundary = False
        """An optimizer has stepped since: what is saved next begins another pass."""
        self._watch: Watch | None = None
        """It watches the present pass."""

    # Begin and end

    def __enter__(self) -> Swapper:
        if self._store.closing:  # used before: its plans and host memory are gone
            self._kinds.forget(arena=True)
            self._store.reopen()
        leave_uncompiled()
        entered = self._entered
        self.hooks.enter()
        entered.callback(self.hooks.exit)
        entered.enter_context(BackwardCalls(self.hooks, self._saves_no_more))
        entered.enter_context(Reach(self._store))
        self._planned.segments.enter()
        entered.callback(self._planned.segments.exit)
        entered.callback(
            optimizer_steps.listen(
                before=self._fenced(self._before_step), after=self._fenced(self._after_step)
            )
        )
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop observing. Graphs that are still alive stay usable: their tensors are fetched."""
        self._entered.close()
        self._store.norms.close()
        self._collector.let_go()
        if self._store.within() is None:
            self._end_pass()
        self._planned.leave()
        self._watch = None
        self._store.closing = True
        if self._store.counts.alive == 0:
            self._store.backend.close()

    @property
    def captured(self) -> bool:
        """The program's operations are being captured into a graph, to be played later."""
        return self._store.backend.stream() is None

    @property
    def tried(self) -> bool:
        """A kind of pass is known well enough to be planned."""
        return any(kind.tried for kind in self._kinds)

    @property
    def planned(self) -> bool:
        """The present pass runs under a plan, or the last one did."""
        return self._planned.plan is not None

    @property
    def watching(self) -> bool:
        """The present pass is watched, or the last one was."""
        return self._watch is not None

    @property
    def beside_peak_bytes(self) -> int | None:
        """At an iteration end: the most in use since backward needed its last tensor, as in the
        optimizer's step; None unless the last pass was measured, and ran under its plan."""
        planned = self._planned
        if planned.plan is None or not planned.measured or planned.deviated:
            return None
        return self._store.backend.peak_so_far_bytes()

    @property
    def event(self) -> int | None:
        """Operation of the present pass that is being issued, where that is known."""
        if self._planned.plan is not None:
            return self._planned.at.event - 1
        return None if self._watch is None else self._watch.event

    def _saves_no_more(self) -> bool:
        """The pass is under a plan, by which no tensor is saved any more."""
        plan = self._planned.plan
        return plan is not None and not self._boundary and self._planned.at.event > plan.last_save

    def _next_event(self) -> int | None:
        """The number that the next event of the present pass has; None outside of passes."""
        outside = not self._open or self._boundary or self._store.within() is None
        event = None if outside else self.event
        return None if event is None else event + 1

    @property
    def offload_above_bytes(self) -> int:
        """Bytes in use above which tensors are offloaded on demand in the next pass."""
        peak_bytes = None if self._watch is None else self._watch.peak_bytes
        return self._demand.offload_above_bytes(self.budget_bytes, peak_bytes)

    def report(self) -> SwapReport:
        counts, store = self._planned.counts, self._store
        plans = tuple(kind.plan.value for kind in self._kinds if kind.plan)
        return SwapReport(
            passes=counts.passes,
            planned=counts.planned,
            watched=counts.watched,
            watched_every=self._kinds.attention.every,
            serves_sizes=self._next.sizes.serves,
            tries_sizes=self._next.sizes.tries,
            deviations=counts.deviations,
            late=counts.late,
            hastened=self._kinds.hastened,
            waited_s=self._kinds.waited_s,
            spilled=self._demand.spilled,
            recomputed=store.counts.recomputed,
            out_bytes=store.counts.out_bytes,
            in_bytes=store.counts.in_bytes,
            host_bytes=self._kinds.host_bytes + store.pool.taken_bytes,
            held_peak_bytes=counts.held_peak_bytes,
            plans=plans,
            settled=bool(plans) and all(kind.settled for kind in self._kinds),
            hopeless=any(kind.hopeless for kind in self._kinds),
            highest_bytes=self._kinds.highest_bytes,
            most_bytes=self._kinds.peaks.most_bytes,
            peaks_bytes=tuple(self._kinds.peaks.planned_bytes),
            refused=(*self._kinds.refused, *self._demand.refused.values()),
        )

    def limit(self, budget_bytes: int) -> None:
        """Plan passes for this budget from here on."""
        if self._store.within() is None:
            self._end_pass()  # its peak was under the budget before
        self.budget_bytes, self.may_plan = budget_bytes, True
        self._kinds.outdate()

    def records(self) -> tuple[PassRecord, ...]:
        """What was observed, one record for each kind of pass."""
        return tuple(kind.record for kind in self._kinds)

    def largest_pass(self) -> PassRecord | None:
        """The record of the kind of pass with the largest plain peak; one that never came again
        counts only while none has."""
        records = self.records()
        again = [record for record in records if record.passes > 1]
        return max(again or records, key=lambda record: record.peak_bytes, default=None)

    def plans(self) -> tuple[PassPlan, ...]:
        """One for each kind of pass with a plan."""
        return tuple(
            PassPlan(kind.record, ready.value, ready.problem, ready.numbers, kind.segments)
            for kind in self._kinds
            if (ready := kind.plan) is not None
        )

    # Hooks

    def _fenced(self, hook: Callable[..., None]) -> Callable[..., None]:
        return hook if self._fence is None else self._fence(hook)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.before_update(p for group in optimizer.param_groups for p in group["params"])

    def before_update(self, parameters: Iterable[torch.Tensor]) -> None:
        """Recompute now what a graph that outlives the update needs from the old parameters."""
        for parameter in parameters:
            self._store.recompute_dependents(parameter)

    def forget(self) -> None:
        """Weights take another amount of device memory from now on: watch, try and plan anew."""
        self._begin_anew(self._kinds.forget)

    def exchange(self, others: Kinds | None) -> Kinds:
        """Passes save other tensors from now on: those of `others`, which an earlier call gave, or
        such as are still to be watched. Gives what is known of the present kinds of passes."""
        before: list[Kinds] = []
        self._begin_anew(lambda: before.append(self._kinds.exchange(others, self.budget_bytes)))
        return before[0]

    def weigh_anew(self, state: Visits | None = None, events: tuple[int, ...] = ()) -> None:
        """Gradients or optimizer state take another amount of device memory from now on, and in
        passes with these events state streams like this: watch and plan anew."""
        self._begin_anew(partial(self._kinds.weigh_anew, state, events))

    def _begin_anew(self, change: Callable[[], None]) -> None:
        if self._store.within() is None:
            self._end_pass()
        change()
        self._next.forget()

    @property
    def recomputes_calls(self) -> bool:
        """A plan recomputes calls of modules, or parts of them."""
        return any(kind.plan is not None and kind.plan.segments for kind in self._kinds)

    def kept_calls(self) -> tuple[KeptCalls, ...]:
        """Those that plans recompute, for another run of the same job."""
        return self._kinds.kept_calls()

    def recompute(
        self, *, calls: bool, each_s: float = 0.0, kept: Iterable[KeptCalls] = ()
    ) -> None:
        """In the thread of `enter`: from the next pass on recompute calls of modules where a plan
        gains by it, which are tried first, or single operations alone. `each_s` is what the host
        takes for a tensor that is recomputed alone or offloaded, beyond what every plan counts;
        `kept` are the calls that an earlier run has chosen."""
        if self._store.within() is None:
            self._end_pass()
        else:  # in the middle of a pass, which counts on calls being seen
            self._planned.depart()
        self._planned.segments.switch(on=calls)
        self._kinds.recompute(calls=calls, each_s=each_s, kept=kept)
        self._next.forget()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.hooks.in_thread and torch_internals.current_graph_task() == -1:
            return  # another training, whose steps do not end passes of this one
        self._next.steps += 1
        if torch_internals.current_graph_task() == -1:  # backward undoes what happens within it
            self.hooks.hand_over()
        self._collector.let_go()  # a cycle of unused objects may keep the pass alive
        self._boundary = self._store.within() is not None
        if self._boundary:  # what is saved next begins a pass
            self._planned.stepped()

    # Events

    def _save(self, tensor: torch.Tensor, size_bytes: int, key: int) -> Any:
        """A tensor is saved, on a large storage with this address."""
        store = self._store
        within, stream = store.within(), store.backend.stream()
        if stream is None:
            return kept(tensor)
        if within is None or self._boundary:
            self._end_pass()
            within = self._begin_pass(size_bytes, stream)
        elif stream != within.stream:
            return kept(tensor)
        packed = self._planned.save(tensor, size_bytes, key, within)
        if packed is None:
            return self._save_unplanned(tensor, size_bytes, key, within)
        return packed

    def _save_unplanned(
        self, tensor: torch.Tensor, size_bytes: int, key: int, within: Pass
    ) -> View:
        store, watch = self._store, self._watch
        saved = store.find(tensor, key, within)
        if watch is not None:
            watch.enter(size_bytes if saved is None else again_code(saved.number), used=False)
        self._demand.before_save(self.budget_bytes, size_bytes if saved is None else 0)
        if saved is None:
            number = self._demand.number if watch is None else watch.saved
            saved = store.save(tensor, size_bytes, key, within, number)
            if watch is not None:
                watch.save(saved, tensor)
            self._demand.saved(saved)
        if watch is not None:
            watch.leave()
        return store.view(saved, tensor)

    def _use(self, packed: Any) -> torch.Tensor:
        """Backward needs a large tensor."""
        store, demand = self._store, self._demand
        view = type(packed) is View
        missing_bytes = 0
        if view:
            saved = packed[0]
            now = saved.within is store.within()
            code = use_code(saved.number) if now else FOREIGN
            missing_bytes = saved.size_bytes if saved.state == EVICTED else 0
        else:
            code = packed[3] if packed[4] is store.within() else FOREIGN
        planned, watch = self._planned.use(code), self._watch
        if watch is not None:
            watch.enter(code, used=True)
        demand.before_use(self.budget_bytes, missing_bytes)
        if planned and view:
            self._planned.note_late(saved)
        if not view:
            tensor = whole(packed)
        elif torch_internals.graph_task_keeps_graph():
            tensor = self._lend(packed)
        else:
            tensor = store.hand_out(packed)
        if planned:
            self._planned.used(self.budget_bytes)
        elif view and now:
            demand.used(saved, self.budget_bytes)
            if watch is not None:
                watch.use(saved)
                self._planned.segments.use(saved)
        if watch is not None:
            watch.leave()
        return tensor

    def _lend(self, view: View) -> torch.Tensor:
        """Hand out a tensor in a backward that retains its graph. The tensor is offloaded again if
        the budget would be reached with another one as large."""
        tensor, saved = self._store.lend(view), view.saved
        if self._demand.lend(saved, self.budget_bytes) and self._planned.deviated:
            self._kinds.retain()
        return tensor

    # Passes

    def _begin_pass(self, first: int, stream: int) -> Pass:
        """The first event of a pass is this one, on this stream."""
        store, planned = self._store, self._planned
        self._open, self._boundary = True, False
        self._demand.begin(first)
        within = store.begin(stream, self._pass_is_over)
        self._collector.hold()
        candidate, watched, plan, may_differ = self._next.begin(
            first,
            self.budget_bytes,
            may_plan=self.may_plan,
            older_in_arena=planned.older_in_arena(),
            older_bytes=store.counts.followed_bytes,
        )
        if candidate is not None:
            candidate.trials += 1
            store.norms.find()
        if watched:
            planned.counts.watched += 1
            self._watch = Watch(
                store,
                trial=None if candidate is None else candidate.trial_terms(self.budget_bytes),
                after_step=self._next.steps > 0,
            )
        elif plan is None:
            self._collector.let_go()
        use_library = self.hooks.use_library
        planned.begin(plan, self.budget_bytes, use_library, may_differ=may_differ)
        planned.segments.begin_pass(self._watch, plan)
        return within

    def _pass_is_over(self) -> None:
        """Nothing that was saved in the present pass is left."""
        self._collector.let_go()
        if not self._open or self._watch is not None:
            return
        if self._planned.plan is not None:
            self._planned.over(self.budget_bytes)
            return
        peak_bytes = self._store.backend.peak_bytes()
        if peak_bytes is not None:
            self._demand.learn(peak_bytes, self.budget_bytes)
            self._kinds.peaks.counted(None, peak_bytes)

    def _end_pass(self) -> None:
        if not self._open:
            return
        self._open = False
        self._collector.let_go()
        planned, watch = self._planned, self._watch
        planned.counts.passes += 1
        events = planned.end()
        tangents = self.hooks.tangents
        if tangents:
            reason = messages.tangents_stay(sum(tangents.values()))
            self._demand.refused.setdefault(reason.code, reason)
            tangents.clear()
        if watch is not None:
            watch.over()
            record = watch.record()
            if record.whole:
                events = record.events
                self._file(watch, record)
        self._next.ended(
            events, planned.at.event, deviated=planned.deviated, watched=watch is not None
        )
        self._watch = None

    def _file(self, watch: Watch, record: PassRecord) -> None:
        self._kinds.refused |= watch.refused
        if watch.trial is not None:
            self._kinds.tried(record, operations=watch.trial.terms.operations)
            return
        self._kinds.watched(record, weighed=watch.after_step)
        self._demand.learn(watch.peak_bytes, self.budget_bytes)
        self._kinds.peaks.counted(None, watch.peak_bytes)
