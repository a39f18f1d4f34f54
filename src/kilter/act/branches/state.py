"""Watches what a prepared form was made from: weights, tables, modes and attributes.

A captured graph reads addresses and a trace has Python's decisions baked in. A change of values in
place (an optimizer step, `load_state_dict`) is seen by both; a weight replaced or moved, a table
rewritten, `train()`, or a changed number on a module is not, and makes the form stale.

`changed` runs at every call, so what is watched lies in flat lists that C loops walk: a few tens of
nanoseconds for each thing. Only where an object is another one is it asked what it is.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None))
_HELD = (Tensor, list, dict, tuple, types.FunctionType, nn.Module)
_OWN = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_IDLE = tuple(name for name in vars(nn.Module()) if "hook" in name and name not in _HOOKS)
"""Hooks of saving and loading, and marks beside the hooks that are watched."""


class State:
    """What `roots` (modules, functions, anything they hold) looked like when it was made."""

    def __init__(self, roots: Iterable[Any]) -> None:
        # `holder[name]` was the item: for each holder a getter of all its names at once.
        self._holders: list[Any] = []
        self._names: list[tuple[Any, ...]] = []
        self._items: list[Any] = []
        self._cells: list[types.CellType] = []
        self._contents: list[Any] = []
        self._sized: list[Any] = []
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
        self._getters = [itemgetter(*names) for names in self._names]
        self._empty = [holder for holder in self._sized if not holder]
        self._sized = [holder for holder in self._sized if holder]
        self._sizes = list(map(len, self._sized))
        self._tensors = list(self.tensors.values())
        # An alias keeps the memory alive: until the change is noticed, a replay may still read it.
        self._alive = [t.detach() for t in self._tensors]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._sources: list[Tensor] = []
        self._versions: list[int] = []
        self._recorded: list[bool] | None = None

    def _watch(self, holder: Any, items: Sequence[tuple[Any, Any]]) -> None:
        if items:
            if len(items) == 1:
                items = [*items, *items]  # a getter of one name would not return a tuple
            self._holders.append(holder)
            self._names.append(tuple(name for name, _ in items))
            self._items += [item for _, item in items]

    def _look_into(self, found: Any) -> list[Any]:
        if isinstance(found, Tensor):
            if not nn.parameter.is_lazy(found):
                self.tensors[id(found)] = found
            return []
        if isinstance(found, nn.Module):
            self.modules.append(found)
            inside: list[Any] = []
            for group in (found._parameters, found._buffers, found._modules):
                self._sized.append(group)
                self._watch(group, list(group.items()))
                inside += group.values()
            return [*inside, *self._attributes(found)]
        if isinstance(found, types.MethodType):
            return [found.__self__, found.__func__]
        if isinstance(found, types.FunctionType):
            return self._function(found)
        if isinstance(found, partial):
            return [found.func, *found.args, *found.keywords.values()]
        if isinstance(found, (dict, list)):
            self._sized.append(found)
            pairs = list(found.items() if isinstance(found, dict) else enumerate(found))
            self._watch(found, pairs)
            return [item for _, item in pairs]
        if isinstance(found, tuple):
            return list(found)
        if isinstance(found, (*_PLAIN, type, types.ModuleType)) or not hasattr(found, "__dict__"):
            return []
        if type(found).__module__.split(".")[0] in ("torch", "builtins"):
            return []
        return self._attributes(found)

    def _function(self, found: types.FunctionType) -> list[Any]:
        inside: list[Any] = [*(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values()]
        for cell in found.__closure__ or ():
            self._cells.append(cell)
            self._contents.append(cell.cell_contents)
            inside.append(cell.cell_contents)
        watched = []
        for name in found.__code__.co_names:
            item = found.__globals__.get(name)
            if isinstance(item, _HELD):
                if not getattr(item, "__module__", "").startswith("torch"):
                    watched.append((name, item))
                    inside.append(item)
            elif isinstance(item, _PLAIN) and name in found.__globals__:
                watched.append((name, item))
        self._watch(found.__globals__, watched)
        return inside

    def _attributes(self, owner: Any) -> list[Any]:
        """An object's own attributes; one more is noticed too (a `forward` of its own, say)."""
        inside, watched = [], []
        attributes = vars(owner)
        self._sized.append(attributes)
        module = isinstance(owner, nn.Module)
        for name, item in attributes.items():
            if module and (name in _OWN or name in _IDLE):
                continue
            if module and name in _HOOKS and not item:
                self._sized.append(item)
            elif isinstance(item, _HELD):
                watched.append((name, item))
                inside.append(item)
            elif isinstance(item, _PLAIN):
                watched.append((name, item))
        self._watch(attributes, watched)
        return inside

    def watch_values(self, tensors: Iterable[Tensor]) -> None:
        """Also notice when the values of these change in place: they were computed with."""
        for tensor in tensors:
            if not tensor.is_inference():
                self._sources.append(tensor)
                self._versions.append(tensor._version)

    def watch_gradients(self) -> None:
        """Also notice when a weight is frozen or thawed."""
        self._recorded = list(map(_RECORDED, self._tensors))

    def changed(self) -> str | None:
        """Why the form is stale, or None."""
        if list(map(Tensor.data_ptr, self._tensors)) != self._addresses:
            return "weights were moved"
        try:
            if not all(
                map(is_, chain.from_iterable(map(call, self._getters, self._holders)), self._items)
            ):
                replaced = self._replaced()
                if replaced is not None:
                    return replaced
        except (KeyError, IndexError) as error:
            return f"{error.args[0]!r} was removed"
        if any(self._empty) or list(map(len, self._sized)) != self._sizes:  # also hooks
            return "something was added or removed"
        if not all(map(is_, map(_CONTENTS, self._cells), self._contents)):
            return "a captured variable was replaced"
        if list(map(_VERSION, self._sources)) != self._versions:
            return "a table was changed in place"
        if self._recorded is not None and list(map(_RECORDED, self._tensors)) != self._recorded:
            return "a weight was frozen or thawed"
        return None

    def _replaced(self) -> str | None:
        """What is another object, and no equal number."""
        places = [
            (h, n) for h, names in zip(self._holders, self._names, strict=True) for n in names
        ]
        for at, (holder, name) in enumerate(places):
            item, now = self._items[at], holder[name]
            if now is item:
                continue
            if type(now) is not type(item) or not isinstance(item, _PLAIN):
                return f"{name!r} was replaced"
            if now != item:
                return f"attribute {name!r} changed from {item!r} to {now!r}"
            self._items[at] = now
        return None


_CONTENTS = attrgetter("cell_contents")
_VERSION = attrgetter("_version")
_RECORDED = attrgetter("requires_grad")


def needs_grad(state: State, tensors: Iterable[Tensor]) -> bool:
    """Whether autograd would record this call."""
    if not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in (*state.tensors.values(), *tensors))
