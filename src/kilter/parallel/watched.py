"""Watches what a prepared form was made from: weights, tables, modes and attributes.

A captured graph reads addresses and a trace has Python's decisions baked in. A change of values in
place (an optimizer step, `load_state_dict`) is seen by both; a weight replaced or moved, a table
rewritten, `train()`, or a changed number on a module is not, and makes the form stale.

`changed` runs at every call, so what is watched lies in flat lists that C loops walk: a few tens of
nanoseconds for each thing. A dictionary's version, which the framework's compiler keeps for its own
guards, stands for its items until it is written to. Only where an object is another one is it asked
what it is.
"""

from __future__ import annotations

import types
from collections import ChainMap, Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

try:
    from torch._C._dynamo.guards import dict_version
except ImportError:  # not promised to anybody: without it every item is looked at in every call
    dict_version = None  # type: ignore[assignment]

_PLAIN = (bool, int, float, str, type(None))
_HELD = (Tensor, list, dict, tuple, types.FunctionType, nn.Module)
_OWN = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_IDLE = tuple(name for name in vars(nn.Module()) if "hook" in name and name not in _HOOKS)
"""Hooks of saving and loading, and marks beside the hooks that are watched."""


@dataclass
class _Held:
    """`holder[name]` was the item: for each holder a getter of all its names at once."""

    holders: list[Any] = field(default_factory=list)
    names: list[tuple[Any, ...]] = field(default_factory=list)
    getters: list[itemgetter[Any]] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)

    def add(self, holder: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
        if len(pairs) == 1:
            pairs = [*pairs, *pairs]  # a getter of one name would not return a tuple
        names = tuple(name for name, _ in pairs)
        self.holders.append(holder)
        self.names.append(names)
        self.getters.append(itemgetter(*names))
        self.items += [item for _, item in pairs]

    def replaced(self) -> str | None:
        """What is another object, and no equal number."""
        now = chain.from_iterable(map(call, self.getters, self.holders))
        if all(map(is_, now, self.items)):
            return None
        places = [(h, n) for h, names in zip(self.holders, self.names, strict=True) for n in names]
        for at, (holder, name) in enumerate(places):
            item, found = self.items[at], holder[name]
            if found is item:
                continue
            if type(found) is not type(item) or not isinstance(item, _PLAIN):
                return f"{name!r} was replaced"
            if found != item:
                return f"attribute {name!r} changed from {item!r} to {found!r}"
            self.items[at] = found
        return None


class State:
    """What `roots` (modules, functions, anything they hold) looked like when it was made."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._versioned, self._others = _Held(), _Held()
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
        self._empty = [holder for holder in self._sized if not holder]
        self._sized = [holder for holder in self._sized if holder]
        self._sizes = list(map(len, self._sized))
        self._lists = [holder for holder in self._sized if not _has_version(holder)]
        self._lengths = list(map(len, self._lists))
        both = {id(h): h for h in (*self._sized, *self._versioned.holders) if _has_version(h)}
        self._dicts = list(both.values())
        self._dict_versions = list(map(dict_version, self._dicts))
        self._tensors = list(self.tensors.values())
        # An alias keeps the memory alive: until the change is noticed, a replay may still read it.
        self._alive = [t.detach() for t in self._tensors]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._sources: list[Tensor] = []
        self._versions: list[int] = []
        self._recorded: list[bool] | None = None

    def _watch(self, holder: Any, items: Sequence[tuple[Any, Any]]) -> None:
        if items:
            (self._versioned if _has_version(holder) else self._others).add(holder, items)

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
        versions = list(map(dict_version, self._dicts))
        written = versions != self._dict_versions
        try:
            replaced = self._others.replaced() or (self._versioned.replaced() if written else None)
        except (KeyError, IndexError) as error:
            return f"{error.args[0]!r} was removed"
        if replaced is not None:
            return replaced
        holders, sizes = (self._sized, self._sizes) if written else (self._lists, self._lengths)
        if any(self._empty) or list(map(len, holders)) != sizes:  # also hooks
            return "something was added or removed"
        self._dict_versions = versions
        if not all(map(is_, map(_CONTENTS, self._cells), self._contents)):
            return "a captured variable was replaced"
        if list(map(_VERSION, self._sources)) != self._versions:
            return "a table was changed in place"
        if self._recorded is not None and list(map(_RECORDED, self._tensors)) != self._recorded:
            return "a weight was frozen or thawed"
        return None


def _has_version(holder: Any) -> bool:
    return dict_version is not None and type(holder) in (dict, OrderedDict)


def held_by_several(roots: Iterable[Any]) -> list[Tensor]:
    """Tensors that more than one of them holds."""
    held = [State([root]).tensors for root in roots]
    count = Counter(chain.from_iterable(held))
    return [t for number, t in ChainMap(*held).items() if count[number] > 1]


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each was written to in place; tensors of the inference mode do not count that."""
    return [0 if t.is_inference() else t._version for t in tensors]


_CONTENTS = attrgetter("cell_contents")
_VERSION = attrgetter("_version")
_RECORDED = attrgetter("requires_grad")


def needs_grad(state: State, tensors: Iterable[Tensor]) -> bool:
    """Whether autograd would record this call."""
    if not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in (*state.tensors.values(), *tensors))
