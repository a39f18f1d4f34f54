"""What a recipe reads of autograd's graph, and what builders of recipes are made of.

A *builder* reads from a node what the operation read, and returns a function that recomputes its
result; None if part of that cannot be reached. The function is given the tensors that it reads, so
that it holds none of them, and serves in later passes as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from kilter.memory.engine.modified import Modified

GivenTensors: TypeAlias = Sequence[torch.Tensor]
"""The tensors that a recipe reads, in the order in which its builder has asked for them."""
Make: TypeAlias = Callable[[GivenTensors], torch.Tensor]
Build: TypeAlias = Callable[["Graph", Any, torch.dtype, tuple[int, ...]], Make | None]
Source: TypeAlias = Callable[[GivenTensors], Any]
"""This finds a tensor that an operation read among those given, or makes it of them, or gives None
for an affine parameter that a norm does not have."""


class Graph(Protocol):
    """What a builder may read. The tensors are fetched when the recipe is carried out."""

    output: int
    """The node's output with this number is wanted, when the builder begins."""

    @property
    def made(self) -> torch.Tensor | None:
        """If this node made the tensor that is to be recomputed, this is that tensor itself."""

    def saved(self, node: Any, name: str, index: int | None = None) -> Source | None:
        """A tensor that a node saved, or this one of a list."""

    def value(self, edge: tuple[Any, int]) -> Source | None:
        """What a node produced."""

    def epsilon(self, node: Any, weight: Source | None) -> float | None:
        """Of a layer norm with this weight."""


class HeldSource:
    """A source that the engine has not saved: a parameter, or a small tensor that autograd saved.

    It must have the version that the operation read. `own` puts a copy in its place, which nobody
    else can write to.
    """

    __slots__ = ("__weakref__", "take", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, version: int, take: Callable[[], torch.Tensor] | None = None
    ) -> None:
        """`take` gives the tensor where holding the tensor itself is not enough (its bytes may be
        on the host)."""
        self.tensor = tensor
        self.version = version
        self.take = take

    def __call__(self) -> torch.Tensor:
        if self.changed:
            raise Modified(self.tensor, self.version)
        return self.tensor if self.take is None else self.take()

    @property
    def changed(self) -> bool:
        return bool(self.tensor._version != self.version)

    def own(self, copy: torch.Tensor | None) -> None:
        """Read this copy, or one that is made now, from here on."""
        self.tensor = self().detach().clone() if copy is None else copy
        self.version, self.take = self.tensor._version, None


class RecomputeRule(NamedTuple):
    """One kind of node."""

    kind: str
    """What the operation is called, for people."""
    build: Build
    """It recomputes an output of this type and size."""
    many: bool = False
    """It has several outputs, each with a number."""


def number(node: Any, name: str) -> Any:
    """An attribute that a node keeps: a number, or several. Negative dimensions come as unsigned
    numbers of 64 bits."""
    found = getattr(node, f"_saved_{name}")
    if isinstance(found, tuple | list):
        return [_signed(one) for one in found]
    return _signed(found)


def _signed(found: Any) -> Any:
    return found - 2**64 if type(found) is int and found >= 2**63 else found


def of_saved(apply: Callable[..., torch.Tensor], *names: str, source: str = "self") -> Build:
    """An operation of an input that it saved and of numbers that the node keeps."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
        read = graph.saved(node, f"_raw_saved_{source}")
        return None if read is None else _applied(apply, read, node, names)

    return build


def of_input(apply: Callable[..., torch.Tensor], *names: str) -> Build:
    """The same of its first input, which it did not save."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
        read = graph.value(node.next_functions[0])
        return None if read is None else _applied(apply, read, node, names)

    return build


def _applied(
    apply: Callable[..., torch.Tensor], read: Source, node: Any, names: tuple[str, ...]
) -> Make:
    numbers = [number(node, name) for name in names]
    return lambda given: apply(read(given), *numbers)
