"""Watches what a prepared form was made from: weights, tables, modes and attributes.

A captured graph reads addresses, and a trace contains the decisions that Python made. Both see a
change of values in place (an optimizer step, `load_state_dict`). Neither sees a weight that is
replaced or moved, a table that is rewritten, `train()`, or a changed number on a module: these
make the form stale.

`changed` runs in every call, so what is watched lies in flat lists that C loops walk, at a few tens
of nanoseconds for each item. The version of a dictionary, which the framework's compiler keeps for
its own guards, stands for the dictionary's items until it is written to.
"""

from __future__ import annotations

import sys
import types
from collections import ChainMap, Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import unwrap
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from kilter.observe.torch_internals.branches import (
    CALL_HOOKS,
    MODULE_DICTIONARIES,
    OTHER_HOOKS,
    dict_version,
    write_count,
)

_PLAIN = (bool, int, float, str, type(None))
_HELD = (Tensor, list, dict, tuple, types.FunctionType, nn.Module)
_NOT_THE_USERS = {"torch", "builtins", *sys.stdlib_module_names} - {"__main__"}


def _is_theirs(name: Any) -> bool:
    """Whether a module of this name belongs to the user (or to a library that may change)."""
    return isinstance(name, str) and name.split(".")[0] not in _NOT_THE_USERS


@dataclass
class _Items:
    """Each item was `holder[name]`. For each holder there is one getter of all its names."""

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
        """The first item that is another object now and not an equal number."""
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


class _Search:
    """Walks from roots (modules, functions, anything that they hold) to all that they depend on."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.modules: list[nn.Module] = []
        self.versioned, self.others = _Items(), _Items()
        """The first has items of dictionaries that have a version, the second all others."""
        self.cells: list[types.CellType] = []
        self.sized: list[Any] = []
        """Nothing may be added to these containers."""
        self._known: set[tuple[Any, ...]] = set()
        """These classes, and names of Python modules, were visited."""
        seen: set[int] = set()
        pending = list(roots)
        while pending:
            found = pending.pop()
            if id(found) not in seen:
                seen.add(id(found))
                pending += self._look_into(found)

    def _watch(self, holder: Any, items: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Watch items, and return them to be looked into."""
        if items:
            (self.versioned if _has_version(holder) else self.others).add(holder, items)
        return [item for _, item in items]

    def _look_into(self, found: Any) -> list[Any]:
        if isinstance(found, Tensor):
            if not nn.parameter.is_lazy(found):
                self.tensors[id(found)] = found
            return []
        if isinstance(found, (types.MethodType, types.FunctionType, partial)):
            return self._callable(found)
        if isinstance(found, (dict, list)):
            self.sized.append(found)
            return self._watch(
                found, list(found.items() if isinstance(found, dict) else enumerate(found))
            )
        if isinstance(found, tuple):
            return list(found)
        if isinstance(found, nn.Module):
            return self._module(found)
        if isinstance(found, (*_PLAIN, type, types.ModuleType)) or not hasattr(found, "__dict__"):
            return []
        if type(found).__module__.split(".")[0] in ("torch", "builtins"):
            return []
        return [*self._attributes(found), *self._class(type(found), "__call__")]

    def _callable(self, found: Any) -> list[Any]:
        if isinstance(found, types.MethodType):
            return [found.__self__, found.__func__]
        if isinstance(found, partial):
            return [found.func, *found.args, *found.keywords.values()]
        return self._function(found)

    def _module(self, found: nn.Module) -> list[Any]:
        self.modules.append(found)
        inside: list[Any] = []
        for name in MODULE_DICTIONARIES:
            group = getattr(found, name)
            self.sized.append(group)
            inside += self._watch(group, list(group.items()))
        return [*inside, *self._attributes(found), *self._class(type(found), "forward")]

    def _attributes(self, owner: Any) -> list[Any]:
        """An object's own attributes. A new attribute counts too, for example a `forward`."""
        watched = []
        attributes = vars(owner)
        self.sized.append(attributes)
        module = isinstance(owner, nn.Module)
        for name, item in list(attributes.items()):  # other threads may add some meanwhile
            if module and (name in MODULE_DICTIONARIES or name in OTHER_HOOKS):
                continue
            if module and name in CALL_HOOKS and not item:
                self.sized.append(item)
            elif isinstance(item, (*_HELD, *_PLAIN)):
                watched.append((name, item))
        return self._watch(attributes, watched)

    def _class(self, owner: type, entry: str) -> list[Any]:
        """The methods that a class runs from `entry` on, and the class attributes they use."""
        inside: list[Any] = []
        names, pending = {entry}, [entry] if self._is_new(owner) else []
        while pending:
            name = pending.pop()
            for home in owner.__mro__:
                if name not in vars(home) or not _is_theirs(home.__module__):
                    continue
                item = unwrap(_function_of(vars(home)[name]))
                if isinstance(item, types.FunctionType):
                    inside.append(item)
                    new = set(_names_in(item.__code__)) - names
                    names |= new
                    pending += new
                elif isinstance(item, (*_HELD, *_PLAIN)) and self._is_new(id(home), name):
                    inside += self._watch(vars(home), [(name, item)])
        return inside

    def _is_new(self, *key: Any) -> bool:
        new = key not in self._known
        self._known.add(key)
        return new

    def _function(self, found: types.FunctionType) -> list[Any]:
        """A function's defaults, closure and globals."""
        inside: list[Any] = [*(found.__defaults__ or ()), *(found.__kwdefaults__ or {}).values()]
        for cell in found.__closure__ or ():
            if (content := _content(cell)) is not _EMPTY:
                self.cells.append(cell)
                inside.append(content)
        names = set(_names_in(found.__code__))
        inside += self._globals(found.__globals__, names)
        for name in names:
            module = found.__globals__.get(name)
            if isinstance(module, types.ModuleType) and _is_theirs(module.__name__):
                inside += self._globals(vars(module), names)
        return inside

    def _globals(self, holder: dict[str, Any], names: Iterable[str]) -> list[Any]:
        """The names of a Python module that a function uses. They are compared one by one: such a
        dictionary is written to so often that its version would say nothing."""
        watched = [
            (name, holder[name])
            for name in names
            if name in holder and _may_change(holder[name]) and self._is_new(id(holder), name)
        ]
        if watched:
            self.others.add(holder, watched)
        return [item for _, item in watched]


