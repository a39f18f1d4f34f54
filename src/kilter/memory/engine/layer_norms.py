"""The epsilon of norms, which recipes need and the nodes of a graph do not all keep."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

EPS = "kilter.eps"
"""Key in a node's metadata: the epsilon of the layer norm that made it."""


def note_epsilon(module: Any, inputs: Any, output: Any) -> None:
    """Behind a layer norm without a weight: nothing leads from its node back to the module."""
    node, eps = getattr(output, "grad_fn", None), vars(module).get("eps")
    if node is not None and eps is not None:
        node.metadata[EPS] = eps


def _instances(kind: type) -> list[Any]:
    """All objects of a class and of those derived from it.

    They refer to their class. The list of all objects would hold tuples, too, that other threads
    are just filling, and to fill a tuple that somebody else holds as well is an error of the
    interpreter's (SystemError, in the other thread).
    """
    kinds: set[type] = set()
    new = {kind}
    while new:
        kinds |= new
        below: set[type] = set().union(*(one.__subclasses__() for one in new))
        new = below - kinds
    return [found for found in gc.get_referrers(*kinds) if type(found) in kinds]


class LayerNorms:
    """The program's layer, group and RMS norms, by their weight.

    They are looked for among all objects, once in a trial: a hook on every module call costs more
    than the rest of an event, and ends compiled regions. Only those without weights need one. It is
    not on them: a hook of ours on a module of the program would get into its pickles, and
    TorchScript would try to compile it.
    """

    def __init__(self) -> None:
        self._by_weight: dict[int, weakref.ref[Any]] = {}
        self._hook: Any = None
        """Behind modules, where there are layer norms without weights."""

    def find(self) -> None:
        """Look for those that are new."""
        norm = torch.nn.LayerNorm
        for module in (
            *_instances(norm),
            *_instances(torch.nn.GroupNorm),
            *_instances(torch.nn.RMSNorm),
        ):
            weight = vars(module).get("_parameters", {}).get("weight")
            if weight is not None:
                self._by_weight[id(weight)] = weakref.ref(module)
            elif self._hook is None and isinstance(module, norm):
                self._hook = register_module_forward_hook(
                    lambda module, *rest: (
                        note_epsilon(module, *rest) if isinstance(module, norm) else None
                    )
                )

    def epsilon(self, node: Any, weight: Any) -> float | None:
        """Of the norm that has this weight, or has left a note at the node."""
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
