"""Less memory for gradients and optimizer state: the optimizer's work is done in buckets.

*Optimizer state streams.* Between its visits a bucket's state lies in host memory, where it can be
read and written as before (`stream.py`). Inside `optimizer.step()` the buckets are prefetched,
updated and offloaded one after the other. That is right for any program.

*Gradients are consumed as they arrive*, where the user says so. When the last gradient of a bucket
has been accumulated, the optimizer's own step is run on its parameters, inside backward, and the
gradients are freed; the bucket's state is prefetched beside the computation. The program's own
`optimizer.step()` then has nothing left to do for them. What a later iteration does between
backward and step cannot be known before: a new learning rate, a skipped step. So gradients are
consumed only if the user asked for it, the watched iterations did nothing of the kind, and the
optimizer treats each parameter on its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from kilter.core.errors import UsageError
from kilter.core.plan import GRADIENTS
from kilter.core.reasons import Reason
from kilter.core.units import MIB
from kilter.memory import messages
from kilter.memory.engine.backend import Backend
from kilter.memory.engine.engine import leave_uncompiled
from kilter.memory.engine.fenced_hook import fenced_hook
from kilter.memory.engine.gone import when_gone
from kilter.memory.engine.governed_optimizer import GovernedOptimizer, GradientPhase
from kilter.memory.engine.gradient_hooks import GradientHooks
from kilter.memory.engine.gradients import Followed, GradientConsumed, GradientPlace, Gradients
from kilter.memory.engine.rounds import Rounds
from kilter.memory.engine.stream import StateBucket, Stream, Where, size_of
from kilter.memory.plan.problem import Link
from kilter.memory.plan.state import STEP_VISITS, VISITS, StatePlan, Update, Visits, in_buckets
from kilter.observe import optimizer_steps, torch_internals

if TYPE_CHECKING:
    from kilter.session.fence import Fence

WATCHED_STEPS = 3
"""A loop is watched for so many optimizer steps."""
KEPT = {
    "auto": messages.LATER_ITERATIONS,
    "consume": None,
    "keep": messages.AS_ASKED,
}
"""Why gradients are kept, by what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """What happened so far, and how it stands now."""

    consuming: bool
    """Gradients of at least one optimizer are consumed in backward."""
    watching: bool
    """Whether that is so is not decided yet for at least one optimizer."""
    visits: int
    """So many buckets are updated in backward."""
    late: int
    """So many visits found their state offloaded and had to fetch it."""
    out_bytes: int
    in_bytes: int
    host_bytes: int
    gradient_bytes: int
    """Gradients take at most this now; without consuming, it is all of them."""
    state_bytes: int
    """So much state is on the device between visits."""
    offloaded_bytes: int
    """So much state is on the host between visits."""
    step_wait_s: float
    """Predicted: the program's own steps wait so long for state, in which gradients are kept."""
    plans: tuple[StatePlan, ...]
    refused: tuple[Reason, ...]
    """Why gradients are kept or state stays."""


