"""Watches what a prepared form was made from: weights, tables, modes and attributes.

A captured graph reads addresses and a trace has Python's decisions baked in. A change of values in
place (an optimizer step, `load_state_dict`) is seen by both; a weight replaced or moved, a table
rewritten, `train()`, or a changed number on a module is not, and makes the form stale.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None))


class State:
    """What `roots` (modules, functions, anything they hold) looked like when it was made."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._held: list[tuple[Any, Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._plain: list[tuple[dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[Any, int]] = []
        self.tensors: dict[int, Tensor] = {}
        self.modules: list[nn.Module] = []
        seen: set[int] = set()
        pending = list(roots)
        while pending:
            found = pending.pop()
            if id(found) in seen:
                continue
            seen.add(id(found))
            pending += self._look_into(found)
        # An alias keeps the memory alive: until the change is noticed, a replay may still read it.
        self._alive = [t.detach() for t in self.tensors.values()]
        self._addresses = [t.data_ptr() for t in self.tensors.values()]
        self._versions: list[tuple[Tensor, int]] = []

    def _look_into(self, found: Any) -> list[Any]:
        if isinstance(found, Tensor):
            if not nn.parameter.is_lazy(found):
                self.tensors[id(found)] = found
            return []
        if isinstance(found, nn.Module):
            self.modules.append(found)
            for group in (found._parameters, found._buffers, found._modules):
                self._sizes.append((group, len(group)))
                for name, item in group.items():
                    self._held.append((group, name, item))
            return [
                *found._parameters.values(),
                *found._buffers.values(),
                *found._modules.values(),
                *self._attributes(found),
            ]
        if isinstance(found, types.MethodType):
            return [found.__self__, found.__func__]
        if isinstance(found, types.FunctionType):
            inside: list[Any] = [
                *(found.__defaults__ or ()),
                *(found.__kwdefaults__ or {}).values(),
            ]
            for cell in found.__closure__ or ():
                self._cells.append((cell, cell.cell_contents))
                inside.append(cell.cell_contents)
            for name in found.__code__.co_names:
                item = found.__globals__.get(name)
                if isinstance(item, (Tensor, nn.Module, types.FunctionType, list, dict, tuple)):
                    if not getattr(item, "__module__", "").startswith("torch"):
                        self._held.append((found.__globals__, name, item))
                        inside.append(item)
                elif isinstance(item, _PLAIN) and name in found.__globals__:
                    self._plain.append((found.__globals__, name, item))
            return inside
        if isinstance(found, partial):
            return [found.func, *found.args, *found.keywords.values()]
        if isinstance(found, (dict, list)):
            self._sizes.append((found, len(found)))
        if isinstance(found, dict):
            self._held += [(found, key, item) for key, item in found.items()]
            return list(found.values())
        if isinstance(found, (list, tuple)):
            if isinstance(found, list):
                self._held += [(found, i, item) for i, item in enumerate(found)]
            return list(found)
        if isinstance(found, (*_PLAIN, type, types.ModuleType)) or not hasattr(found, "__dict__"):
            return []
        if type(found).__module__.split(".")[0] in ("torch", "builtins"):
            return []
        return self._attributes(found)

    def _attributes(self, owner: Any) -> list[Any]:
        """An object's own attributes: numbers are compared by value, the rest by identity."""
        inside = []
        for name, item in vars(owner).items():
            if isinstance(item, _PLAIN):
                self._plain.append((vars(owner), name, item))
            elif name not in ("_parameters", "_buffers", "_modules") and isinstance(
                item, (Tensor, list, dict, tuple, types.FunctionType, nn.Module)
            ):
                self._held.append((vars(owner), name, item))
                inside.append(item)
        return inside

    def watch_values(self, tensors: Iterable[Tensor]) -> None:
        """Also notice when the values of these change in place: they were computed with."""
        for tensor in tensors:
            if not tensor.is_inference():
                self._versions.append((tensor, tensor._version))

    def changed(self) -> str | None:
        """Why the form is stale, or None."""
        if [t.data_ptr() for t in self.tensors.values()] != self._addresses:
            return "weights were moved"
        for holder, name, item in self._held:
            try:
                if holder[name] is not item:
                    return f"{name!r} was replaced"
            except (KeyError, IndexError):
                return f"{name!r} was removed"
        for holder, size in self._sizes:  # also the dictionaries of hooks
            if len(holder) != size:
                return "something was added or removed"
        for cell, item in self._cells:
            if cell.cell_contents is not item:
                return "a captured variable was replaced"
        for owner, name, number in self._plain:
            now = owner.get(name)
            if now is not number and (type(now) is not type(number) or now != number):
                return f"attribute {name!r} changed from {number!r} to {now!r}"
        for tensor, version in self._versions:
            if tensor._version != version:
                return "a table was changed in place"
        return None


def needs_grad(state: State, leaves: Iterable[Any]) -> bool:
    """Whether autograd would record this call."""
    if not torch.is_grad_enabled():
        return False
    tensors = [*state.tensors.values(), *(x for x in leaves if isinstance(x, Tensor))]
    return any(t.requires_grad for t in tensors)