def _may_change(item: Any) -> bool:
    """Whether something that a function reads of its Python module has to be watched."""
    if isinstance(item, types.FunctionType):
        return _is_theirs(item.__module__)
    return isinstance(item, (*_HELD, *_PLAIN))


_EMPTY = object()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY


def _function_of(item: Any) -> Any:
    """The function behind a method, a static or class method, or a property."""
    return getattr(item, "__func__", None) or getattr(item, "fget", None) or item


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Names of globals and attributes, also of the functions and comprehensions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


@dataclass
class _Readings:
    """What `read` gave for each of some objects."""

    read: Callable[[Any], Any]
    objects: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, objects: Iterable[Any]) -> None:
        for one in objects:
            self.objects.append(one)
            self.values.append(self.read(one))

    def differ(self) -> bool:
        return list(map(self.read, self.objects)) != self.values


class WatchedBranches:
    """What `roots` and all that they depend on looked like when this was made."""

    def __init__(self, roots: Iterable[Any]) -> None:
        found = _Search(roots)
        self.tensors, self.modules = found.tensors, found.modules
        self._versioned, self._others = found.versioned, found.others
        self._cells = found.cells
        self._contents = list(map(_CONTENT, self._cells))
        self._empty = [holder for holder in found.sized if not holder]
        sized = [holder for holder in found.sized if holder]
        self._sizes, self._list_sizes = _Readings(len), _Readings(len)
        self._sizes.add(sized)
        self._list_sizes.add(holder for holder in sized if not _has_version(holder))
        both = {id(h): h for h in (*sized, *self._versioned.holders) if _has_version(h)}
        self._dicts = list(both.values())
        self._versions = list(map(dict_version, self._dicts))
        tensors = list(self.tensors.values())
        self._addresses = _Readings(Tensor.data_ptr)
        self._addresses.add(tensors)
        # An alias keeps the memory alive: a replay may read it until the change is noticed.
        self._alive = [t.detach() for t in tensors]
        self._sources, self._recorded = _Readings(write_count), _Readings(_REQUIRES_GRAD)

    def watch_values(self, tensors: Iterable[Tensor]) -> None:
        """Also notice when the values of these change in place: tables were computed from them."""
        self._sources.add(t for t in tensors if not t.is_inference())

    def watch_gradients(self) -> None:
        """Also notice when a weight is frozen or thawed."""
        self._recorded.add(self.tensors.values())

    def changed(self) -> str | None:
        """Why the form is stale, or None."""
        if self._addresses.differ():
            return "weights were moved"
        versions = list(map(dict_version, self._dicts))
        written = versions != self._versions
        try:
            replaced = self._others.replaced() or (self._versioned.replaced() if written else None)
        except (KeyError, IndexError) as error:
            return f"{error.args[0]!r} was removed"
        if replaced is not None:
            return replaced
        sizes = self._sizes if written else self._list_sizes
        if any(self._empty) or sizes.differ():  # also hooks
            return "something was added or removed"
        self._versions = versions
        if not all(map(is_, map(_CONTENT, self._cells), self._contents)):
            return "a captured variable was replaced"
        if self._sources.differ():
            return "a table was changed in place"
        if self._recorded.differ():
            return "a weight was frozen or thawed"
        return None


def _has_version(holder: Any) -> bool:
    return dict_version is not None and type(holder) in (dict, OrderedDict)


def held_by_several(roots: Iterable[Any]) -> list[Tensor]:
    """Tensors that more than one of the roots holds."""
    held = [_Search([root]).tensors for root in roots]
    count = Counter(chain.from_iterable(held))
    return [t for number, t in ChainMap(*held).items() if count[number] > 1]


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often each was written to in place; tensors of the inference mode do not count that."""
    return [0 if t.is_inference() else write_count(t) for t in tensors]


def generator_states() -> list[bytes]:
    """What the default random generators, the CPU's and the GPUs', draw next."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states += torch.cuda.get_rng_state_all()
    return [bytes(state.tolist()) for state in states]


_CONTENT = attrgetter("cell_contents")
_REQUIRES_GRAD = attrgetter("requires_grad")


def needs_grad(state: WatchedBranches, tensors: Iterable[Tensor]) -> bool:
    """Whether autograd would record this call."""
    if not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in (*state.tensors.values(), *tensors))
