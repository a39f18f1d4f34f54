"""Below the floor of weights, gradients and optimizer state: the optimizer's work in buckets.

*Gradients are consumed as they arrive.* When the last gradient of a bucket of parameters has been
accumulated, the optimizer's own step is run on these parameters, inside backward, and the gradients
are let go. `optimizer.step()` of the program then finds nothing left to do for them. This is done
only for a loop that was watched and never looked at a gradient, whose code mentions none, and whose
optimizer treats each parameter on its own; everything else keeps its gradients.

*Optimizer state streams.* Between its visits a bucket's state lies in host memory. In backward the
next buckets' state comes in beside the computation; with gradients kept the same happens inside
`optimizer.step()`, which is never wrong and hides less.

Whoever asks the optimizer for state that is away gets it back first, and what somebody else holds
does not leave.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kilter.act.fence import Fence
from kilter.act.swapper.backend import Backend, HostMemoryError
from kilter.act.swapper.charge import Charge, Phase
from kilter.act.swapper.gradients import Followed, GradientConsumed, Gradients, Place
from kilter.act.swapper.stream import StateBucket, Stream, Where, size_of
from kilter.core.errors import UsageError
from kilter.core.plan import GRADIENTS
from kilter.core.units import MIB, show_bytes
from kilter.plan.swap.problem import Link
from kilter.plan.swap.state import (
    Bucket,
    StatePlan,
    Update,
    in_buckets,
    least_room_bytes,
    plan_state,
)

if TYPE_CHECKING:
    import torch

WATCHED_STEPS = 3
"""Optimizer steps that a loop is watched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """What happened so far, and how it stands now."""

    consuming: bool
    """Gradients of at least one optimizer are used up in backward."""
    visits: int
    """Buckets updated in backward."""
    late: int
    """Visits that found their state away and fetched it then and there."""
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
    refused: tuple[str, ...]
    """Why gradients are kept or state stays."""