class StateMover(AbstractContextManager["StateMover"]):
    """Keeps gradients and optimizer state off the device while nothing needs them.

    With `room_bytes`, at most so much optimizer state is on the device at any time, from the first
    step on; without, all of it stays. With `gradients="consume"` gradients are consumed as they
    arrive, unless the watched iterations give a reason not to; otherwise they are kept.

    `before_update` is called with parameters that are about to change, `changed` when gradients and
    state take another amount of memory from now on. `event` gives the operation of the pass that is
    being issued, where that is known.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        link: Link,
        gradients: str = "auto",
        room_bytes: int | None = None,
        bucket_bytes: int | None = None,
        min_bytes: int = MIB // 16,
        before_update: Callable[[Iterable[torch.Tensor]], None] | None = None,
        changed: Callable[[], None] | None = None,
        event: Callable[[], int | None] | None = None,
        fence: Fence | None = None,
    ) -> None:
        if gradients not in GRADIENTS:
            raise UsageError(f"gradients {gradients!r} is not one of {', '.join(GRADIENTS)}")
        self._backend = backend
        self._stream = Stream(backend, min_bytes)
        self._kept = KEPT[gradients]
        """Why no gradients are consumed; None: they may be."""
        self.room_bytes = room_bytes
        """May be changed; what follows from it is done after the next step."""
        self._bucket_bytes = bucket_bytes
        self._changed = changed or (lambda: None)
        self._event = event or (lambda: None)
        self._fence = fence
        self._optimizers: weakref.WeakKeyDictionary[Any, GovernedOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        self._access = Gradients()
        self._hooks = GradientHooks(self._fenced(self._arrived))
        self._leave_steps: Callable[[], None] = lambda: None
        self._guard: Any = None
        """It guards modules, between the first gradient and the step."""
        self._visits = 0
        self._rounds = Rounds(
            backend, self._stream, link, self._access, before_update, self._changed
        )

    # Begin and end

    def __enter__(self) -> StateMover:
        self._access.__enter__()
        if self._kept is not None:
            self._access.ignore()
            self._hooks.remove()
        else:
            self._hooks.search(self._fenced)
        self._leave_steps = optimizer_steps.listen(before=self._fenced(self._meet))
        leave_uncompiled()
        return self

    def __exit__(self, *exception: object) -> None:
        """Make all state resident, and stop watching gradients."""
        for governed in self._optimizers.values():
            if governed.took:
                governed.say(messages.NO_STEP_FOLLOWED)
            self._unstash(governed)
            self._rounds.fetch_all(governed)
            for handle in governed.handles:
                handle.remove()
        self._leave_steps()
        self._hooks.stop_search()
        self._let_gradients_be()
        self._backend.close()

    def _unguard(self) -> None:
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def _rest(self) -> None:
        """Stop watching gradients once no optimizer's may be consumed."""
        if all(governed.phase is GradientPhase.KEEPING for governed in self._optimizers.values()):
            self._let_gradients_be()

    def _let_gradients_be(self) -> None:
        self._kept = self._kept or messages.EARLIER_OPTIMIZERS
        self._unguard()
        self._hooks.remove()
        self._access.ignore()

    def report(self) -> StateReport:
        optimizers = list(self._optimizers.values())
        buckets = [b for governed in optimizers for b in governed.state.buckets]
        offloaded_bytes = sum(b.size_bytes for b in buckets if b.where is Where.OFFLOADED)
        return StateReport(
            consuming=any(c.phase is GradientPhase.CONSUMING for c in optimizers),
            watching=any(c.phase is GradientPhase.WATCHING for c in optimizers) or not optimizers,
            visits=self._visits,
            late=self._rounds.late,
            out_bytes=self._stream.out_bytes,
            in_bytes=self._stream.in_bytes,
            host_bytes=self._stream.host_bytes,
            gradient_bytes=sum(self._gradient_bytes(c) for c in optimizers),
            state_bytes=sum(b.size_bytes for b in buckets) - offloaded_bytes,
            offloaded_bytes=offloaded_bytes,
            step_wait_s=sum(
                c.state.plan.stall_s
                for c in optimizers
                if c.state.plan is not None and c.phase is GradientPhase.KEEPING
            ),
            plans=tuple(c.state.plan for c in optimizers if c.state.plan is not None),
            refused=tuple(dict.fromkeys(reason for c in optimizers for reason in c.refused)),
        )

    def _gradient_bytes(self, governed: GovernedOptimizer) -> int:
        sizes = [b.gradient_bytes for b in governed.state.buckets]
        if governed.phase is GradientPhase.CONSUMING:
            return max(sizes, default=0)
        return sum(sizes)

    def _fenced(self, hook: Callable[..., None]) -> Callable[..., None]:
        """A hook behind the fence: after an error of ours state is fetched and gradients stay."""
        return fenced_hook(self._fence, hook, GradientConsumed, self._give_up)

    def _give_up(self) -> None:
        for governed in self._optimizers.values():
            if governed.state.streams or governed.phase is not GradientPhase.KEEPING:
                governed.phase, governed.state.streams = GradientPhase.KEEPING, False
                self._rounds.fetch_all(governed)

    # Optimizers and their parameters

    def _meet(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The step of an optimizer is about to begin, perhaps its first."""
        governed = self._optimizers.get(optimizer)
        if governed is not None and not governed.altered:
            governed.stand_innermost()
            return
        self._hooks.stop_search()
        if governed is not None:
            if governed.took:
                raise GradientConsumed("the optimizer's parameters changed before the step")
            self._rounds.fetch_all(governed)
            for handle in governed.handles:
                handle.remove()
            self._forget(governed)
        governed = self._optimizers[optimizer] = self._governed(optimizer)
        governed.stand_innermost()
        self._rest()
        when_gone(optimizer, self._forget, governed)

    def take_over(self, optimizer: Any) -> None:
        """Between a step and the next forward: follow an optimizer that has made its state already,
        and offload at once what there is no room for."""
        self._meet(optimizer, (), {})
        governed = self._optimizers[optimizer]
        for f in governed.followed:
            f.steps()
        if governed.state.streams:
            self._rounds.adopt(governed)
            self._rounds.plan(governed)

    def _governed(self, optimizer: Any) -> GovernedOptimizer:
        governed = GovernedOptimizer(optimizer)
        order = self._hooks.by_arrival([p for g in optimizer.param_groups for p in g["params"]])
        reason = governed.unfit(self._backend.device, self._access.followed)
        if reason is not None:
            governed.object_to(reason)
            governed.keep_state(reason)
            return governed
        for parameter in order:
            self._hooks.follow(parameter)
            place = (
                GradientPlace.NONE if self._access.get(parameter) is None else GradientPlace.THERE
            )
            governed.followed.append(Followed(parameter, governed, place))
        self._access.followed.update((id(f.parameter), f) for f in governed.followed)
        updates = [Update(gradient_bytes=size_of(p), state_bytes=0) for p in order]
        visits = VISITS if self._kept is None else STEP_VISITS
        for number, cut in enumerate(in_buckets(updates, self._bucket_bytes, visits=visits)):
            members = order[cut.first : cut.first + cut.count]
            governed.state.buckets.append(StateBucket(members))
            governed.state.bucket_of.update((id(p), number) for p in members)
        governed.state.room_bytes = self.room_bytes
        governed.state.streams = self.room_bytes is not None
        if self._kept is not None:
            governed.object_to(self._kept)
        elif any(bucket.sharded for bucket in governed.state.buckets):
            governed.object_to(messages.SHARDED_PARAMETERS)
        governed.handles = [
            optimizer.register_step_pre_hook(self._fenced(self._before_step)),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_post_hook(self._fenced(self._after_load)),
        ]
        return governed

    def _forget(self, governed: GovernedOptimizer) -> None:
        """Its optimizer was freed, or has other parameters now."""
        for f in governed.followed:
            if self._access.followed.get(id(f.parameter)) is f:
                del self._access.followed[id(f.parameter)]
        for bucket in governed.state.buckets:
            self._stream.disown(bucket)
        governed.followed, governed.state.buckets = [], []

    # Backward

    def _arrived(self, parameter: Any) -> None:
        """A gradient was accumulated."""
        found = self._access.followed.get(id(parameter))
        if found is None:
            self._hooks.note_early(parameter)
            return
        self._access.quiet = False  # a step that raised left it so
        found.arrives()
        governed = found.owner
        if governed.phase is GradientPhase.KEEPING:
            return
        if self._guard is None:
            self._guard = register_module_forward_pre_hook(self._module_runs)
        gradient = self._access.get(parameter)
        assert gradient is not None
        if torch_internals.graph_task_keeps_graph() and not governed.took:
            governed.object_to(messages.GRAPH_KEPT)
            governed.state.anew = True
            return
        if governed.evidence.settings is None:
            governed.evidence.settings = governed.options()
        governed.evidence.arrived(parameter, self._event)
        if governed.phase is GradientPhase.WATCHING:
            governed.evidence.marks.append((id(parameter), self._backend.mark()))
            governed.watch(parameter, gradient)
            return
        self._count_down(governed, parameter, gradient)

    def _count_down(
        self, governed: GovernedOptimizer, parameter: Any, gradient: torch.Tensor
    ) -> None:
        """Visit the bucket of this parameter if its gradient is the last one there."""
        number = governed.state.bucket_of[id(parameter)]
        bucket = governed.state.buckets[number]
        bucket.missing -= 1
        if gradient.requires_grad or gradient.layout is not torch.strided:
            bucket.missing = len(bucket.members) + 1  # left to the step
        if not governed.round.open:
            if governed.altered:
                governed.object_to(messages.OTHER_PARAMETERS)
                return
            self._rounds.begin(governed)
        if bucket.missing == 0:
            self._visits += 1
            self._rounds.visit(governed, number, keep=False)

    def _module_runs(self, module: Any, inputs: Any) -> None:
        """Between the first gradient and the step only checkpointing runs modules, and only such
        whose gradients have not arrived."""
        for parameter in module._parameters.values():
            found = self._access.followed.get(id(parameter))
            if found is not None:
                found.runs()

    # The step

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        governed = self._optimizers[optimizer]
        self._unguard()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            self._before_closure(governed)
            return
        if governed.phase is GradientPhase.WATCHING:
            governed.judge(self._access.get, self._backend.device.type)
        elif governed.took:
            self._check_unchanged(governed)
        for f in governed.followed:
            f.steps()
        if governed.phase is GradientPhase.KEEPING and self._to_plan(governed):
            self._rounds.look(governed)
        if governed.state.streams:
            if not governed.round.open:
                self._rounds.begin(governed)
            self._rounds.visit_in_step(governed)
        if governed.step_seen.looks:
            left_bytes = self._rounds.gradient_bytes(f.parameter for f in governed.followed)
            governed.step_seen.own_step_begins(self._backend.mark(), left_bytes)
        self._access.quiet = True

    def _to_plan(self, governed: GovernedOptimizer) -> bool:
        """After this step it is planned how its state streams."""
        unplanned = governed.state.plan is None or self._outdated(governed)
        return governed.fit and self.room_bytes is not None and unplanned

    def _outdated(self, governed: GovernedOptimizer) -> bool:
        """Its plan is of another room, or for other state."""
        return governed.state.anew or self.room_bytes != governed.state.room_bytes

    def _check_unchanged(self, governed: GovernedOptimizer) -> None:
        """The step is to be the one that the updates in backward were made for."""
        if governed.evidence.settings != governed.options():
            raise GradientConsumed("the optimizer's options changed between backward and step")
        if getattr(governed.optimizer, "grad_scale", None) is not None:
            raise GradientConsumed("gradients are to be unscaled")
        if self._rounds.written(governed):
            raise GradientConsumed("optimizer state was changed between backward and step")

    def _before_closure(self, governed: GovernedOptimizer) -> None:
        if governed.took:
            raise GradientConsumed("optimizer.step was given a closure")
        governed.object_to(messages.CLOSURE)
        if governed.state.streams:
            governed.keep_state(messages.CLOSURE)
            self._rounds.fetch_all(governed)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        governed = self._optimizers[optimizer]
        self._access.quiet = False
        self._unstash(governed)
        if self._fence is None:
            self._settle(governed)
        elif not self._fence.down:
            self._fence.run(self._settle, governed)

    def _settle(self, governed: GovernedOptimizer) -> None:
        """Between a step and the next backward: decide what the next iteration does."""
        governed.steps += 1
        if governed.step_seen.looks:
            governed.step_seen.ended(self._backend.mark(), self._backend.elapsed_s)
        self._rounds.end(governed)
        governed.evidence.end(self._backend.elapsed_s)
        armed = governed.phase is GradientPhase.WATCHING and governed.steps >= WATCHED_STEPS
        if armed:
            governed.phase = GradientPhase.CONSUMING
            for bucket in governed.state.buckets:
                bucket.missing = bucket.awaited = sum(
                    id(p) in governed.evidence.seen for p in bucket.members
                )
        if governed.fit and self._outdated(governed):
            governed.state.anew, governed.state.room_bytes = False, self.room_bytes
            governed.state.streams = self.room_bytes is not None
            if not governed.state.streams:
                self._rounds.fetch_all(governed)
            governed.state.plan = None
        governed.order_state()
        if governed.steps == 1:
            self._rounds.adopt(governed)
        if governed.state.streams and (armed or governed.state.plan is None):
            self._rounds.plan(governed)
        consuming = governed.phase is GradientPhase.CONSUMING
        if consuming != governed.told:
            self._changed()
        governed.told = consuming
        self._rest()
        governed.evidence.forget()

    def visits(self) -> Visits | None:
        """What streams, or could, beside the computation: the state of the only optimizer, if its
        gradients are consumed and it is known where in the pass they arrive."""
        optimizers = [governed for governed in self._optimizers.values() if governed.followed]
        if len(optimizers) != 1 or optimizers[0].phase is not GradientPhase.CONSUMING:
            return None
        (governed,) = optimizers
        at = []
        for bucket in governed.state.buckets:
            found = [
                governed.evidence.at[id(p)] for p in bucket.members if id(p) in governed.evidence.at
            ]
            if not found:
                return None
            at.append(max(found))
        if at != sorted(at):
            return None
        return Visits(self._rounds.cuts(governed), at, governed.state.plan)

    def keep_within(self, budget_bytes: int) -> None:
        """State that comes back for a step has room up to this budget."""
        self._rounds.budget_bytes = budget_bytes

    def make_room(self, room_bytes: int, chosen: StatePlan | None = None) -> None:
        """From the next step on at most `room_bytes` of state are on the device. The state of the
        only optimizer may have a plan already, `chosen` together with that of the pass."""
        self.room_bytes = room_bytes
        for governed in self._optimizers.values():
            governed.state.chosen = chosen
            governed.state.anew = True

    def _unstash(self, governed: GovernedOptimizer) -> None:
        for parameter, gradient in governed.stash:
            self._access.put(parameter, gradient)
        governed.stash.clear()

    # Checkpoints

    def _before_state_dict(self, optimizer: Any) -> None:
        if self._optimizers[optimizer].took:
            raise GradientConsumed("state_dict was asked for between backward and step")

    def _after_load(self, optimizer: Any) -> None:
        """The program has loaded other state, which may be more than there is room for."""
        governed = self._optimizers[optimizer]
        governed.state.plan = None
        for bucket in governed.state.buckets:
            bucket.streamed = False
            self._stream.adopt(bucket, optimizer.state)
            if governed.state.streams:
                self._rounds.shed(governed)
