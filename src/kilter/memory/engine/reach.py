"""Properties that see where a program's Python code gets at tensors that autograd saved.

`ctx.saved_tensors` of a custom function: under hooks on saved tensors, whoever sets them, the
framework makes new tensor objects, without the attributes of those that were saved. `Tensor.data`:
no version counter tells of what is written through it. Both are properties of classes of the
framework's; ours replace them while the engine runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from kilter.memory.engine.replacements import Replacements
from kilter.memory.engine.store import LEAF, Itself, Store, View


class Reach(AbstractContextManager["Reach"]):
    """Errors of what these properties do for the engine end at the store's `guard`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._guard = store.guard
        self._replaced = Replacements()

    def __enter__(self) -> Reach:
        self._saved: Any = BackwardCFunction.saved_tensors
        self._data: Any = torch.Tensor.data
        self._replaced.put(BackwardCFunction, "saved_tensors", property(self._read_saved))
        self._replaced.put(torch.Tensor, "data", property(self._read_data, self._write_data))
        return self

    def __exit__(self, *exception: object) -> None:
        self._replaced.undo()

    # Tensor.data

    def _read_data(self, tensor: torch.Tensor) -> Any:
        self._guard(self._touched, tensor)
        return self._data.__get__(tensor)

    def _write_data(self, tensor: torch.Tensor, value: Any) -> None:
        self._guard(self._touched, tensor)
        self._data.__set__(tensor, value)
        self._guard(self._touched, tensor)

    def _touched(self, tensor: torch.Tensor) -> None:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            self._store.touched(tensor)

    # ctx.saved_tensors

    def _read_saved(self, ctx: Any) -> Any:
        found = self._saved.__get__(ctx)
        theirs: list[Any] = []
        self._guard(self._originals, ctx, found, theirs)
        return tuple(theirs) if len(theirs) == len(found) else found

    def _originals(self, ctx: Any, found: tuple[Any, ...], theirs: list[Any]) -> None:
        raws = ctx._raw_saved_tensors
        if len(raws) != len(found):
            return  # a function's own `jvp` asks, before anything is saved for backward
        for tensor, raw in zip(found, raws, strict=True):
            packed = getattr(raw, "data", None)  # PyTorch 2.8 does not show it
            theirs.append(tensor if tensor is None else self._original(ctx, tensor, packed))

    def _original(self, ctx: Any, tensor: torch.Tensor, packed: Any) -> torch.Tensor:
        """What the plain run hands back: the object itself, unless it is an output of `ctx`."""
        if type(packed) is View:
            itself: Any = packed.itself
            self._store.recompute_dependents(packed.saved)  # the program may write to it
        elif type(packed) is tuple and len(packed) >= 3 and packed[2] is LEAF:
            held: torch.Tensor = packed[0]
            return held
        elif type(packed) is tuple and len(packed) >= 3 and type(packed[2]) is Itself:
            itself = packed[2]
        else:
            return tensor
        original: torch.Tensor | None = itself()
        if original is not None:
            return tensor if original.grad_fn is ctx else original
        if itself.attributes is not None:
            tensor.__dict__ = itself.attributes
        return tensor
