"""Rounds of visits to an optimizer's buckets: state is prefetched, used and offloaded again.

A round begins with the first gradient and ends with the program's step. The moves are planned
(`memory/plan/state.py`); state that is not resident when its bucket is visited is fetched then.
Where gradients are kept all visits are in the step. There state that stays is updated between what
streams, as far as copies are to be hidden behind it; the rest is left to the program's own step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kilter.memory import messages
from kilter.memory.engine.backend import Backend, HostMemoryError
from kilter.memory.engine.governed_optimizer import GovernedOptimizer, GradientPhase
from kilter.memory.engine.gradients import Gradients
from kilter.memory.engine.stream import StateBucket, Stream, Where, size_of
from kilter.memory.engine.update import update
from kilter.memory.plan.problem import Link
from kilter.memory.plan.state import Bucket, StatePlan, plan_state, plan_step
from kilter.memory.usable_bytes import countable_bytes

if TYPE_CHECKING:
    import torch

MISSED = 2
"""Another plan is made at most so many times because a step had less room than the one before."""


class Rounds:
    """Visits the buckets of all optimizers. `before_update` is called with parameters that are
    about to change, `changed` when state takes another amount of memory from now on."""

    def __init__(
        self,
        backend: Backend,
        stream: Stream,
        link: Link,
        gradients: Gradients,
        before_update: Callable[[Iterable[torch.Tensor]], None] | None,
        changed: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._stream = stream
        self._link = link
        self._access = gradients
        self._before_update = before_update
        self._changed = changed
        self.budget_bytes: int | None = None
        """The budget in force; None: not known."""
        self.late = 0
        """So many visits found their state offloaded and had to fetch it."""

    def begin(self, governed: GovernedOptimizer) -> None:
        governed.round.open = True
        governed.note_state()
        plan = governed.state.plan
        if plan is not None:
            governed.round.room_bytes = self._room_bytes(governed, plan)
            self._prefetch_planned(governed, plan.begin)

    def _room_bytes(self, governed: GovernedOptimizer, plan: StatePlan) -> int:
        """State may take so much in this round: what was planned, if there is memory for it. If
        not, another plan is made after the step."""
        room_bytes = governed.state.room_bytes
        assert room_bytes is not None
        planned_bytes = max(room_bytes, plan.peak_bytes)
        if planned_bytes == room_bytes or governed.phase is not GradientPhase.KEEPING:
            return planned_bytes
        free_bytes = self._free_bytes()
        if free_bytes is None or self._stream.held_bytes + free_bytes >= planned_bytes:
            return planned_bytes
        seen = governed.step_seen
        if seen.missed < MISSED:
            seen.missed += 1
            seen.room_bytes, governed.state.anew = self._mine_bytes(governed) + free_bytes, True
        return max(room_bytes, self._stream.held_bytes + free_bytes)

    def look(self, governed: GovernedOptimizer) -> None:
        """A step begins, after which it is planned how state streams. See how much state may be
        there in it. (A step that is not fused takes memory of its own, which is not known.)"""
        groups = governed.optimizer.param_groups
        free_bytes = self._free_bytes() if all(group.get("fused") for group in groups) else None
        mine_bytes = self._mine_bytes(governed)
        governed.step_seen.looks = True
        governed.step_seen.room_bytes = 0 if free_bytes is None else mine_bytes + free_bytes

    def _mine_bytes(self, governed: GovernedOptimizer) -> int:
        """Its state takes so much on the device."""
        away = Where.OFFLOADED
        return sum(b.size_bytes for b in governed.state.buckets if b.where is not away)

    def _free_bytes(self) -> int | None:
        """So much memory may be taken now; None: not known."""
        used_bytes = self._backend.used_bytes()
        if used_bytes is None or self.budget_bytes is None:
            return None
        return countable_bytes(self.budget_bytes) - used_bytes

    def visit_in_step(self, governed: GovernedOptimizer) -> None:
        """Visit what was not visited in backward. What is resident is left to the program's own
        step, but for what hides copies."""
        plan, hides = governed.state.plan, governed.phase is GradientPhase.KEEPING
        resident: list[StateBucket] = []
        for number, bucket in enumerate(governed.state.buckets):
            if bucket.streamed or plan is None:
                self._update_all(governed, resident)
                self.visit(governed, number, keep=True)
                continue
            if hides:
                resident.append(bucket)
                if plan.release[number]:
                    self._update_all(governed, resident)
            self.pass_by(governed, number)

    def _update_all(self, governed: GovernedOptimizer, resident: list[StateBucket]) -> None:
        """Update resident buckets, and forget that they are still to be."""
        members = [p for bucket in resident for p in bucket.members]
        resident.clear()
        if not governed.step_seen.looks:
            self._update_members(members, governed, keep=True)
            return
        gradient_bytes = self.gradient_bytes(members)
        begun = self._backend.mark()
        self._update_members(members, governed, keep=True)
        governed.step_seen.updated(begun, self._backend.mark(), gradient_bytes)

    def gradient_bytes(self, members: Iterable[Any]) -> int:
        """Those of them that have a gradient have so many bytes."""
        return sum(size_of(p) for p in members if self._access.get(p) is not None)

    def _update_members(
        self, members: Iterable[Any], governed: GovernedOptimizer, *, keep: bool
    ) -> None:
        """Update those of them that have a gradient, whose state is resident."""
        get, put = self._access.get, self._access.put
        found = [(p, get(p)) for p in members]
        ready = [p for p, gradient in found if gradient is not None]
        gradients = [gradient for _, gradient in found if gradient is not None]
        if not ready:
            return
        if self._before_update is not None:
            self._before_update(ready)
        self._update(governed, ready, gradients)
        for parameter, gradient in zip(ready, gradients, strict=True):
            put(parameter, None)
            if keep:
                governed.stash.append((parameter, gradient))
            else:
                self._access.followed[id(parameter)].taken()

    def visit(self, governed: GovernedOptimizer, number: int, *, keep: bool) -> None:
        """Update the parameters of a bucket that have a gradient."""
        bucket = governed.state.buckets[number]
        if any(self._access.get(p) is not None for p in bucket.members):
            self._fetch(governed, bucket)
            self._update_members(bucket.members, governed, keep=keep)
            if governed.state.streams and governed.state.plan is None:
                if bucket.host is None:
                    self._stream.adopt(bucket, governed.optimizer.state)
                self.shed(governed)
            self._stream.note(bucket)
            if bucket.streamed:
                self._offload(governed, bucket)
            governed.round.updated.add(number)
        self.pass_by(governed, number)

    def _update(
        self,
        governed: GovernedOptimizer,
        parameters: Sequence[Any],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Outside of autocast, where the program's own step would run."""
        import torch

        from kilter.memory.engine.quiet import uncast

        device_type = self._backend.device.type
        self._access.quiet = True
        try:
            step = partial(update, governed.optimizer, governed.group_of, parameters, gradients)
            if governed.phase is GradientPhase.CONSUMING and torch.is_autocast_enabled(device_type):
                uncast(device_type, step)
            else:
                step()
        finally:
            self._access.quiet = False

    def written(self, governed: GovernedOptimizer) -> bool:
        """Somebody wrote to state after it was updated in this round."""
        return any(
            self._stream.written(governed.state.buckets[number])
            for number in governed.round.updated
        )

    def pass_by(self, governed: GovernedOptimizer, number: int) -> None:
        """What the plan issues after a visit."""
        plan = governed.state.plan
        if plan is None or number in governed.round.visited:
            return
        governed.round.visited.add(number)
        for i in plan.release[number]:
            if governed.state.buckets[i].where is Where.OFFLOADING:
                self._evict(governed, governed.state.buckets[i])
        self._prefetch_planned(governed, plan.load[number])

    def _prefetch_planned(self, governed: GovernedOptimizer, numbers: Iterable[int]) -> None:
        for i in numbers:
            bucket = governed.state.buckets[i]
            fits = self._stream.held_bytes + bucket.size_bytes <= governed.round.room_bytes
            if bucket.where is Where.OFFLOADED and fits and i not in governed.round.visited:
                self._stream.prefetch(bucket)

    def end(self, governed: GovernedOptimizer) -> None:
        """All updates are done: what streams is evicted, whether it was used or not."""
        governed.round.end()
        for bucket in governed.state.buckets:
            bucket.missing = bucket.awaited
            if not self._stream.known(bucket, governed.optimizer.state):
                self._adopt_again(governed, bucket)
            if bucket.streamed:
                self._offload(governed, bucket)
                self._evict(governed, bucket)

    def _adopt_again(self, governed: GovernedOptimizer, bucket: StateBucket) -> None:
        """The optimizer has made more state, or the program has exchanged some."""
        self._settle(governed, bucket)
        self._stream.adopt(bucket, governed.optimizer.state)
        governed.state.anew |= governed.state.streams  # its bytes are others than planned

    # Moves

    def adopt(self, governed: GovernedOptimizer) -> None:
        """Find the state of all buckets."""
        for bucket in governed.state.buckets:
            if bucket.host is None:
                self._stream.adopt(bucket, governed.optimizer.state)

    def cuts(self, governed: GovernedOptimizer) -> list[Bucket]:
        """Its buckets as planners see them."""
        due_s = [
            max(governed.evidence.arrives_s.get(id(p), 0.0) for p in bucket.members)
            for bucket in governed.state.buckets
        ]
        cuts, first = [], 0
        for bucket, bucket_due_s in zip(governed.state.buckets, due_s, strict=True):
            cuts.append(
                Bucket(
                    first=first,
                    count=len(bucket.members),
                    gradient_bytes=bucket.gradient_bytes,
                    state_bytes=bucket.size_bytes,
                    due_s=bucket_due_s,
                )
            )
            first += len(bucket.members)
        return cuts

    def plan(self, governed: GovernedOptimizer) -> None:
        assert governed.state.room_bytes is not None
        others_bytes = self._stream.held_bytes - self._mine_bytes(governed)
        room_bytes = max(0, governed.state.room_bytes - others_bytes)
        step_room_bytes = room_bytes
        if governed.phase is GradientPhase.KEEPING:
            step_room_bytes = max(room_bytes, governed.step_seen.room_bytes)
        least_bytes = max(b.size_bytes for b in governed.state.buckets)
        if step_room_bytes < least_bytes:
            governed.say(messages.little_room(least_bytes, step_room_bytes))
            room_bytes = step_room_bytes = least_bytes
        cuts, plan = self.cuts(governed), governed.state.chosen
        if plan is None or not plan.suits(cuts):
            plan = self._planned(governed, cuts, room_bytes, step_room_bytes)
        governed.state.plan = plan
        for number, bucket in enumerate(governed.state.buckets):
            bucket.streamed = number in plan.streamed
            if bucket.streamed:
                self._offload(governed, bucket)
                self._evict(governed, bucket)
        for bucket in governed.state.buckets:
            if not bucket.streamed:
                self._settle(governed, bucket)
        self._changed()

    def _planned(
        self,
        governed: GovernedOptimizer,
        cuts: Sequence[Bucket],
        room_bytes: int,
        step_room_bytes: int,
    ) -> StatePlan:
        if governed.phase is not GradientPhase.KEEPING:
            return plan_state(cuts, room_bytes=room_bytes, link=self._link)
        each_s = governed.step_seen.update_s_per_byte
        return plan_step(
            cuts,
            [each_s * cut.gradient_bytes for cut in cuts],
            room_bytes=room_bytes,
            step_room_bytes=step_room_bytes,
            link=self._link,
        )

    def shed(self, governed: GovernedOptimizer) -> None:
        """State is being made and nothing is planned yet: evict the oldest while there is more
        state than room for it."""
        assert governed.state.room_bytes is not None
        for bucket in governed.state.buckets:
            if self._stream.held_bytes <= governed.state.room_bytes:
                return
            self._offload(governed, bucket)
            self._evict(governed, bucket)

    def _offload(self, governed: GovernedOptimizer, bucket: StateBucket) -> None:
        """Start the copy of a resident bucket; without host memory it stays for good."""
        if bucket.where is not Where.RESIDENT or not bucket.parts:
            return
        try:
            if not self._stream.offload(bucket):
                governed.say(messages.STATE_ADDRESS_HELD)
        except HostMemoryError as error:
            bucket.streamed = False
            governed.say(messages.state_stays(messages.of_error(error)))

    def _evict(self, governed: GovernedOptimizer, bucket: StateBucket) -> None:
        moving = bucket.where in (Where.OFFLOADING, Where.PREFETCHING)
        if moving and not self._stream.evict(bucket):
            governed.say(messages.STATE_ADDRESS_HELD)

    def _fetch(self, governed: GovernedOptimizer, bucket: StateBucket) -> None:
        """Make the state resident from here on, even if it was not prefetched."""
        if bucket.where is Where.OFFLOADED:
            self.late += governed.round.open
            for other in governed.state.buckets:
                if other.where is Where.OFFLOADING:
                    self._evict(governed, other)
        self._stream.fetch(bucket)

    def _settle(self, governed: GovernedOptimizer, bucket: StateBucket) -> None:
        import torch

        try:
            self._stream.settle(bucket)
        except torch.OutOfMemoryError:
            governed.say(messages.STATE_ON_HOST)

    def fetch_all(self, governed: GovernedOptimizer) -> None:
        """Make all state resident for good, or leave it in host memory if it does not fit."""
        governed.state.plan = None
        for bucket in governed.state.buckets:
            self._settle(governed, bucket)
            bucket.streamed = False
            self._stream.adopt(bucket, governed.optimizer.state)
