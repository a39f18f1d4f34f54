"""Optimizer state of some parameters that moves between the device and the host as a whole.

A state tensor always has its bytes. While it is offloaded it is the same object of the same class,
on the same device, and its bytes lie in pinned host memory that the device reads and writes across
the link. Any reader or writer, in Python or in C++, finds the right values, only more slowly. So
the optimizer's dictionaries need no guards, and nothing of ours is in a copy or a pickle of them.

A tensor is moved only if nobody has the address of its bytes (`aliases.py`). A tensor that has an
alias stays where it is, and is updated there, on either side of the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from kilter.memory.engine.aliases import bytes_of, holders, shared_with_processes, view_of
from kilter.memory.engine.backend import Backend, CopyEvent, HostMemoryError, owned
from kilter.memory.plan.problem import aligned

if TYPE_CHECKING:
    import torch


class Where(Enum):
    """Of the bytes that are valid."""

    RESIDENT = "resident"
    OFFLOADING = "offloading"
    """It is on the device, and being copied to the host."""
    OFFLOADED = "offloaded"
    PREFETCHING = "prefetching"
    """It is on the host, and being copied to the device."""


@dataclass(slots=True)
class StateTensor:
    """One state tensor of a bucket."""

    parameter: torch.nn.Parameter
    key: str
    """The optimizer has this name for the tensor."""
    value: Any
    """What the optimizer holds: the tensor, or the sharded one (`DTensor`) that it is a part of."""
    tensor: torch.Tensor
    address: int
    """Its bytes were last put at this address. The program may give it other bytes."""
    version: int = -1
    """When the last copy of it was started."""
    on_host: torch.Tensor | None = None
    in_flat: torch.Tensor | None = None
    """Both are tensors of the same shape, one on either side, whose bytes become its own."""

    @property
    def ours(self) -> bool:
        return bool(self.tensor.data_ptr() == self.address)

    def take(self, bytes_of: torch.Tensor) -> None:
        """Give it the bytes of another tensor. The version stays, as the value does."""
        if self.ours:
            self.tensor.data = bytes_of
            self.address = bytes_of.data_ptr()


class StateBucket:
    """Parameters that are updated together, and where their state is."""

    def __init__(self, members: Sequence[torch.nn.Parameter]) -> None:
        self.members = members
        self.awaited = len(members)
        """So many of them have a gradient in an ordinary iteration."""
        self.missing = self.awaited
        """So many gradients of this backward have not arrived yet."""
        self.gradient_bytes = sum(size_of(p) for p in members)
        self.sharded = any(local_of(p) is not p for p in members)
        self.streamed = False
        self.where = Where.RESIDENT
        self.size_bytes = 0
        """The state that can be offloaded takes this."""
        self.parts: list[StateTensor] = []
        self.without: list[torch.nn.Parameter] = []
        """These members have no state yet."""
        self.flat: torch.Tensor | None = None
        """Device memory for the whole bucket, once it was prefetched for the first time."""
        self.host: torch.Tensor | None = None
        self.arrival: CopyEvent = None
        self.departure: CopyEvent = None


class Stream:
    """Moves buckets between the device and the host, and counts."""

    def __init__(self, backend: Backend, min_bytes: int) -> None:
        import torch

        self._backend = backend
        self._min_bytes = min_bytes
        self._alone = holders(torch.empty(1, device=backend.device))
        self.held_bytes = 0
        """State of buckets that were adopted takes so much on the device."""
        self.host_bytes = 0
        self.out_bytes = 0
        self.in_bytes = 0

    # Which tensors belong to a bucket

    def adopt(self, bucket: StateBucket, states: dict[Any, Any]) -> None:
        """Find the state of the bucket's parameters; nothing moves yet."""
        self.disown(bucket)
        bucket.without = [p for p in bucket.members if not states.get(p)]
        for p in bucket.members:
            for key, value in states.get(p, {}).items():
                tensor = local_of(value)
                if self._movable(tensor):
                    bucket.parts.append(StateTensor(p, key, value, tensor, tensor.data_ptr()))
        bucket.size_bytes = sum(aligned(size_of(part.tensor)) for part in bucket.parts)
        self.held_bytes += bucket.size_bytes

    def _movable(self, value: Any) -> bool:
        import torch

        return (
            type(value) is torch.Tensor
            and value.device == self._backend.device
            and value.layout is torch.strided
            and not value.requires_grad
            and size_of(value) >= self._min_bytes
            and value.untyped_storage().nbytes() == size_of(value)
            and owned(value.untyped_storage(), on_cuda=value.is_cuda)
        )

    def disown(self, bucket: StateBucket) -> None:
        """Stop following its tensors, wherever their bytes are."""
        self._finish_copies(bucket)
        if bucket.where is not Where.OFFLOADED:
            self.held_bytes -= bucket.size_bytes
        self._forget_memory(bucket)
        bucket.parts, bucket.size_bytes = [], 0
        bucket.where = Where.RESIDENT

    def _forget_memory(self, bucket: StateBucket) -> None:
        """Tensors whose bytes are still in it keep it alive."""
        if bucket.host is not None:
            self.host_bytes -= bucket.host.numel()
        bucket.flat = bucket.host = None
        for part in bucket.parts:
            part.on_host = part.in_flat = None

    def known(self, bucket: StateBucket, states: dict[Any, Any]) -> bool:
        """The optimizer still has these tensors and no others, and their bytes are where we put
        them."""
        if any(states.get(p) for p in bucket.without):
            return False
        nothing: dict[str, Any] = {}
        return all(
            part.ours and states.get(part.parameter, nothing).get(part.key) is part.value
            for part in bucket.parts
        )

    def note(self, bucket: StateBucket) -> None:
        """Remember the versions, to recognise writes from here on."""
        for part in bucket.parts:
            part.version = part.tensor._version

    def written(self, bucket: StateBucket) -> bool:
        """The program wrote to it since."""
        return any(part.version != part.tensor._version for part in bucket.parts)

    def _aliased(self, bucket: StateBucket) -> bool:
        """The program has the address of a tensor's bytes, or gave the tensor other bytes."""
        alone = self._alone
        if not all(part.ours for part in bucket.parts):
            return True
        if bucket.flat is not None and bucket.where in (Where.RESIDENT, Where.OFFLOADING):
            if holders(bucket.flat).exceed(alone, 2 * len(bucket.parts)):
                return True
            return any(part.tensor._use_count() > alone.tensor for part in bucket.parts)
        others = int(bucket.where in (Where.OFFLOADED, Where.PREFETCHING))
        return any(
            holders(part.tensor).exceed(alone, others)
            or shared_with_processes(part.tensor.untyped_storage())
            for part in bucket.parts
        )

    # To the host

    def offload(self, bucket: StateBucket) -> bool:
        """Start the copy of a resident bucket; `False` if the program has an alias of a part.
        `HostMemoryError` if the host has no room; nothing happened then."""
        if self._aliased(bucket):
            return False
        if bucket.host is None:
            self._reserve(bucket)
        assert bucket.host is not None
        if bucket.flat is not None:
            bucket.departure = self._backend.copy_out(bucket.host, bucket.flat)
        else:
            begin = 0
            for part in bucket.parts:
                size_bytes = size_of(part.tensor)
                bucket.departure = self._backend.copy_out(
                    bucket.host[begin : begin + size_bytes], bytes_of(part.tensor)
                )
                begin += aligned(size_bytes)
        self.note(bucket)
        bucket.where = Where.OFFLOADING
        self.out_bytes += bucket.size_bytes
        return True

    def _reserve(self, bucket: StateBucket) -> None:
        host = self._backend.reserve(bucket.size_bytes)
        begin = 0
        try:
            for part in bucket.parts:
                size_bytes = size_of(part.tensor)
                memory = self._backend.on_device(host, begin, size_bytes)
                part.on_host = shaped(memory, 0, part.tensor)
                begin += aligned(size_bytes)
        except HostMemoryError:
            self._forget_memory(bucket)
            self._backend.give_back(host)
            raise
        bucket.host = host
        self.host_bytes += bucket.size_bytes

    def evict(self, bucket: StateBucket) -> bool:
        """Give its device memory up, once the bytes are on the host; `False` if the program has
        an alias of a part, or has written to the bucket since the copy was started."""
        self._finish_copies(bucket)
        if bucket.where is Where.PREFETCHING:  # the bytes on the host are the valid ones
            self._empty_flat(bucket)
            return True
        if self._aliased(bucket) or self.written(bucket):
            bucket.where = Where.RESIDENT
            return False
        for part in bucket.parts:
            assert part.on_host is not None
            part.take(part.on_host)
        self._empty_flat(bucket)
        return True

    def _empty_flat(self, bucket: StateBucket) -> None:
        if bucket.flat is not None:
            storage = bucket.flat.untyped_storage()
            self._backend.evicted(storage)
            storage.resize_(0)
        bucket.where = Where.OFFLOADED
        self.held_bytes -= bucket.size_bytes

    # To the device

    def prefetch(self, bucket: StateBucket) -> None:
        """Start the copy of an offloaded bucket, unless the program has an alias of a part."""
        if self._aliased(bucket):
            return
        assert bucket.host is not None
        if bucket.flat is None:
            flat = bucket.flat = self._backend.alloc(bucket.size_bytes)
            begin = 0
            for part in bucket.parts:
                part.in_flat = shaped(flat, begin, part.tensor)
                begin += aligned(size_of(part.tensor))
        else:
            bucket.flat.untyped_storage().resize_(bucket.size_bytes)
        bucket.arrival = self._backend.copy_in(bucket.flat, bucket.host)
        self.note(bucket)
        bucket.where = Where.PREFETCHING
        self.held_bytes += bucket.size_bytes
        self.in_bytes += bucket.size_bytes

    def fetch(self, bucket: StateBucket) -> None:
        """Make it resident for what is issued from here on; what the program has an alias of is
        used where it is."""
        if bucket.where is Where.OFFLOADING:
            bucket.where = Where.RESIDENT
        if bucket.where is Where.OFFLOADED:
            self.prefetch(bucket)
        if bucket.where is not Where.PREFETCHING:
            return
        self._backend.wait(bucket.arrival)
        if self._aliased(bucket) or self.written(bucket):
            self._empty_flat(bucket)
            return
        for part in bucket.parts:
            assert part.in_flat is not None
            part.take(part.in_flat)
        bucket.where = Where.RESIDENT

    def settle(self, bucket: StateBucket) -> None:
        """Have it on the device for good, each tensor with memory of its own as before. What
        somebody has an alias of stays where it lies. `torch.OutOfMemoryError` if the device has
        no room; nothing happened then."""
        import torch

        self._finish_copies(bucket)
        if bucket.where is Where.PREFETCHING:
            self._empty_flat(bucket)
        elif bucket.where is Where.OFFLOADING:
            bucket.where = Where.RESIDENT
        offloaded = bucket.where is Where.OFFLOADED
        if (not offloaded and bucket.flat is None) or self._aliased(bucket):
            return
        own = [p.tensor.clone(memory_format=torch.preserve_format) for p in bucket.parts]
        for part, copy in zip(bucket.parts, own, strict=True):
            part.take(copy)
        if offloaded:
            self.held_bytes += bucket.size_bytes
            self.in_bytes += bucket.size_bytes
        bucket.where = Where.RESIDENT
        self._forget_memory(bucket)

    def _finish_copies(self, bucket: StateBucket) -> None:
        for event in (bucket.departure, bucket.arrival):
            if event is not None:
                self._backend.wait(event)


def shaped(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes of `memory` from `begin` on as a tensor like another one, and no view of any."""
    first = begin // like.element_size()
    return view_of(memory, like.dtype, like.size(), like.stride(), first)


def local_of(value: Any) -> Any:
    """This process's part of a sharded tensor (`DTensor`), or the value itself."""
    return getattr(value, "_local_tensor", value)


def size_of(tensor: torch.Tensor) -> int:
    """Its bytes here, if it is dense."""
    local = local_of(tensor)
    return int(local.numel() * local.element_size())
