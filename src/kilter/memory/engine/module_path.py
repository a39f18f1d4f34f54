"""Where in the program's model a tensor is saved, as the calls of modules that are running show it.
Read while a pass is watched; nothing is installed for it."""

from __future__ import annotations

import sys
import weakref
from itertools import pairwise
from types import FrameType

from torch.nn import Module

from kilter.observe import torch_internals

_CALL = getattr(getattr(torch_internals, "call_of_module", None), "__code__", None)
"""The frames of calls have this code; None: in this PyTorch they cannot be told from others."""


ModuleReference = weakref.ref[Module]


class ModulePaths:
    """Names that were looked for once are kept."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], tuple[ModuleReference, ModuleReference, str]] = {}
        """By the addresses of an outer and an inner module, which others may have later."""
        self.outermost = True
        """The module that was asked for last is called by no other one."""

    def present(self) -> str:
        """Of the innermost module whose call is running in this thread, from the outermost one on:
        `layers.3.mlp`. The outermost one itself has the name of its class; empty outside of calls.
        """
        calls: list[Module] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL:
                calls.append(frame.f_locals["self"])
            frame = frame.f_back
        calls.reverse()
        self.outermost = len(calls) < 2
        names = [self._name(outer, inner) for outer, inner in pairwise(calls)]
        return ".".join(names) if names else "".join(type(one).__name__ for one in calls)

    def _name(self, outer: Module, inner: Module) -> str:
        key = id(outer), id(inner)
        known = self._names.get(key)
        if known is not None and known[0]() is outer and known[1]() is inner:
            return known[2]
        found = (name for name, module in Module.named_modules(outer) if module is inner and name)
        name = next(found, type(inner).__name__)
        self._names[key] = weakref.ref(outer), weakref.ref(inner), name
        return name
