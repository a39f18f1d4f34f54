"""Copies of the small parameters that recipes read, made together when a pass begins.

A recipe must not read what the program can write to, so it reads a copy. To copy each parameter for
itself takes a call of the framework and a kernel of the device (165 of them in a forward of
ViT-L/16). Which ones are wanted is known from the passes before: these are copied by one call for
each type. Each copy has a storage of its own.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import Parameter

from kilter.memory.engine.quiet import ungraded
from kilter.observe import torch_internals

PASSES = 4
"""A parameter whose copy no recipe has read for so many passes is not copied any more."""


_Key: TypeAlias = tuple[int, torch.dtype | None]
"""A parameter's identity, and the type of the copy (None: the parameter's own)."""


class _Copy(NamedTuple):
    tensor: torch.Tensor
    version: int
    """The parameter's count of writes when it was copied."""
    storage: int


class SmallCopies:
    """Copies that are valid for one pass."""

    def __init__(self) -> None:
        self._wanted: dict[_Key, tuple[Parameter, int]] = {}
        """It holds each parameter, and how many passes ago it was read. An alias in the parameter's
        place would count as a holder of its storage."""
        self._copies: dict[_Key, _Copy] = {}
        self._stream: Any = None

    def begin(self, library: Any = None) -> None:
        """A pass begins: copy what the last ones wanted. The compiled library does it sooner."""
        self._wanted = {
            key: (parameter, passes + 1)
            for key, (parameter, passes) in self._wanted.items()
            if passes < PASSES
        }
        if not self._wanted:
            self._copies = {}
            return
        device = next(iter(self._wanted.values()))[0].device
        before, stream, self._stream = self._copies, self._stream, _stream_of(device)
        if stream != self._stream:
            before = {}  # work on the other stream may still read them
        found = library and library.copies_of(self._wanted, before, _Copy, device)
        self._copies = found or _copies_of(self._wanted, before, device)

    def of(
        self, tensor: torch.Tensor, version: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """The copy of a parameter as it was at that count of writes, in this type (None: its own).
        `None` if there is none; from the next pass on there is one."""
        if type(tensor) is not Parameter:
            return None
        key = id(tensor), dtype
        self._wanted[key] = tensor, 0
        found = self._copies.get(key)
        if (
            found is None
            or found.version != version
            or found.storage != tensor.untyped_storage()._cdata
            or self._stream != _stream_of(tensor.device)
        ):
            return None
        return found.tensor


def _copies_of(
    wanted: dict[_Key, tuple[Parameter, int]], before: dict[_Key, _Copy], device: torch.device
) -> dict[_Key, _Copy]:
    """Copies of those that are on this device. They take the memory of those before that no recipe
    reads any more."""
    found: dict[_Key, _Copy] = {}
    by_type: dict[tuple[Any, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for key, (parameter, _) in wanted.items():
        storage = parameter.untyped_storage()
        if parameter.device != device or not parameter.is_contiguous() or not storage.nbytes():
            continue
        copy = _room_for(parameter, key[1] or parameter.dtype, before.get(key))
        copies, parameters = by_type.setdefault((parameter.dtype, copy.dtype), ([], []))
        copies.append(copy)
        parameters.append(parameter)
        found[key] = _Copy(copy, parameter._version, storage._cdata)
    for several in by_type.values():
        ungraded(partial(torch_internals.foreach_copy, *several))
    return found


def _room_for(parameter: Parameter, dtype: torch.dtype, before: _Copy | None) -> torch.Tensor:
    if before is not None:
        tensor = before.tensor
        alike = tensor.size() == parameter.size() and tensor.dtype is dtype
        if alike and sys.getrefcount(tensor) == OURS and tensor.device == parameter.device:
            return tensor
    return torch.empty_like(parameter, dtype=dtype)


OURS = 3
"""A copy that nothing of ours holds but its `_Copy` has so many references in `_room_for`."""


def _stream_of(device: torch.device) -> Any:
    """The stream to which operations of this device are issued."""
    return torch_internals.cuda_raw_stream(device.index) if device.type == "cuda" else None
