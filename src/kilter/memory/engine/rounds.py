"""Rounds of visits to an optimizer's buckets: state is prefetched, used and offloaded again.

A round begins with the first gradient and ends with the program's step. What moves when is planned
(`memory/plan/state.py`); a bucket whose state is not there yet fetches it then and there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kilter.memory import messages
from kilter.memory.engine.backend import Backend, HostMemoryError
from kilter.memory.engine.charge import Charge, PassPhase
from kilter.memory.engine.gradients import Gradients
from kilter.memory.engine.stream import StateBucket, Stream, Where
from kilter.memory.engine.update import update
from kilter.memory.plan.problem import Link
from kilter.memory.plan.state import Bucket, plan_state

if TYPE_CHECKING:
    import torch


class Rounds:
    """What is done with the buckets of all optimizers. `before_update` is told which parameters are
    about to change, `changed` that state takes another amount of memory from now on."""

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
        self.link = link
        """What is left of it for state."""
        self._access = gradients
        self._before_update = before_update
        self._changed = changed
        self.late = 0
        """Visits that found their state offloaded and fetched it then and there."""

    def begin(self, charge: Charge) -> None:
        charge.round.open = True
        charge.note_state()
        if charge.state.plan is not None:
            self._prefetch_planned(charge, charge.state.plan.begin)

    def visit(self, charge: Charge, number: int, *, keep: bool) -> None:
        """Update the parameters of a bucket that have a gradient."""
        bucket = charge.state.buckets[number]
        get, put = self._access.get, self._access.put
        found = [(p, get(p)) for p in bucket.members]
        ready = [p for p, gradient in found if gradient is not None]
        gradients = [gradient for _, gradient in found if gradient is not None]
        if ready:
            self._bring(charge, bucket)
            if self._before_update is not None:
                self._before_update(ready)
            self._update(charge, ready, gradients)
            for parameter, gradient in zip(ready, gradients, strict=True):
                put(parameter, None)
                if keep:
                    charge.stash.append((parameter, gradient))
                else:
                    self._access.followed[id(parameter)].taken()
            if charge.state.streams and charge.state.plan is None:
                if bucket.host is None:
                    self._stream.adopt(bucket, charge.optimizer.state)
                self.shed(charge)
            self._stream.note(bucket)
            if bucket.streamed:
                self._offload(charge, bucket)
            charge.round.updated.add(number)
        self.pass_by(charge, number)

    def _update(
        self, charge: Charge, parameters: Sequence[Any], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Outside of autocast, where the program's own step would run."""
        import torch

        from kilter.memory.engine.quiet import uncast

        device_type = self._backend.device.type
        self._access.quiet = True
        try:
            step = partial(update, charge.optimizer, charge.group_of, parameters, gradients)
            if charge.phase is PassPhase.CONSUMING and torch.is_autocast_enabled(device_type):
                uncast(device_type, step)
            else:
                step()
        finally:
            self._access.quiet = False

    def written(self, charge: Charge) -> bool:
        """Somebody wrote to state after it was updated in this round."""
        return any(
            self._stream.written(charge.state.buckets[number]) for number in charge.round.updated
        )

    def pass_by(self, charge: Charge, number: int) -> None:
        """What the plan issues after a visit."""
        plan = charge.state.plan
        if plan is None or number in charge.round.visited:
            return
        charge.round.visited.add(number)
        for i in plan.release[number]:
            if charge.state.buckets[i].where is Where.OFFLOADING:
                self._evict(charge, charge.state.buckets[i])
        self._prefetch_planned(charge, plan.load[number])

    def _prefetch_planned(self, charge: Charge, numbers: Iterable[int]) -> None:
        assert charge.state.room_bytes is not None
        assert charge.state.plan is not None
        room_bytes = max(charge.state.room_bytes, charge.state.plan.peak_bytes)
        for i in numbers:
            bucket = charge.state.buckets[i]
            fits = self._stream.held_bytes + bucket.size_bytes <= room_bytes
            if bucket.where is Where.OFFLOADED and fits and i not in charge.round.visited:
                self._stream.prefetch(bucket)

    def end(self, charge: Charge) -> None:
        """All updates are done: what streams is evicted, whether it was used or not."""
        charge.round.end()
        for bucket in charge.state.buckets:
            bucket.missing = bucket.awaited
            if not self._stream.known(bucket, charge.optimizer.state):
                self._know(charge, bucket)
            if bucket.streamed:
                self._offload(charge, bucket)
                self._evict(charge, bucket)

    def _know(self, charge: Charge, bucket: StateBucket) -> None:
        """The optimizer has made more state, or the program has exchanged some."""
        self._settle(charge, bucket)
        self._stream.adopt(bucket, charge.optimizer.state)
        charge.state.anew |= charge.state.streams  # its bytes are others than planned

    # To and fro

    def adopt(self, charge: Charge) -> None:
        """Know the state of all buckets."""
        for bucket in charge.state.buckets:
            if bucket.host is None:
                self._stream.adopt(bucket, charge.optimizer.state)

    def cuts(self, charge: Charge) -> list[Bucket]:
        """Its buckets as planners see them. With gradients kept all are visited at once."""
        due_s: Sequence[float] = charge.state.due_s or [
            max(charge.evidence.arrives_s.get(id(p), 0.0) for p in bucket.members)
            for bucket in charge.state.buckets
        ]
        if charge.phase is PassPhase.KEEPING:
            due_s = [0.0] * len(charge.state.buckets)
        cuts, first = [], 0
        for bucket, bucket_due_s in zip(charge.state.buckets, due_s, strict=True):
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

    def plan(self, charge: Charge) -> None:
        assert charge.state.room_bytes is not None
        mine_bytes = sum(
            b.size_bytes for b in charge.state.buckets if b.where is not Where.OFFLOADED
        )
        room_bytes = max(0, charge.state.room_bytes - (self._stream.held_bytes - mine_bytes))
        least_bytes = max(b.size_bytes for b in charge.state.buckets)
        if room_bytes < least_bytes:
            charge.say(messages.little_room(least_bytes, room_bytes))
            room_bytes = least_bytes
        plan = plan_state(self.cuts(charge), room_bytes=room_bytes, link=self.link)
        charge.state.plan = plan
        for number, bucket in enumerate(charge.state.buckets):
            bucket.streamed = number in plan.streamed
            if bucket.streamed:
                self._offload(charge, bucket)
                self._evict(charge, bucket)
        for bucket in charge.state.buckets:
            if not bucket.streamed:
                self._settle(charge, bucket)
        self._changed()

    def shed(self, charge: Charge) -> None:
        """State is being made and nothing is planned yet: the oldest is evicted while there is more
        than room for."""
        assert charge.state.room_bytes is not None
        for bucket in charge.state.buckets:
            if self._stream.held_bytes <= charge.state.room_bytes:
                return
            self._offload(charge, bucket)
            self._evict(charge, bucket)

    def _offload(self, charge: Charge, bucket: StateBucket) -> None:
        """Start the copy of a resident bucket; without host memory it stays for good."""
        if bucket.where is not Where.RESIDENT or not bucket.parts:
            return
        try:
            if not self._stream.offload(bucket):
                charge.say(messages.STATE_ADDRESS_HELD)
        except HostMemoryError as error:
            bucket.streamed = False
            charge.say(messages.state_stays(messages.of_error(error)))

    def _evict(self, charge: Charge, bucket: StateBucket) -> None:
        moving = bucket.where in (Where.OFFLOADING, Where.PREFETCHING)
        if moving and not self._stream.evict(bucket):
            charge.say(messages.STATE_ADDRESS_HELD)

    def _bring(self, charge: Charge, bucket: StateBucket) -> None:
        """Have the state on the device from here on, even if nothing was prepared for that."""
        if bucket.where is Where.OFFLOADED:
            self.late += charge.round.open
            for other in charge.state.buckets:
                if other.where is Where.OFFLOADING:
                    self._evict(charge, other)
        self._stream.bring(bucket)

    def _settle(self, charge: Charge, bucket: StateBucket) -> None:
        import torch

        try:
            self._stream.settle(bucket)
        except torch.OutOfMemoryError:
            charge.say(messages.STATE_ON_HOST)

    def bring_home(self, charge: Charge) -> None:
        """All state on the device for good, or in host memory if it does not fit there."""
        charge.state.plan = None
        for bucket in charge.state.buckets:
            self._settle(charge, bucket)
            bucket.streamed = False
            self._stream.adopt(bucket, charge.optimizer.state)
