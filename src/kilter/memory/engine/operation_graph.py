"""What a recipe reads of autograd's graph, and what builders of recipes are made of.

A *builder* reads from a node what the operation read, and writes down the calls of operators that
make its result again; None if part of that cannot be reached. A call names what it reads by
`Slot`s, so the list holds no tensor, and serves in later passes as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from kilter.memory.engine.modified import Modified
from kilter.observe import torch_internals

Build: TypeAlias = Callable[["Graph", Any, torch.dtype, tuple[int, ...]], "Slot | None"]
Operator: TypeAlias = Callable[..., Any] | str
"""One of the framework's operators, the key of one in `torch_internals`, or a function."""


class Slot(NamedTuple):
    """A tensor that a call reads."""

    number: int
    """From 0 on: among those that are given to the recipe. Below: -1 is what the first call has
    made, -2 what the second one."""


class OperatorCall(NamedTuple):
    """One call of an operator. A `Slot` stands for each tensor, also in a list."""

    operator: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: int | None
    """This one of its results is meant; None if it has only one."""


class OperatorCalls:
    """The calls that make a tensor: each after those whose results it reads."""

    __slots__ = ("calls", "compiled", "frees", "result")

    def __init__(self, calls: Sequence[OperatorCall], result: Slot) -> None:
        self.calls = tuple(calls)
        self.result = result
        """This is the tensor."""
        self.frees = _frees(self.calls, result) if self.calls[1:] else [[]]
        """After each call, these slots are read by no later one."""
        self.compiled: Any = None
        """The same for the compiled library, which carries out the calls of a resolved recipe."""

    def __call__(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        there: dict[int, Any] = dict(enumerate(given))
        for place, call in enumerate(self.calls):
            there[-1 - place] = _made(call, there)
            for number in self.frees[place]:
                del there[number]
        found: torch.Tensor = there[self.result.number]
        return found


def _frees(calls: Sequence[OperatorCall], result: Slot) -> list[list[int]]:
    frees: list[list[int]] = []
    known = {result.number}
    for place in reversed(range(len(calls))):
        numbers = _slots(calls[place]) | {-1 - place}
        frees.append(sorted(numbers - known))
        known |= numbers
    return frees[::-1]


def _slots(call: OperatorCall) -> set[int]:
    """The numbers of the slots that it reads."""
    values = [*call.arguments, *call.keywords.values()]
    lists = [one for value in values if type(value) is list for one in value]
    return {one.number for one in (*values, *lists) if type(one) is Slot}


def _made(call: OperatorCall, there: dict[int, Any]) -> Any:
    arguments = [_filled(one, there) for one in call.arguments]
    keywords = call.keywords
    if keywords:
        keywords = {name: _filled(one, there) for name, one in keywords.items()}
    made = call.operator(*arguments, **keywords)
    return made if call.output is None else made[call.output]


def _filled(value: Any, there: dict[int, Any]) -> Any:
    """The tensors in the places of the slots."""
    if type(value) is Slot:
        return there[value.number]
    if type(value) is list:
        return [there[one.number] if type(one) is Slot else one for one in value]
    return value


class Graph(Protocol):
    """What a builder may read. The tensors are fetched when the recipe is carried out."""

    output: int
    """The node's output with this number is wanted, when the builder begins."""

    @property
    def made(self) -> torch.Tensor | None:
        """If this node made the tensor that is to be recomputed, this is that tensor itself."""

    def saved(self, node: Any, name: str, index: int | None = None) -> Slot | None:
        """A tensor that a node saved, or this one of a list."""

    def value(self, edge: tuple[Any, int]) -> Slot | None:
        """What a node produced."""

    def epsilon(self, node: Any, weight: Slot | None) -> float | None:
        """Of a layer norm with this weight."""

    def call(
        self, operator: Operator, *arguments: Any, output: int | None = None, **keywords: Any
    ) -> Slot:
        """What an operator makes of these, or this one of its outputs."""

    def cast(self, source: Slot, dtype: torch.dtype) -> Slot:
        """The same numbers in this type."""


class HeldSource:
    """A source that the engine has not saved: a parameter, or a small tensor that autograd saved.

    It must have the version that the operation read. `own` puts a copy in its place, which nobody
    else can write to.
    """

    __slots__ = ("__weakref__", "dtype", "take", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, version: int, take: Callable[[], torch.Tensor] | None = None
    ) -> None:
        """`take` gives the tensor where holding the tensor itself is not enough (its bytes may be
        on the host)."""
        self.tensor = tensor
        self.version = version
        self.take = take
        self.dtype: torch.dtype | None = None
        """It is read in this type. None: as it is."""

    def __call__(self) -> torch.Tensor:
        if self.changed:
            raise Modified(self.tensor, self.version)
        tensor = self.tensor if self.take is None else self.take()
        return tensor if self.dtype is None else tensor.to(self.dtype)

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


def of_saved(operator: Operator, *names: str, output: int | None = None) -> Build:
    """An operator of an input that its node saved, and of numbers that the node keeps under the
    names of the arguments."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
        read = graph.saved(node, "_raw_saved_self")
        return read and graph.call(operator, read, output=output, **_numbers(node, names))

    return build


def of_input(operator: Operator, *names: str, typed: bool = False) -> Build:
    """The same of its first input, which the node did not save. If `typed`, the operator is given
    the type of its result, which the node does not keep."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
        read = graph.value(node.next_functions[0])
        how = _numbers(node, names) | ({"dtype": dtype} if typed else {})
        return read and graph.call(operator, read, **how)

    return build


def _numbers(node: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: number(node, name) for name in names}


def operator_of(operator: Operator) -> Callable[..., Any]:
    """What is called: of several overloads the one without a name."""
    found: Any = getattr(torch_internals, operator) if isinstance(operator, str) else operator
    called: Callable[..., Any] = found.default if type(found) is _SEVERAL else found
    return called


_SEVERAL = type(torch.ops.aten.add)
"""The class of operators that have overloads."""
