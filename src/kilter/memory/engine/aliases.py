"""Whether a tensor's bytes can be reached other than through the tensor itself.

A tensor's bytes may be moved if all readers go through the tensor object. A view, an array of
NumPy, a DLPack capsule or another process holds the address instead.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kilter.memory.engine.backend import owned
from kilter.memory.engine.saved_hooks import is_ours
from kilter.observe import torch_internals

if TYPE_CHECKING:
    import torch


class Holders(NamedTuple):
    """How many hold a tensor and its storage."""

    tensor: int
    """So many hold it from C++, beside the one Python object."""
    storage: int
    storage_object: int
    """Python has so many references to the storage."""

    def exceed(self, alone: Holders, others: int = 0) -> bool:
        """There are more than of a tensor that nobody else holds, beside so many tensors of ours on
        the same storage."""
        return (
            self.tensor > alone.tensor
            or self.storage > alone.storage + others
            or self.storage_object > alone.storage_object
        )


def holders(tensor: torch.Tensor) -> Holders:
    storage = tensor.untyped_storage()
    uses = torch_internals.storage_use_count(storage._cdata)
    return Holders(tensor._use_count(), uses, sys.getrefcount(storage))


def shared_with_processes(storage: torch.UntypedStorage) -> bool:
    """Another process has it, or had it."""
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is None:
        return False
    return any(ref.cdata == storage._cdata for ref in reductions.shared_cache.values())


class WeightHolders:
    """Counts who holds a weight: another tensor on its storage, something in C++ (a graph that
    saved it without our hooks, a scripted module), another process."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.counted = hasattr(torch.Tensor, "_use_count")
        """The framework tells how many hold a tensor."""
        if not self.counted:
            return
        fresh = torch.nn.Parameter(torch.empty(1, device=device))
        self._alone = holders(fresh)
        edge = torch.autograd.graph.get_gradient_edge(fresh)
        self._alone_in_graph = holders(fresh)
        del edge

    def others(self, parameter: Any, ours: int = 0) -> bool:
        """Others hold it, beside so many tensors of ours on the same storage."""
        alone = self._alone_in_graph if parameter.requires_grad else self._alone
        return holders(parameter).exceed(alone, ours)

    def unreachable(self, parameter: Any) -> bool:
        """The bytes can be reached through the parameter only."""
        if not self.counted or self.others(parameter):
            return False
        if not owned(parameter.untyped_storage(), on_cuda=parameter.is_cuda):
            return False
        top = torch_internals.top_saved_hooks(True)
        if top is not None and not is_ours(top[1]):
            return False
        return not shared_with_processes(parameter.untyped_storage())


class StorageReference:
    """A weak reference to a storage: its address stays its own as long as this lives.

    That of torch has a destructor written in Python. Where a signal handler raises in one, Python
    drops the exception; this destructor is C from end to end.
    """

    __slots__ = ("cdata", "free")
    __del__ = property(operator.attrgetter("free"))

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata: int = storage._weak_ref()
        self.free = partial(torch_internals.free_weak_storage, self.cdata)

    def expired(self) -> bool:
        return bool(torch_internals.storage_expired(self.cdata))


class Known:
    """Recognises a parameter that was seen before. Not by a weak reference to the parameter: with
    one, `torch.utils.swap_tensors` refuses it, and with that `module.to` of some kinds of
    parameters."""

    __slots__ = ("_storage", "_storage_key")

    def __init__(self, parameter: torch.Tensor) -> None:
        storage = parameter.untyped_storage()
        self._storage_key = storage._cdata
        self._storage = StorageReference(storage)

    def __call__(self, parameter: torch.Tensor) -> bool:
        """The parameter that now has this identity still has its storage: it is the same one."""
        return bool(parameter.untyped_storage()._cdata == self._storage_key)

    def gone(self) -> bool:
        return self._storage.expired()


def view_of(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int = 0,
) -> torch.Tensor:
    """A tensor on the storage of another one, and no view of it. `offset` counts elements."""
    import torch

    found = torch.empty(0, dtype=dtype, device=tensor.device)
    return found.set_(tensor.untyped_storage(), offset, size, stride)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    import torch

    return view_of(tensor, torch.uint8, (tensor.untyped_storage().nbytes(),), (1,))


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without bytes whose `_version` is this tensor's, now and later."""
    counter = tensor.detach()
    torch_internals.set_data(counter, tensor.new_empty(0))
    return counter
