"""The epsilon of layer, group and RMS norms, which autograd's nodes do not all keep.

To recompute a norm, a recipe needs the epsilon that the module used.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from kilter.memory.engine import fused

EPS = "kilter.eps"
"""Under this key a node's metadata holds the epsilon of the norm that made it."""


def note_epsilon(module: Any, inputs: Any, output: Any) -> None:
    """Hook behind a layer norm without a weight: nothing leads from its node to its module."""
    node, eps = getattr(output, "grad_fn", None), vars(module).get("eps")
    if node is not None and eps is not None:
        node.metadata[EPS] = eps


def _instances(*new: type) -> list[Any]:
    """All objects of these classes and of those derived from them.

    They refer to their class. The list of all objects would hold tuples, too, that other threads
    are just filling, and to fill a tuple that somebody else holds as well is an error of the
    interpreter's (SystemError, in the other thread).
    """
    kinds: set[type] = set()
    while new:
        kinds.update(new)
        below: set[type] = set().union(*(one.__subclasses__() for one in new))
        new = tuple(below - kinds)
    return [found for found in gc.get_referrers(*kinds) if type(found) in kinds]


class ProgramNorms:
    """The program's layer, group and RMS norms, by their weight.

    The modules are looked for among all objects, once in each trial: a hook on every module call
    costs more than the rest of an event, and ends compiled regions. Only layer norms without
    weights need such a hook, and only where they are not recomputed from their statistics. It is a
    global one, since a hook of ours on a module of the program would be saved in the module's
    pickles, and TorchScript would try to compile it.
    """

    def __init__(self, device: torch.device, guard: Callable[..., bool]) -> None:
        """`guard` calls a function of ours behind the fence."""
        self._device = device
        self._guard = guard
        self._by_weight: dict[int, weakref.ref[Any]] = {}
        self._hook: Any = None
        """It runs behind modules, where there are layer norms without weights."""

    def find(self) -> None:
        """Look for norms that the program has made since the last call."""
        norm = torch.nn.LayerNorm
        for module in _instances(norm, torch.nn.GroupNorm, torch.nn.RMSNorm):
            weight = vars(module).get("_parameters", {}).get("weight")
            if weight is not None:
                self._by_weight[id(weight)] = weakref.ref(module)
            elif isinstance(module, norm):
                self._listen()

    def _listen(self) -> None:
        if self._hook is None and not fused.available(self._device):
            self._hook = register_module_forward_hook(self._note)

    def _note(self, module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, torch.nn.LayerNorm):
            self._guard(note_epsilon, module, inputs, output)

    def epsilon(self, node: Any, weight: Any) -> float | None:
        """The epsilon of the norm that has this weight, or else the one noted at the node."""
        reference = self._by_weight.get(id(weight))
        module = None if reference is None else reference()
        if module is not None and module.weight is weight:
            return None if module.eps is None else float(module.eps)
        eps: float | None = node.metadata.get(EPS)
        return eps

    def close(self) -> None:
        """Take the hook out, and forget the modules."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._by_weight.clear()
