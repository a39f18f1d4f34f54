"""Copies of the small parameters that recipes read, made together when a pass begins.

A recipe must not read what the program can write to, so it reads a copy. To copy each parameter for
itself takes a call of the framework and a kernel of the device (165 of them in a forward of
ViT-L/16). Which ones are wanted is known from the passes before: these are copied by one call for
each type. Each copy has a storage of its own.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from kilter.memory.engine.quiet import ungraded
from kilter.observe import torch_internals

PASSES = 4
"""A parameter whose copy no recipe has read for so many passes is not copied any more."""


class _Copy(NamedTuple):
    tensor: torch.Tensor
    version: int
    """The parameter's count of writes when it was copied."""
    storage: int


class SmallCopies:
    """Copies that are valid for one pass."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[Parameter, int]] = {}
        """It holds each parameter by identity, and how many passes ago it was read. An alias in the
        parameter's place would count as a holder of its storage."""
        self._copies: dict[int, _Copy] = {}
        self._stream: Any = None

    def begin(self) -> None:
        """A pass begins: copy what the last ones wanted."""
        self._wanted = {
            key: (parameter, passes + 1)
            for key, (parameter, passes) in self._wanted.items()
            if passes < PASSES
        }
        before, self._copies = self._copies, {}
        by_type: dict[tuple[torch.device, torch.dtype], list[Parameter]] = {}
        for parameter, _ in self._wanted.values():
            if parameter.is_contiguous() and parameter.untyped_storage().nbytes():
                by_type.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for (device, _), parameters in by_type.items():
            stream, self._stream = self._stream, _stream_of(device)
            if stream != self._stream:
                before = {}  # work on the other stream may still read them
            self._copies |= ungraded(partial(_copies_of, parameters, before))

    def of(self, tensor: torch.Tensor, version: int) -> torch.Tensor | None:
        """The copy of a parameter as it was at that count of writes. `None` if there is none; from
        the next pass on there is one."""
        if type(tensor) is not Parameter:
            return None
        self._wanted[id(tensor)] = tensor, 0
        found = self._copies.get(id(tensor))
        if (
            found is None
            or found.version != version
            or found.storage != tensor.untyped_storage()._cdata
            or self._stream != _stream_of(tensor.device)
        ):
            return None
        return found.tensor


def _copies_of(parameters: list[Parameter], before: dict[int, _Copy]) -> dict[int, _Copy]:
    """By identity; all of one type and device. They take the memory of those before that no recipe
    reads any more."""
    versions = [parameter._version for parameter in parameters]
    copies = [_room_for(parameter, before.pop(id(parameter), None)) for parameter in parameters]
    torch_internals.foreach_copy(copies, parameters)
    return {
        id(parameter): _Copy(copy, version, parameter.untyped_storage()._cdata)
        for parameter, copy, version in zip(parameters, copies, versions, strict=True)
    }


def _room_for(parameter: Parameter, before: _Copy | None) -> torch.Tensor:
    if before is not None:
        tensor = before.tensor
        alike = tensor.size() == parameter.size() and tensor.dtype is parameter.dtype
        if alike and sys.getrefcount(tensor) == OURS and tensor.device == parameter.device:
            return tensor
    return torch.empty_like(parameter)


OURS = 3
"""A copy that nothing of ours holds but its `_Copy` has so many references in `_room_for`."""


def _stream_of(device: torch.device) -> Any:
    """The stream to which operations of this device are issued."""
    return torch_internals.cuda_raw_stream(device.index) if device.type == "cuda" else None