class StateMover(AbstractContextManager["StateMover"]):
    """Keeps gradients and optimizer state off the device while nothing needs them.

    With `room_bytes`, at most so much optimizer state is on the device at any time, from the first
    step on; without, all of it stays. `gradients` says what may be done with them: "auto" consumes
    where neither the watched iterations nor the program's code give a reason not to, "consume" does
    not look at the code, "keep" never does.

    `before_update` is told which parameters are about to change, `changed` that the memory which
    gradients and state take is another from now on.
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
        fence: Fence | None = None,
    ) -> None:
        if gradients not in GRADIENTS:
            raise UsageError(f"gradients {gradients!r} is not one of {', '.join(GRADIENTS)}")
        self._backend = backend
        self._link = link
        self._stream = Stream(backend, min_bytes)
        self._gradients = gradients
        self.room_bytes = room_bytes
        """May be changed; what follows from it is done after the next step."""
        self._bucket_bytes = bucket_bytes
        self._before_update = before_update
        self._changed = changed
        self._fence = fence
        self._charges: weakref.WeakKeyDictionary[Any, Charge] = weakref.WeakKeyDictionary()
        self._access = Gradients()
        self._early: dict[int, weakref.ref[Any]] = {}
        """Parameters whose gradient arrived before their optimizer was met, in this order."""
        self._hooked: dict[int, weakref.ref[Any]] = {}
        self._hooks: list[Any] = []
        """On gradients."""
        self._handles: list[Any] = []
        self._search: Any = None
        self._guard: Any = None
        """On modules, between the first gradient and the step."""
        self._visits = 0
        self._late = 0

    # Begin and end

    def __enter__(self) -> StateMover:
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._torch = torch
        self._before_modules = register_module_forward_pre_hook
        self._access.__enter__()
        if self._gradients == "keep":
            self._access.ignore()
        else:
            # Until the first step nobody knows the optimizers: modules show the parameters.
            self._search = register_module_forward_pre_hook(self._fenced(self._before_module))
        self._handles = [register_optimizer_step_pre_hook(self._fenced(self._meet))]
        self._arrived_hook = torch.compiler.disable(self._fenced(self._arrived))
        return self

    def __exit__(self, *exception: object) -> None:
        """Bring the state home and forget about gradients."""
        for charge in self._charges.values():
            if charge.took:
                charge.say("parameters were updated in backward, and no step followed")
            self._unstash(charge)
            self._bring_home(charge)
            for handle in charge.handles:
                handle.remove()
        for handle in self._handles:
            handle.remove()
        self._stop_search()
        self._let_gradients_be()
        self._backend.close()

    def _stop_search(self) -> None:
        if self._search is not None:
            self._search.remove()
            self._search = None

    def _unguard(self) -> None:
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def _rest(self) -> None:
        """Do not watch gradients any longer than somebody's may be consumed."""
        if all(charge.phase is Phase.KEEPING for charge in self._charges.values()):
            self._let_gradients_be()

    def _let_gradients_be(self) -> None:
        self._gradients = "keep"
        self._unguard()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._access.ignore()

    def report(self) -> StateReport:
        charges = list(self._charges.values())
        buckets = [b for charge in charges for b in charge.buckets]
        away_bytes = sum(b.size_bytes for b in buckets if b.where is Where.AWAY)
        return StateReport(
            consuming=any(c.phase is Phase.CONSUMING for c in charges),
            visits=self._visits,
            late=self._late,
            out_bytes=self._stream.out_bytes,
            in_bytes=self._stream.in_bytes,
            host_bytes=self._stream.host_bytes,
            gradient_bytes=sum(self._gradient_bytes(c) for c in charges),
            state_bytes=sum(b.size_bytes for b in buckets) - away_bytes,
            away_bytes=away_bytes,
            plans=tuple(c.plan for c in charges if c.plan is not None),
            refused=tuple(dict.fromkeys(text for c in charges for text in c.refused)),
        )

    def _gradient_bytes(self, charge: Charge) -> int:
        sizes = [b.gradient_bytes for b in charge.buckets]
        if charge.phase is Phase.CONSUMING:
            return max(sizes, default=0)
        return sum(sizes)

    def _fenced(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Behind the fence an error of ours ends our work: state comes home, gradients stay."""
        fence = self._fence
        if fence is None:
            return hook

        def fenced(*args: Any) -> None:
            refusals: list[GradientConsumed] = []

            def run() -> None:
                try:
                    hook(*args)
                except GradientConsumed as refusal:  # the program's to know
                    refusals.append(refusal)

            if not fence.down:
                fence.run(run)
            if refusals:
                raise refusals[0]
            if fence.down:
                self._give_up()

        return fenced

    def _give_up(self) -> None:
        for charge in self._charges.values():
            if charge.streams or charge.phase is not Phase.KEEPING:
                charge.phase, charge.streams = Phase.KEEPING, False
                self._bring_home(charge)

    # Who is there

    def _before_module(self, module: Any, inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self._hook(parameter)

    def _hook(self, parameter: Any) -> None:
        hooked = self._hooked.get(id(parameter))
        if not (parameter.requires_grad and parameter.is_leaf) or self._gradients == "keep":
            return
        if hooked is not None and hooked() is parameter:
            return
        self._hooked[id(parameter)] = weakref.ref(parameter)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived_hook))

    def _meet(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The step of an optimizer is about to begin, perhaps its first."""
        charge = self._charges.get(optimizer)
        if charge is not None and not charge.altered:
            charge.stand_innermost()
            return
        self._stop_search()
        if charge is not None:
            if charge.took:
                raise GradientConsumed("the optimizer's parameters changed before the step")
            self._bring_home(charge)
            for handle in charge.handles:
                handle.remove()
            self._forget(charge)
        charge = self._charges[optimizer] = self._charged(optimizer)
        charge.stand_innermost()
        self._rest()
        weakref.finalize(optimizer, self._forget, charge).atexit = False

    def _charged(self, optimizer: Any) -> Charge:
        charge = Charge(optimizer)
        known = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        early = [key for key, p in self._early.items() if key in known and p() is known[key]]
        for key in early:
            del self._early[key]
        order = [known[key] for key in early]
        order += [p for key, p in reversed(known.items()) if key not in early]
        reason = charge.unfit(self._backend.device, self._access.followed)
        if reason is not None:
            charge.object_to(reason)
            charge.keep_state(reason)
            return charge
        for parameter in order:
            self._hook(parameter)
            place = Place.NONE if self._access.get(parameter) is None else Place.THERE
            charge.followed.append(Followed(parameter, charge, place))
        self._access.followed.update((id(f.parameter), f) for f in charge.followed)
        updates = [Update(gradient_bytes=size_of(p), state_bytes=0) for p in order]
        for number, cut in enumerate(in_buckets(updates, self._bucket_bytes)):
            members = order[cut.first : cut.first + cut.count]
            charge.buckets.append(StateBucket(members))
            charge.bucket_of.update((id(p), number) for p in members)
        charge.room_bytes = self.room_bytes
        charge.streams = self.room_bytes is not None
        if self._gradients == "keep":
            charge.object_to("as asked for")
        elif any(bucket.sharded for bucket in charge.buckets):
            charge.object_to("parameters are sharded over processes")
        charge.handles = [
            optimizer.register_step_pre_hook(self._fenced(self._before_step)),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_post_hook(self._fenced(self._after_load)),
        ]
        return charge

    def _forget(self, charge: Charge) -> None:
        """Its optimizer is gone, or has other parameters now."""
        for f in charge.followed:
            if self._access.followed.get(id(f.parameter)) is f:
                del self._access.followed[id(f.parameter)]
        for bucket in charge.buckets:
            self._stream.disown(bucket, {})
        charge.followed, charge.buckets = [], []

    # Backward

    def _arrived(self, parameter: Any) -> None:
        """A gradient was accumulated."""
        found = self._access.followed.get(id(parameter))
        if found is None:
            self._early[id(parameter)] = weakref.ref(parameter)
            return
        self._access.quiet = False  # a step that raised left it so
        found.arrives()
        charge: Charge = found.owner  # type: ignore[assignment]
        if charge.phase is Phase.KEEPING:
            return
        if self._guard is None:
            self._guard = self._before_modules(self._module_runs)
        gradient = self._access.get(parameter)
        assert gradient is not None
        if charge.settings is None:
            charge.settings = charge.options()
        if charge.phase is Phase.WATCHING:
            charge.marks.append((id(parameter), self._backend.mark()))
            charge.watch(parameter, gradient)
            return
        number = charge.bucket_of[id(parameter)]
        bucket = charge.buckets[number]
        bucket.missing -= 1
        if gradient.requires_grad or gradient.layout is not self._torch.strided:
            bucket.missing = len(bucket.members) + 1  # left to the step
        if not charge.open:
            if charge.altered:
                charge.object_to("the optimizer's parameters changed")
                return
            self._open(charge)
        if bucket.missing == 0:
            self._visits += 1
            self._visit(charge, number, keep=False)

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
        if charge.phase is Phase.WATCHING:
            charge.judge(self._access.get, self._backend.device.type)
            if self._gradients == "auto" and charge.steps == 1 and charge.watching():
                charge.read_code()
        elif charge.took and charge.settings != charge.options():
            raise GradientConsumed("the optimizer's options changed between backward and step")
        elif charge.took and getattr(optimizer, "grad_scale", None) is not None:
            raise GradientConsumed("gradients are to be unscaled")
        for f in charge.followed:
            f.steps()
        if charge.streams:
            if not charge.open:
                self._open(charge)
            for number, bucket in enumerate(charge.buckets):
                if bucket.streamed or charge.plan is None:
                    self._visit(charge, number, keep=True)
                else:  # left to the program's own step
                    self._then(charge, number)
        self._close(charge)
        self._access.quiet = True

    def _before_closure(self, charge: Charge) -> None:
        if charge.took:
            raise GradientConsumed("optimizer.step was given a closure")
        charge.object_to("optimizer.step is given a closure")
        if charge.streams:
            charge.keep_state("optimizer.step is given a closure")
            self._bring_home(charge)

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
        if charge.marks:
            zero = charge.marks[0][1]
            charge.arrives_s = {
                key: max(0.0, self._backend.elapsed_s(zero, mark)) for key, mark in charge.marks
            }
        armed = charge.phase is Phase.WATCHING and charge.steps >= WATCHED_STEPS
        if armed:
            charge.phase = Phase.CONSUMING
            for bucket in charge.buckets:
                bucket.missing = bucket.awaited = sum(id(p) in charge.seen for p in bucket.members)
        if charge.fit and self.room_bytes != charge.room_bytes:
            charge.room_bytes = self.room_bytes
            charge.streams = self.room_bytes is not None
            if not charge.streams:
                self._bring_home(charge)
            charge.plan = None
        if charge.steps == 1:
            charge.order_state()
            self._adopt(charge)
        if charge.streams and (armed or charge.plan is None):
            self._plan(charge)
        consuming = charge.phase is Phase.CONSUMING
        if consuming != charge.told and self._changed is not None:
            self._changed()
        charge.told = consuming
        self._rest()
        charge.settings = None
        charge.marks.clear()
        charge.seen.clear()

    def _adopt(self, charge: Charge) -> None:
        """Know the state of all buckets."""
        for bucket in charge.buckets:
            if bucket.flat is None:
                self._stream.adopt(bucket, charge.optimizer.state)

    def least_room_bytes(self, stall_s: float) -> int:
        """The least room in which optimizer state would stream with at most so much waiting in each
        iteration (simulated), after the watched iterations."""
        return sum(
            least_room_bytes(self._cuts(charge), link=self._link, stall_s=stall_s)
            for charge in self._charges.values()
        )

    def _unstash(self, charge: Charge) -> None:
        for parameter, gradient in charge.stash:
            self._access.put(parameter, gradient)
        charge.stash.clear()

    # Rounds of visits

    def _open(self, charge: Charge) -> None:
        charge.open = True
        if charge.plan is not None:
            self._load_planned(charge, charge.plan.begin)

    def _visit(self, charge: Charge, number: int, *, keep: bool) -> None:
        """Update the parameters of a bucket that have a gradient."""
        bucket = charge.buckets[number]
        gradients = [(p, self._access.get(p)) for p in bucket.members]
        ready = [(p, gradient) for p, gradient in gradients if gradient is not None]
        if ready:
            if bucket.where is not Where.HERE:
                self._bring(charge, bucket)
            if self._before_update is not None:
                self._before_update([p for p, _ in ready])
            self._update(charge, [p for p, _ in ready])
            for parameter, gradient in ready:
                self._access.put(parameter, None)
                if keep:
                    charge.stash.append((parameter, gradient))
                else:
                    self._access.followed[id(parameter)].taken()
            if charge.streams and charge.plan is None:
                if bucket.flat is None:
                    self._stream.adopt(bucket, charge.optimizer.state)
                self._shed(charge)
            if bucket.streamed:
                self._leave(charge, bucket)
        self._then(charge, number)

    def _update(self, charge: Charge, parameters: Sequence[Any]) -> None:
        """The optimizer's own step on some of its parameters, without its hooks."""
        torch = self._torch
        optimizer = charge.optimizer
        groups = optimizer.param_groups
        chosen: dict[int, list[Any]] = {}
        for parameter in parameters:
            chosen.setdefault(charge.group_of[id(parameter)], []).append(parameter)
        device_type = self._backend.device.type
        optimizer.param_groups = [{**groups[i], "params": chosen[i]} for i in sorted(chosen)]
        self._access.quiet = True
        try:
            if charge.phase is Phase.CONSUMING and torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False):
                    type(optimizer).step.__wrapped__(optimizer)
            else:
                type(optimizer).step.__wrapped__(optimizer)
        finally:
            self._access.quiet = False
            optimizer.param_groups = groups

    def _then(self, charge: Charge, number: int) -> None:
        """What the plan issues after a visit."""
        plan = charge.plan
        if plan is None or number in charge.visited:
            return
        charge.visited.add(number)
        for i in plan.release[number]:
            if charge.buckets[i].where is Where.LEAVING:
                self._evict(charge, charge.buckets[i])
        self._load_planned(charge, plan.load[number])

    def _load_planned(self, charge: Charge, numbers: Iterable[int]) -> None:
        assert charge.room_bytes is not None
        assert charge.plan is not None
        room_bytes = max(charge.room_bytes, charge.plan.peak_bytes)
        for i in numbers:
            bucket = charge.buckets[i]
            fits = self._stream.held_bytes + bucket.size_bytes <= room_bytes
            if bucket.where is Where.AWAY and fits and i not in charge.visited:
                self._stream.load(bucket)

    def _close(self, charge: Charge) -> None:
        """All updates are done: what streams goes, what did not need its state drops it."""
        charge.open = False
        charge.visited.clear()
        for bucket in charge.buckets:
            bucket.missing = bucket.awaited
            if not bucket.streamed or bucket.where is Where.AWAY:
                continue
            if bucket.lent:
                self._leave(charge, bucket)
            self._evict(charge, bucket)

    # Streaming

    def _cuts(self, charge: Charge) -> list[Bucket]:
        cuts, first = [], 0
        for bucket in charge.buckets:
            cuts.append(
                Bucket(
                    first=first,
                    count=len(bucket.members),
                    gradient_bytes=bucket.gradient_bytes,
                    state_bytes=bucket.size_bytes,
                    due_s=max(charge.arrives_s.get(id(p), 0.0) for p in bucket.members),
                )
            )
            first += len(bucket.members)
        return cuts

    def _plan(self, charge: Charge) -> None:
        assert charge.room_bytes is not None
        mine_bytes = sum(b.size_bytes for b in charge.buckets if b.where is not Where.AWAY)
        room_bytes = charge.room_bytes - (self._stream.held_bytes - mine_bytes)
        least_bytes = max(b.size_bytes for b in charge.buckets)
        if room_bytes < least_bytes:
            charge.say(
                f"optimizer state streams through no less than {show_bytes(least_bytes)}; "
                f"{show_bytes(max(0, room_bytes))} of room were left for it"
            )
            room_bytes = least_bytes
        plan = plan_state(self._cuts(charge), room_bytes=room_bytes, link=self._link)
        charge.plan = plan
        for number, bucket in enumerate(charge.buckets):
            bucket.streamed = number in plan.streamed
            if bucket.streamed and bucket.where is Where.HERE:
                self._leave_at_once(charge, bucket)
        for bucket in charge.buckets:
            if not bucket.streamed:
                self._bring(charge, bucket)
        if self._changed is not None:
            self._changed()

    def _shed(self, charge: Charge) -> None:
        """State is being made and nothing is planned yet: the oldest leaves while there is more
        than room for."""
        assert charge.room_bytes is not None
        for bucket in charge.buckets:
            if self._stream.held_bytes <= charge.room_bytes:
                return
            if bucket.where is Where.HERE and bucket.size_bytes:
                self._leave_at_once(charge, bucket)

    def _leave_at_once(self, charge: Charge, bucket: StateBucket) -> None:
        self._leave(charge, bucket)
        if bucket.where is Where.LEAVING:
            self._evict(charge, bucket)

    def _evict(self, charge: Charge, bucket: StateBucket) -> None:
        if not self._stream.evict(bucket):
            charge.say("optimizer state stays where the program holds it")

    def _leave(self, charge: Charge, bucket: StateBucket) -> None:
        """Start the way to the host; without host memory the bucket stays for good."""
        try:
            self._stream.leave(bucket, charge.optimizer.state)
        except HostMemoryError as error:
            bucket.streamed = False
            charge.say(f"optimizer state stays: {error}")

    def _bring(self, charge: Charge, bucket: StateBucket) -> None:
        """Have the state on the device from here on, even if nothing was prepared for that."""
        if bucket.where is Where.AWAY:
            self._late += charge.open
            for other in charge.buckets:
                if other.where is Where.LEAVING:
                    self._evict(charge, other)
        self._stream.bring(bucket)

    def _bring_home(self, charge: Charge) -> None:
        """All state on the device for good, or in host tensors if it does not fit there."""
        charge.plan = None
        for bucket in charge.buckets:
            try:
                self._stream.bring(bucket)
                if bucket.flat is not None:
                    self._stream.separate(bucket)
            except self._torch.OutOfMemoryError:
                if bucket.sharded:
                    raise
                self._keep_on_host(charge, bucket)
            self._stream.disown(bucket, charge.optimizer.state)
        self._adopt(charge)

    def _keep_on_host(self, charge: Charge, bucket: StateBucket) -> None:
        if bucket.where is Where.AWAY:
            for p, key, value in self._stream.copies(bucket):
                charge.optimizer.state[p] |= {key: value}
            charge.say("optimizer state did not fit the device and is on the host")

    # Checkpoints

    def _after_state_dict(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """State that is away is given as copies in host memory."""
        charge = self._charges[optimizer]
        if charge.took:
            raise GradientConsumed("state_dict was asked for between backward and step")
        states = optimizer.state
        numbers = {id(state): index for index, state in state_dict["state"].items()}
        for bucket in charge.buckets:
            if bucket.flat is None:
                continue
            for p in bucket.members:
                if p in states:
                    state_dict["state"][numbers[id(states[p])]] = states[p].plain()
            if bucket.sharded:  # comes back, and goes again after the next step
                self._stream.bring(bucket)
            elif bucket.where is Where.AWAY:
                for p, key, value in self._stream.copies(bucket):
                    state_dict["state"][numbers[id(states[p])]][key] = value
        return state_dict

    def _after_load(self, optimizer: Any) -> None:
        """The state is another now: ours is garbage, and the next step is a first one."""
        charge = self._charges[optimizer]
        for bucket in charge.buckets:
            self._stream.disown(bucket, {})
            if charge.streams:
                self._stream.adopt(bucket, optimizer.state)
                self._shed(charge)
        charge.plan = None
