"""Below the floor of weights, gradients and optimizer state: the optimizer's work in buckets.

*Optimizer state streams.* Between its visits a bucket's state lies in host memory, where it can be
read and written like before (`stream.py`). Inside `optimizer.step()` the buckets are prefetched,
updated and offloaded one after the other. That is right for any program.

*Gradients are consumed as they arrive*, where the user says so. When the last gradient of a bucket
has been accumulated, the optimizer's own step is run on its parameters, inside backward, and the
gradients are freed; the bucket's state is prefetched beside the computation.
`optimizer.step()` of the program then finds nothing left to do for them. What a later iteration
does between backward and step cannot be known before: a new learning rate, a skipped step. So this
is done only for a user who asked for it, a loop that was watched and did nothing of the kind, and
an optimizer that treats each parameter on its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from kilter.core.errors import UsageError
from kilter.core.plan import GRADIENTS
from kilter.core.reasons import Reason
from kilter.core.units import MIB
from kilter.memory import messages
from kilter.memory.engine.backend import Backend
from kilter.memory.engine.charge import Charge, PassPhase
from kilter.memory.engine.engine import leave_uncompiled
from kilter.memory.engine.fenced_hook import fenced_hook
from kilter.memory.engine.gone import when_gone
from kilter.memory.engine.gradient_hooks import GradientHooks
from kilter.memory.engine.gradients import Followed, GradientConsumed, GradientPlace, Gradients
from kilter.memory.engine.rounds import Rounds
from kilter.memory.engine.stream import StateBucket, Stream, Where, size_of
from kilter.memory.plan.problem import Link
from kilter.memory.plan.state import Bucket, StatePlan, Update, in_buckets
from kilter.observe import optimizer_steps, torch_internals

if TYPE_CHECKING:
    from kilter.session.fence import Fence

WATCHED_STEPS = 3
"""Optimizer steps that a loop is watched for."""
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
    """Gradients of at least one optimizer are used up in backward."""
    watching: bool
    """It is not decided yet for another optimizer."""
    visits: int
    """Buckets updated in backward."""
    late: int
    """Visits that found their state offloaded and fetched it then and there."""
    out_bytes: int
    in_bytes: int
    host_bytes: int
    gradient_bytes: int
    """The most that gradients take now; without consuming, all of them."""
    state_bytes: int
    """State on the device between visits."""
    away_bytes: int
    """State on the host between visits."""
    plans: tuple[StatePlan, ...]
    refused: tuple[Reason, ...]
    """Why gradients are kept or state stays."""


class Visits(NamedTuple):
    """Buckets of state in the order of their visits."""

    buckets: tuple[Bucket, ...]
    at: tuple[int, ...]
    """Operations of the pass in which their last gradients arrive."""
    plan: StatePlan | None
    """By which they stream now."""


class StateMover(AbstractContextManager["StateMover"]):
    """Keeps gradients and optimizer state off the device while nothing needs them.

    With `room_bytes`, at most so much optimizer state is on the device at any time, from the first
    step on; without, all of it stays. With `gradients="consume"` they are used up as they arrive,
    unless the watched iterations give a reason not to; otherwise they are kept.

    `before_update` is told which parameters are about to change, `changed` that the memory which
    gradients and state take is another from now on. `event` tells which operation of the pass is
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
        self._charges: weakref.WeakKeyDictionary[Any, Charge] = weakref.WeakKeyDictionary()
        self._access = Gradients()
        self._hooks = GradientHooks(self._fenced(self._arrived))
        self._leave_steps: Callable[[], None] = lambda: None
        self._guard: Any = None
        """On modules, between the first gradient and the step."""
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
        """Have all state on the device, and leave gradients alone."""
        for charge in self._charges.values():
            if charge.took:
                charge.say(messages.NO_STEP_FOLLOWED)
            self._unstash(charge)
            self._rounds.bring_home(charge)
            for handle in charge.handles:
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
        if all(charge.phase is PassPhase.KEEPING for charge in self._charges.values()):
            self._let_gradients_be()

    def _let_gradients_be(self) -> None:
        self._kept = self._kept or messages.EARLIER_OPTIMIZERS
        self._unguard()
        self._hooks.remove()
        self._access.ignore()

    def report(self) -> StateReport:
        charges = list(self._charges.values())
        buckets = [b for charge in charges for b in charge.state.buckets]
        away_bytes = sum(b.size_bytes for b in buckets if b.where is Where.OFFLOADED)
        return StateReport(
            consuming=any(c.phase is PassPhase.CONSUMING for c in charges),
            watching=any(c.phase is PassPhase.WATCHING for c in charges) or not charges,
            visits=self._visits,
            late=self._rounds.late,
            out_bytes=self._stream.out_bytes,
            in_bytes=self._stream.in_bytes,
            host_bytes=self._stream.host_bytes,
            gradient_bytes=sum(self._gradient_bytes(c) for c in charges),
            state_bytes=sum(b.size_bytes for b in buckets) - away_bytes,
            away_bytes=away_bytes,
            plans=tuple(c.state.plan for c in charges if c.state.plan is not None),
            refused=tuple(dict.fromkeys(reason for c in charges for reason in c.refused)),
        )

    def _gradient_bytes(self, charge: Charge) -> int:
        sizes = [b.gradient_bytes for b in charge.state.buckets]
        if charge.phase is PassPhase.CONSUMING:
            return max(sizes, default=0)
        return sum(sizes)

    def _fenced(self, hook: Callable[..., None]) -> Callable[..., None]:
        """A hook behind the fence: after an error of ours state comes back and gradients stay."""
        return fenced_hook(self._fence, hook, GradientConsumed, self._give_up)

    def _give_up(self) -> None:
        for charge in self._charges.values():
            if charge.state.streams or charge.phase is not PassPhase.KEEPING:
                charge.phase, charge.state.streams = PassPhase.KEEPING, False
                self._rounds.bring_home(charge)

    # Optimizers and their parameters

    def _meet(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The step of an optimizer is about to begin, perhaps its first."""
        charge = self._charges.get(optimizer)
        if charge is not None and not charge.altered:
            charge.stand_innermost()
            return
        self._hooks.stop_search()
        if charge is not None:
            if charge.took:
                raise GradientConsumed("the optimizer's parameters changed before the step")
            self._rounds.bring_home(charge)
            for handle in charge.handles:
                handle.remove()
            self._forget(charge)
        charge = self._charges[optimizer] = self._charged(optimizer)
        charge.stand_innermost()
        self._rest()
        when_gone(optimizer, self._forget, charge)

    def take_over(self, optimizer: Any) -> None:
        """Between a step and the next forward: follow an optimizer that has made its state already,
        and offload at once what there is no room for."""
        self._meet(optimizer, (), {})
        charge = self._charges[optimizer]
        for f in charge.followed:
            f.steps()
        if charge.state.streams:
            self._rounds.adopt(charge)
            self._rounds.plan(charge)

    def _charged(self, optimizer: Any) -> Charge:
        charge = Charge(optimizer)
        order = self._hooks.by_arrival([p for g in optimizer.param_groups for p in g["params"]])
        reason = charge.unfit(self._backend.device, self._access.followed)
        if reason is not None:
            charge.object_to(reason)
            charge.keep_state(reason)
            return charge
        for parameter in order:
            self._hooks.follow(parameter)
            place = (
                GradientPlace.NONE if self._access.get(parameter) is None else GradientPlace.THERE
            )
            charge.followed.append(Followed(parameter, charge, place))
        self._access.followed.update((id(f.parameter), f) for f in charge.followed)
        updates = [Update(gradient_bytes=size_of(p), state_bytes=0) for p in order]
        for number, cut in enumerate(in_buckets(updates, self._bucket_bytes)):
            members = order[cut.first : cut.first + cut.count]
            charge.state.buckets.append(StateBucket(members))
            charge.state.bucket_of.update((id(p), number) for p in members)
        charge.state.room_bytes = self.room_bytes
        charge.state.streams = self.room_bytes is not None
        if self._kept is not None:
            charge.object_to(self._kept)
        elif any(bucket.sharded for bucket in charge.state.buckets):
            charge.object_to(messages.SHARDED_PARAMETERS)
        charge.handles = [
            optimizer.register_step_pre_hook(self._fenced(self._before_step)),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_post_hook(self._fenced(self._after_load)),
        ]
        return charge

    def _forget(self, charge: Charge) -> None:
        """Its optimizer is gone, or has other parameters now."""
        for f in charge.followed:
            if self._access.followed.get(id(f.parameter)) is f:
                del self._access.followed[id(f.parameter)]
        for bucket in charge.state.buckets:
            self._stream.disown(bucket)
        charge.followed, charge.state.buckets = [], []

    # Backward

    def _arrived(self, parameter: Any) -> None:
        """A gradient was accumulated."""
        found = self._access.followed.get(id(parameter))
        if found is None:
            self._hooks.note_early(parameter)
            return
        self._access.quiet = False  # a step that raised left it so
        found.arrives()
        charge = found.owner
        if charge.phase is PassPhase.KEEPING:
            return
        if self._guard is None:
            self._guard = register_module_forward_pre_hook(self._module_runs)
        gradient = self._access.get(parameter)
        assert gradient is not None
        if torch_internals.graph_task_keeps_graph() and not charge.took:
            charge.object_to(messages.GRAPH_KEPT)
            charge.state.anew = True
            return
        if charge.evidence.settings is None:
            charge.evidence.settings = charge.options()
        charge.evidence.arrived(parameter, self._event)
        if charge.phase is PassPhase.WATCHING:
            charge.evidence.marks.append((id(parameter), self._backend.mark()))
            charge.watch(parameter, gradient)
            return
        self._count_down(charge, parameter, gradient)

    def _count_down(self, charge: Charge, parameter: Any, gradient: torch.Tensor) -> None:
        """Visit the bucket of this parameter if its gradient is the last one there."""
        number = charge.state.bucket_of[id(parameter)]
        bucket = charge.state.buckets[number]
        bucket.missing -= 1
        if gradient.requires_grad or gradient.layout is not torch.strided:
            bucket.missing = len(bucket.members) + 1  # left to the step
        if not charge.round.open:
            if charge.altered:
                charge.object_to(messages.OTHER_PARAMETERS)
                return
            self._rounds.begin(charge)
        if bucket.missing == 0:
            self._visits += 1
            self._rounds.visit(charge, number, keep=False)

    def _module_runs(self, module: Any, inputs: Any) -> None:
        """Between the first gradient and the step only checkpointing runs modules, and only such
        whose gradients have not arrived."""
        for parameter in module._parameters.values():
            found = self._access.followed.get(id(parameter))
            if found is not None:
                found.runs()

    # The step

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        charge = self._charges[optimizer]
        self._unguard()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            self._before_closure(charge)
            return
        if charge.phase is PassPhase.WATCHING:
            charge.judge(self._access.get, self._backend.device.type)
        elif charge.took:
            self._check_unchanged(charge)
        for f in charge.followed:
            f.steps()
        if charge.state.streams:
            if not charge.round.open:
                self._rounds.begin(charge)
            for number, bucket in enumerate(charge.state.buckets):
                if bucket.streamed or charge.state.plan is None:
                    self._rounds.visit(charge, number, keep=True)
                else:  # left to the program's own step
                    self._rounds.pass_by(charge, number)
        self._rounds.end(charge)
        self._access.quiet = True

    def _check_unchanged(self, charge: Charge) -> None:
        """The step is to be the one that the updates in backward were made for."""
        if charge.evidence.settings != charge.options():
            raise GradientConsumed("the optimizer's options changed between backward and step")
        if getattr(charge.optimizer, "grad_scale", None) is not None:
            raise GradientConsumed("gradients are to be unscaled")
        if self._rounds.written(charge):
            raise GradientConsumed("optimizer state was changed between backward and step")

    def _before_closure(self, charge: Charge) -> None:
        if charge.took:
            raise GradientConsumed("optimizer.step was given a closure")
        charge.object_to(messages.CLOSURE)
        if charge.state.streams:
            charge.keep_state(messages.CLOSURE)
            self._rounds.bring_home(charge)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        charge = self._charges[optimizer]
        self._access.quiet = False
        self._unstash(charge)
        if self._fence is None:
            self._settle(charge)
        elif not self._fence.down:
            self._fence.run(self._settle, charge)

    def _settle(self, charge: Charge) -> None:
        """Between a step and the next backward: decide how it goes on."""
        charge.steps += 1
        charge.evidence.end(self._backend.elapsed_s)
        armed = charge.phase is PassPhase.WATCHING and charge.steps >= WATCHED_STEPS
        if armed:
            charge.phase = PassPhase.CONSUMING
            for bucket in charge.state.buckets:
                bucket.missing = bucket.awaited = sum(
                    id(p) in charge.evidence.seen for p in bucket.members
                )
        if charge.fit and (charge.state.anew or self.room_bytes != charge.state.room_bytes):
            charge.state.anew, charge.state.room_bytes = False, self.room_bytes
            charge.state.streams = self.room_bytes is not None
            if not charge.state.streams:
                self._rounds.bring_home(charge)
            charge.state.plan = None
        charge.order_state()
        if charge.steps == 1:
            self._rounds.adopt(charge)
        if charge.state.streams and (armed or charge.state.plan is None):
            self._rounds.plan(charge)
        consuming = charge.phase is PassPhase.CONSUMING
        if consuming != charge.told:
            self._changed()
        charge.told = consuming
        self._rest()
        charge.evidence.forget()

    def visits(self) -> Visits | None:
        """What streams, or could, beside the computation: the state of the only optimizer, if its
        gradients are consumed and it is known where in the pass they arrive."""
        charges = [charge for charge in self._charges.values() if charge.followed]
        if len(charges) != 1 or charges[0].phase is not PassPhase.CONSUMING:
            return None
        (charge,) = charges
        at = []
        for bucket in charge.state.buckets:
            found = [
                charge.evidence.at[id(p)] for p in bucket.members if id(p) in charge.evidence.at
            ]
            if not found:
                return None
            at.append(max(found))
        if at != sorted(at):
            return None
        return Visits(tuple(self._rounds.cuts(charge)), tuple(at), charge.state.plan)

    def make_room(
        self, room_bytes: int, *, due_s: Sequence[float] | None = None, link: Link | None = None
    ) -> None:
        """From the next step on so much state stays. Where they are known, `due_s` says when the
        buckets of the only optimizer are visited, from the first gradient on, and `link` what is
        left of the link for them."""
        self.room_bytes = room_bytes
        if link is not None:
            self._rounds.link = link
        for charge in self._charges.values():
            charge.state.due_s = charge.state.due_s if due_s is None else tuple(due_s)
            charge.state.anew = True

    def _unstash(self, charge: Charge) -> None:
        for parameter, gradient in charge.stash:
            self._access.put(parameter, gradient)
        charge.stash.clear()

    # Checkpoints

    def _before_state_dict(self, optimizer: Any) -> None:
        if self._charges[optimizer].took:
            raise GradientConsumed("state_dict was asked for between backward and step")

    def _after_load(self, optimizer: Any) -> None:
        """The program has loaded other state, which may be more than there is room for."""
        charge = self._charges[optimizer]
        charge.state.plan = None
        for bucket in charge.state.buckets:
            bucket.streamed = False
            self._stream.adopt(bucket, optimizer.state)
            if charge.state.streams:
                self._rounds.shed(charge)
