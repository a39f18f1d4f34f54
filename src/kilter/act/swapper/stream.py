"""State of some parameters as one storage that comes and goes.

All state tensors of a bucket become views of one storage, so that one copy moves them; they stay
the same Python objects. Away, the storage has no bytes. Whoever asks the optimizer for them then
gets them back first, and what somebody else holds does not leave.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from kilter.act.swapper.backend import Backend, Event

if TYPE_CHECKING:
    import torch

ALIGN = 512
"""Of tensors in their bucket: what the framework's allocator gives, so kernels vectorise."""


class Where(Enum):
    """Of a bucket's state."""

    HERE = "here"
    COMING = "coming"
    LEAVING = "leaving"
    AWAY = "away"


class WatchedState(dict[str, Any]):
    """The optimizer's dictionary of one parameter, while its tensors come and go."""

    fetch: Callable[[], None]

    def __getitem__(self, key: str) -> Any:
        self.fetch()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.fetch()
        return super().get(key, default)

    def values(self) -> Any:
        self.fetch()
        return super().values()

    def items(self) -> Any:
        self.fetch()
        return super().items()

    def __reduce__(self) -> Any:
        """Copies and pickles are ordinary."""
        return dict, (dict(self.items()),)

    def plain(self) -> dict[str, Any]:
        """As it is, wherever the tensors are."""
        return dict(super().items())


class StateBucket:
    """Parameters that are updated together, and where their state is."""

    def __init__(self, members: Sequence[torch.nn.Parameter]) -> None:
        self.members = members
        self.awaited = len(members)
        """Of them, those that have a gradient in an ordinary iteration."""
        self.missing = self.awaited
        """Gradients of this backward that have not arrived yet."""
        self.gradient_bytes = sum(size_of(p) for p in members)
        self.streamed = False
        self.where = Where.HERE
        self.size_bytes = 0
        """Of the state that can leave."""
        self.views: list[tuple[torch.nn.Parameter, str, torch.Tensor]] = []
        """The tensors of it, and what the optimizer calls them."""
        self.sharded = any(local_of(p) is not p for p in members)
        self.users = 0
        """How many hold its storage when nobody else does."""
        self.lent = False
        """Somebody asked for it and may have written to it."""
        self.flat: torch.Tensor | None = None
        """All of it as bytes, once it has left for the first time."""
        self.whole = True
        """Every member had state then."""
        self.host: torch.Tensor | None = None
        self.arrival: Event = None
        self.departure: Event = None


