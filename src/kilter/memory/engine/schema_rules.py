"""Rules of operators whose schema tells how to recompute what they made.

A node of autograd's graph is named after the operator that made it, and keeps that operator's
arguments under their names in the schema. So the operator can be called again if its node keeps all
arguments, or leads to them. PyTorch tags the operators that work element by element, so they need
no list. Others are listed here by name: those that make the same bits from the same arguments.
There is no rule where an argument is missing, or where two operators of a name fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from kilter.memory.engine.operation_graph import Graph, RecomputeRule, Slot, number

VIEW_OPERATORS = frozenset(
    {
        "alias", "diagonal", "permute", "select", "slice", "t", "transpose", "unfold", "unsqueeze",
        "view_as_complex", "view_as_real",
    }
)  # fmt: skip
OTHER_OPERATORS = frozenset(
    {
        "_fft_c2c", "_fft_r2c", "_prelu_kernel", "amax", "amin", "avg_pool2d",
        "avg_pool3d", "baddbmm", "bmm", "channel_shuffle", "flip", "glu", "hardswish", "im2col",
        "leaky_relu", "logsumexp", "mm", "pixel_shuffle", "pixel_unshuffle", "reflection_pad1d",
        "reflection_pad2d", "reflection_pad3d", "repeat", "replication_pad1d",
        "replication_pad2d", "replication_pad3d", "roll", "std", "tril", "triu",
        "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d",
        "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_trilinear3d", "var",
    }
)  # fmt: skip
_NODE = re.compile(r"([A-Z]\w*?)Backward\d+")
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
_TENSOR = "Tensor"
_NUMBERS = {"number", "int", "float", "bool", "str", "SymInt"}


class _Argument(NamedTuple):
    """One that the operator was given."""

    name: str
    by_name: bool
    is_tensor: bool
    is_saved: bool
    """The node may have saved the tensor."""
    edge: int | None
    """The tensor was made where this edge leads."""

    def read(self, graph: Graph, node: Any) -> Any:
        """A `Slot` for a tensor, None if that is out of reach; or numbers."""
        if not self.is_tensor:
            return number(node, self.name)
        saved = graph.saved(node, f"_raw_saved_{self.name}") if self.is_saved else None
        if saved is not None or self.edge is None:
            return saved
        return graph.value(node.next_functions[self.edge])


class _Call(NamedTuple):
    """The call that a node stands for."""

    operator: Any
    arguments: tuple[_Argument, ...]

    def build(
        self, graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]
    ) -> Slot | None:
        given: list[Any] = []
        named: dict[str, Any] = {}
        for argument in self.arguments:
            value = argument.read(graph, node)
            if value is None and argument.is_tensor:
                return None
            if argument.by_name:
                named[argument.name] = value
            else:
                given.append(value)
        return graph.call(self.operator, *given, **named)


def rule_of(node: Any) -> RecomputeRule | None:
    """The rule for a node; None if there is none."""
    found = _NODE.fullmatch(node.name())
    if found is None:
        return None
    kind: Any = type(node)
    return _rule(_WORD.sub("_", found[1]).lower(), kind, len(node.next_functions))


@cache
def _rule(name: str, kind: type, edges: int) -> RecomputeRule | None:
    """For nodes of this class, with so many edges, that are named after this operator."""
    overloads = [*_overloads(name), *_overloads(f"_{name}")]
    fitting = [call for one in overloads if (call := _call(one, kind, edges))]
    if len(fitting) != 1:
        return None
    return RecomputeRule(
        "view" if name in VIEW_OPERATORS else name.replace("_", " "), fitting[0].build
    )


def _overloads(name: str) -> Iterator[Any]:
    """The operators of this name that make the same bits again, and write to nothing."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in [] if packet is None else packet.overloads():
        operator = getattr(packet, overload)
        schema, tags = operator._schema, operator.tags
        random = torch.Tag.nondeterministic_seeded in tags
        known = name in VIEW_OPERATORS | OTHER_OPERATORS or (
            torch.Tag.pointwise in tags and not random
        )
        makes_one = [str(found.type) for found in schema.returns] == [_TENSOR]
        by_number = "name" not in overload.lower()  # else dimensions have names
        if known and makes_one and by_number and not schema.is_mutable:
            yield operator


def _call(operator: Any, kind: type, edges: int) -> _Call | None:
    """The call of this operator, if nodes of this class keep its arguments, or lead to them."""
    schema = operator._schema.arguments
    saved = {one.name for one in schema if hasattr(kind, f"_raw_saved_{one.name}")}
    kept = {one.name for one in schema if hasattr(kind, f"_saved_{one.name}")}
    tensors = [one.name for one in schema if str(one.type) == _TENSOR]
    numbers = {one.name for one in schema if _is_number(one)}
    # This overload was called only if tensors stand where it has tensors, and numbers elsewhere.
    if len(tensors) + len(numbers) < len(schema) or numbers - kept or numbers & saved:
        return None
    if kept.intersection(tensors) - saved:
        return None
    # A tensor that is never differentiated (a mask) has no edge.
    differentiated = tensors if edges == len(tensors) else [t for t in tensors if t not in saved]
    if edges != len(differentiated):
        return None
    leads = {name: edge for edge, name in enumerate(differentiated)}
    return _Call(
        operator,
        tuple(
            _Argument(
                one.name,
                one.kwarg_only,
                one.name in tensors,
                one.name in saved,
                leads.get(one.name),
            )
            for one in schema
        ),
    )


def _is_number(argument: Any) -> bool:
    """It is a number, text, or several numbers."""
    return re.sub(r"Optional|List|\W", "", str(argument.type)) in _NUMBERS
