"""How a saved tensor can be made again: a recipe read off the autograd graph that made it.

The node that produced a tensor names the operation, and its own saved inputs are the very tensors
that the operation read, so a recipe is right by construction: there is no matching of shapes or
positions. It is taken anew in every pass, and holds what it reads. The operations that are known
are in `operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kilter.act.swapper.backend import owned
from kilter.act.swapper.operations import OPERATIONS, Source, Stale

DEPTH = 5
"""Longest chain of operations that are not saved in between."""
EPS = "kilter.eps"
"""Key in a node's metadata: the epsilon of a norm without weights, which nothing else tells."""


class Memory(Protocol):
    """Who knows what operations saved and produced."""

    def kept_by(self, node: Any, name: str) -> tuple[Source, int | torch.Tensor] | None:
        """How to have later what a node saved under an attribute's name, and the number of its
        datum, or itself if it is none; None if the node saved nothing there. May raise `Foreign`.
        """

    def produced_by(self, node: Any) -> tuple[Source, int] | None:
        """A node's output, if some operation saved it: how to have it, and its number."""

    def epsilon(self, node: Any, weight: Source | None) -> float | None:
        """Of a layer norm with this weight: its node does not keep it."""


class Foreign(Exception):
    """Part of the graph is kept by other hooks than ours, or reads memory that is not the
    framework's, so no recipe can be read off it."""


class Recipe:
    """Makes a tensor again. Taken in every pass, for hundreds of tensors, so it is kept small."""

    __slots__ = ("_make", "dtype", "leaves", "node", "others", "size", "sources", "stride")

    def __init__(
        self, tensor: torch.Tensor, node: str, make: Callable[[], torch.Tensor], reader: Reader
    ) -> None:
        self._make = make
        self.node = node
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.leaves = tuple(reader.leaves)
        """Identities of the parameters that it reads."""
        self.sources = tuple(reader.sources)
        """Numbers of the saved data that it reads."""
        self.others = tuple(reader.others)
        """What it reads that is not ours to move: parameters, and small tensors."""

    @property
    def kind(self) -> str:
        """What the operation is called, for people."""
        return OPERATIONS[self.node].kind

    def make(self) -> torch.Tensor:
        """The tensor, in its own layout. May raise `Stale`."""
        made = self._make()
        if made.requires_grad:  # nothing was to be done to a parameter
            made = made.detach()
        if made.dtype is not self.dtype or made.size() != self.size:
            raise Stale(f"made {made.dtype} {tuple(made.size())}, expected {tuple(self.size)}")
        if (
            made.stride() == self.stride
            and made.storage_offset() == 0
            and made.untyped_storage().nbytes() == made.nbytes
        ):
            return made
        out = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=made.device)
        return out.copy_(made)


class Reader:
    """Reads recipes off the graph, one after the other. With `noting` each names what it reads."""

    def __init__(self, memory: Memory, *, noting: bool = False) -> None:
        self._memory = memory
        self.epsilon = memory.epsilon
        self._noting = noting
        self._depth = 0
        self.leaves: list[int] = []
        self.sources: list[int] = []
        self.others: list[torch.Tensor] = []

    def read(self, tensor: torch.Tensor) -> Recipe | None:
        """The recipe of the whole storage behind `tensor`, or None if there is none."""
        base = tensor._base if tensor._is_view() else tensor
        if base is None or base.storage_offset() != 0:
            return None
        node, storage = base.grad_fn, base.untyped_storage()
        if node is None or storage.nbytes() != base.nbytes:
            return None
        if base is not tensor and storage._cdata != tensor.untyped_storage()._cdata:
            return None
        name: str = node.name()
        operation = OPERATIONS.get(name)
        if operation is None:
            return None
        self._depth = 1
        self.leaves.clear()
        if self._noting:
            self.sources.clear()
            self.others.clear()
        try:
            make = operation.build(self, node, base.dtype, base.size())
        except Foreign:
            return None
        return None if make is None else Recipe(base, name, make, self)

    # For builders

    def saved(self, node: Any, name: str) -> Source | None:
        """A tensor that a node saved."""
        found = self._memory.kept_by(node, name)
        if found is None:
            return None
        source, what = found
        if not isinstance(what, int):
            _refuse_foreign(what)
            parameter = _parameter_of(what)
            if parameter is not None:
                self.leaves.append(id(parameter))
        if self._noting:
            self._note(what)
        return source

    def value(self, edge: tuple[Any, int]) -> Source | None:
        """What a node produced: a parameter, something saved, or made again from its inputs."""
        node, output = edge
        if node is None or output != 0 or self._depth > DEPTH:
            return None
        if node.name() == "torch::autograd::AccumulateGrad":
            parameter = node.variable
            _refuse_foreign(parameter)
            self.leaves.append(id(parameter))
            if self._noting:
                self.others.append(parameter)
            return parameter, parameter._version
        found = self._memory.produced_by(node)
        if found is None:
            return self._made(node)
        if self._noting:
            self._note(found[1])
        return found[0]

    def _made(self, node: Any) -> Source | None:
        operation = OPERATIONS.get(node.name())
        if operation is None:
            return None
        output = node._input_metadata[0]  # what comes into it in backward is what it gave
        self._depth += 1
        made = operation.build(self, node, output.dtype, tuple(output.shape))
        self._depth -= 1
        return made

    def _note(self, source: int | torch.Tensor) -> None:
        if isinstance(source, int):
            self.sources.append(source)
        else:
            self.others.append(source)


def _refuse_foreign(tensor: torch.Tensor) -> None:
    """`Foreign` for memory that others may have written to by the time a recipe reads it. (A
    parameter that is away has a class of its own, and its memory is the framework's.)"""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if plain and not owned(tensor.untyped_storage()):
        raise Foreign("reads memory that is not the framework's")


def _parameter_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What an optimizer may update, perhaps without moving a version. Autograd saves a view of it;
    a parameter that is away has a class of its own, and is not to be asked for anything."""
    root = tensor
    if type(root) is torch.Tensor and root._base is not None:
        root = root._base
    if type(root) is not torch.Tensor or (root.is_leaf and root.requires_grad):
        return root
    return None