class Stream:
    """Moves buckets between the device and the host, and counts."""

    def __init__(self, backend: Backend, min_bytes: int) -> None:
        self._backend = backend
        self._min_bytes = min_bytes
        self.held_bytes = 0
        """State on the device, of buckets that were adopted."""
        self.host_bytes = 0
        self.out_bytes = 0
        self.in_bytes = 0

    def adopt(self, bucket: StateBucket, states: dict[Any, Any]) -> None:
        """Find the state of the bucket's parameters; nothing moves yet."""
        self.held_bytes -= bucket.size_bytes
        bucket.views = [
            (p, key, local_of(value))
            for p in bucket.members
            for key, value in states.get(p, {}).items()
            if self._movable(local_of(value))
        ]
        bucket.size_bytes = sum(_aligned(size_of(value)) for _, _, value in bucket.views)
        self.held_bytes += bucket.size_bytes

    def _movable(self, value: Any) -> bool:
        import torch

        return (
            isinstance(value, torch.Tensor)
            and value.device == self._backend.device
            and value.layout is torch.strided
            and size_of(value) >= self._min_bytes
            and value.untyped_storage().nbytes() == size_of(value)
        )

    def disown(self, bucket: StateBucket, states: dict[Any, Any]) -> None:
        """Its tensors are somebody else's business from now on, wherever they are."""
        if bucket.where is Where.COMING:
            self._backend.wait(bucket.arrival)
        if bucket.where is not Where.AWAY:
            self.held_bytes -= bucket.size_bytes
        for p in bucket.members:
            if isinstance(states.get(p), WatchedState):
                states[p] = states[p].plain()
        bucket.flat, bucket.views, bucket.size_bytes = None, [], 0
        bucket.where, bucket.streamed = Where.HERE, False

    def _lend(self, bucket: StateBucket) -> None:
        """Somebody asks for state of this bucket."""
        if bucket.where is Where.AWAY or bucket.where is Where.COMING:
            self.bring(bucket)
        bucket.lent = True

    def _flatten(self, bucket: StateBucket, states: dict[Any, Any]) -> torch.Tensor:
        import torch

        if bucket.host is not None and bucket.host.numel() < bucket.size_bytes:
            self.host_bytes -= bucket.host.numel()
            self._backend.give_back(bucket.host)
            bucket.host = None
        if bucket.host is None:
            bucket.host = self._backend.reserve(bucket.size_bytes)
            self.host_bytes += bucket.size_bytes
        flat = bucket.flat = self._backend.alloc(bucket.size_bytes)
        offset = 0
        for _, _, value in bucket.views:
            size_bytes = size_of(value)
            old = torch.empty(0, dtype=torch.uint8, device=value.device)
            old.set_(value.untyped_storage(), 0, (size_bytes,), (1,))
            flat[offset : offset + size_bytes].copy_(old)
            first = offset // value.element_size()
            with torch.no_grad():
                value.set_(flat.untyped_storage(), first, value.size(), value.stride())
            offset += _aligned(size_bytes)
        bucket.whole = True
        for p in bucket.members:
            if p in states:
                watched = states[p] = WatchedState(states[p])
                watched.fetch = lambda: self._lend(bucket)
            else:
                bucket.whole = False
        bucket.users = self._users(bucket)
        return flat

    def _users(self, bucket: StateBucket) -> int:
        """Who holds the storage, or one of the tensors."""
        import torch

        assert bucket.flat is not None
        storage = bucket.flat.untyped_storage()
        count = int(torch._C._storage_Use_Count(storage._cdata))
        return count + sum(sys.getrefcount(value) for _, _, value in bucket.views)

    def leave(self, bucket: StateBucket, states: dict[Any, Any]) -> None:
        """Start the way to the host. `HostMemoryError` if it has no room; nothing happened then."""
        flat = self._flatten(bucket, states) if bucket.flat is None else bucket.flat
        assert bucket.host is not None
        bucket.lent = False
        bucket.departure = self._backend.copy_out(bucket.host[: bucket.size_bytes], flat)
        bucket.where = Where.LEAVING
        self.out_bytes += bucket.size_bytes

    def evict(self, bucket: StateBucket) -> bool:
        """Give the device memory up, once the bytes are on the host; `False` if somebody else holds
        some of it. A bucket that came and was not updated is on the host still."""
        assert bucket.flat is not None
        if bucket.where is Where.LEAVING:
            self._backend.wait(bucket.departure)
        elif bucket.where is Where.COMING:
            self._backend.wait(bucket.arrival)
        if self._users(bucket) > bucket.users:
            bucket.where = Where.HERE
            return False
        storage = bucket.flat.untyped_storage()
        self._backend.evicted(storage)
        storage.resize_(0)
        bucket.where = Where.AWAY
        self.held_bytes -= bucket.size_bytes
        return True

    def load(self, bucket: StateBucket) -> None:
        """Start the way to the device."""
        assert bucket.flat is not None
        assert bucket.host is not None
        bucket.flat.untyped_storage().resize_(bucket.size_bytes)
        bucket.arrival = self._backend.copy_in(bucket.flat, bucket.host[: bucket.size_bytes])
        bucket.where = Where.COMING
        self.held_bytes += bucket.size_bytes
        self.in_bytes += bucket.size_bytes

    def bring(self, bucket: StateBucket) -> None:
        """Have it on the device for what is issued from here on."""
        if bucket.where is Where.AWAY:
            self.load(bucket)
        if bucket.where is Where.COMING:
            self._backend.wait(bucket.arrival)
        bucket.where = Where.HERE

    def widen(self, bucket: StateBucket, states: dict[Any, Any]) -> bool:
        """A bucket that is here takes in the state of members that had none when it first left;
        whether there was any."""
        if bucket.whole or bucket.flat is None:
            return False
        if not any(p in states and type(states[p]) is not WatchedState for p in bucket.members):
            return False
        self.separate(bucket)
        streamed = bucket.streamed
        self.disown(bucket, states)
        self.adopt(bucket, states)
        bucket.streamed = streamed
        return True

    def separate(self, bucket: StateBucket) -> None:
        """Give each tensor of a bucket that is here a storage of its own again."""
        import torch

        for _, _, value in bucket.views:
            own = value.clone()
            with torch.no_grad():
                value.set_(own.untyped_storage(), 0, value.size(), value.stride())

    def copies(self, bucket: StateBucket) -> Iterator[tuple[Any, str, torch.Tensor]]:
        """The state of a bucket that is away and not sharded, in ordinary host memory."""
        import torch

        assert bucket.host is not None
        now = self._backend.mark()
        self._backend.elapsed_s(now, now)  # the computing stream has waited for the way out
        offset = 0
        for p, key, value in bucket.views:
            flat = bucket.host[offset : offset + size_of(value)].clone()
            copy = torch.empty(0, dtype=value.dtype)
            yield p, key, copy.set_(flat.untyped_storage(), 0, value.size(), value.stride())
            offset += _aligned(size_of(value))


def local_of(value: Any) -> Any:
    """This process's part of a sharded tensor (`DTensor`), or the value itself."""
    return getattr(value, "_local_tensor", value)


def size_of(tensor: torch.Tensor) -> int:
    """Its bytes here, if it is dense."""
    local = local_of(tensor)
    return int(local.numel() * local.element_size())


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN) * ALIGN
