"""Rounds of visits to an optimizer's buckets: state is prefetched, used and offloaded again.

A round begins with the first gradient and ends with the program's step. The moves are planned
(`memory/plan/state.py`); state that is not resident when its bucket is visited is fetched then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kilter.memory import messages
from kilter.memory.engine.backend import Backend, HostMemoryError
from kilter.memory.engine.governed_optimizer import GovernedOptimizer, GradientPhase
from kilter.memory.engine.gradients import Gradients
from kilter.memory.engine.stream import StateBucket, Stream, Where
from kilter.memory.engine.update import update
from kilter.memory.plan.problem import Link
from kilter.memory.plan.state import Bucket, plan_state

if TYPE_CHECKING:
    import torch


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
        self.late = 0
        """So many visits found their state offloaded and had to fetch it."""

    def begin(self, governed: GovernedOptimizer) -> None:
        governed.round.open = True
        governed.note_state()
        if governed.state.plan is not None:
            self._prefetch_planned(governed, governed.state.plan.begin)

    def visit(self, governed: GovernedOptimizer, number: int, *, keep: bool) -> None:
        """Update the parameters of a bucket that have a gradient."""
        bucket = governed.state.buckets[number]
        get, put = self._access.get, self._access.put
        found = [(p, get(p)) for p in bucket.members]
        ready = [p for p, gradient in found if gradient is not None]
        gradients = [gradient for _, gradient in found if gradient is not None]
        if ready:
            self._fetch(governed, bucket)
            if self._before_update is not None:
                self._before_update(ready)
            self._update(governed, ready, gradients)
            for parameter, gradient in zip(ready, gradients, strict=True):
                put(parameter, None)
                if keep:
                    governed.stash.append((parameter, gradient))
                else:
                    self._access.followed[id(parameter)].taken()
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
        assert governed.state.room_bytes is not None
        assert governed.state.plan is not None
        room_bytes = max(governed.state.room_bytes, governed.state.plan.peak_bytes)
        for i in numbers:
            bucket = governed.state.buckets[i]
            fits = self._stream.held_bytes + bucket.size_bytes <= room_bytes
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
        """Its buckets as planners see them. With gradients kept all are visited at once."""
        due_s = [
            max(governed.evidence.arrives_s.get(id(p), 0.0) for p in bucket.members)
            for bucket in governed.state.buckets
        ]
        if governed.phase is GradientPhase.KEEPING:
            due_s = [0.0] * len(governed.state.buckets)
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
        mine_bytes = sum(
            b.size_bytes for b in governed.state.buckets if b.where is not Where.OFFLOADED
        )
        room_bytes = max(0, governed.state.room_bytes - (self._stream.held_bytes - mine_bytes))
        least_bytes = max(b.size_bytes for b in governed.state.buckets)
        if room_bytes < least_bytes:
            governed.say(messages.little_room(least_bytes, room_bytes))
            room_bytes = least_bytes
        cuts, plan = self.cuts(governed), governed.state.chosen
        if plan is None or not plan.suits(cuts):
            plan = plan_state(cuts, room_bytes=room_bytes, link=self._link)
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
