"""Operations that only move elements: views, parts, and what puts tensors together.

They compute nothing, so they cost little to do again. See `operation_graph` for what a builder is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kilter.memory.engine.operation_graph import (
    Build,
    Graph,
    Operator,
    RecomputeRule,
    Slot,
    number,
)

_ATEN = torch.ops.aten


def _shaped(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    """The same elements in the same order under another shape."""
    if math.prod(node._saved_self_sym_sizes) != math.prod(size):
        return None
    source = graph.value(node.next_functions[0])
    return source and graph.call(_ATEN.reshape, source, [*size])


def _expanded(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    source = graph.value(node.next_functions[0])
    return source and graph.call(_ATEN.expand, source, [*size])


def _part(begin_of: Callable[[Any, int, int], tuple[int, int]]) -> Build:
    """One of the parts of a tensor along a dimension; `begin_of` says where one of this number
    begins, and how long it is, of so many elements."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
        which, dim = graph.output, number(node, "dim")
        part = begin_of(node, which, node._saved_self_sym_sizes[dim])
        source = graph.value(node.next_functions[0])
        return source and graph.call(_ATEN.narrow, source, dim, *part)

    return build


def _equal_part(node: Any, which: int, count: int) -> tuple[int, int]:
    each = int(node._saved_split_size)
    return which * each, min(each, count - which * each)


def _unequal_part(node: Any, which: int, count: int) -> tuple[int, int]:
    sizes = node._saved_split_sizes
    return sum(sizes[:which]), sizes[which]


def _unbound(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    which, dim = graph.output, number(node, "dim")
    source = graph.value(node.next_functions[0])
    return source and graph.call(_ATEN.select.int, source, dim, which)


def _stacked(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    """Several tensors side by side in a new dimension; one that is not in the graph is out of
    reach."""
    dim = number(node, "dim")
    sources: list[Slot] = []
    for edge in node.next_functions:
        source = graph.value(edge)
        if source is None:
            return None
        sources.append(source)
    return graph.call(_ATEN.stack, sources, dim)


def _joined(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    """The same along a dimension that they have. What is not in the graph may be empty (a cache of
    keys that was not written to before), if the others fill the result."""
    dim = number(node, "dim")
    sources: list[Slot] = []
    length = 0
    for before, output in node.next_functions:
        if before is None:
            continue
        source = graph.value((before, output))
        if source is None:
            return None
        sources.append(source)
        length += before._input_metadata[output].shape[dim]
    return graph.call(_ATEN.cat, sources, dim) if length == size[dim] else None


def _taken(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    """`x[indices]`; None among them stands for all elements of that dimension."""
    source = graph.value(node.next_functions[0])
    if source is None:
        return None
    indices = [
        graph.saved(node, "_raw_saved_indices", i) for i in range(len(node._raw_saved_indices))
    ]
    return graph.call(_ATEN.index.Tensor, source, indices)


def _gathered(operator: Operator) -> Build:
    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
        index, dim = graph.saved(node, "_raw_saved_index"), number(node, "dim")
        source = graph.value(node.next_functions[0])
        if source is None or index is None:
            return None
        return graph.call(operator, source, dim, index)

    return build


def _padded(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    """The node does not keep the value of the padding: one element is taken from the padding."""
    made, pads = graph.made, number(node, "pad")
    dims = len(size)
    inner = [slice(None)] * dims
    corner = [0] * dims
    padding = False
    for place in range(len(pads) // 2):
        dim = dims - 1 - place
        before, after = pads[2 * place : 2 * place + 2]
        if before < 0 or after < 0:
            return None
        inner[dim] = slice(before, size[dim] - after)
        if before or after:
            corner[dim] = 0 if before else size[dim] - 1
            padding = True
    if made is None or not padding or not all(size):
        return None
    source = graph.value(node.next_functions[0])
    value = made.detach()[tuple(corner)].clone()

    def pad(inside: torch.Tensor) -> torch.Tensor:
        out = value.expand(size).clone(memory_format=torch.contiguous_format)
        out[tuple(inner)] = inside
        return out

    return source and graph.call(pad, source)


_SHAPED = RecomputeRule("view", _shaped)
MOVES = {
    "CatBackward0": RecomputeRule("concatenation", _joined),
    "ConstantPadNdBackward0": RecomputeRule("padding", _padded),
    "ExpandBackward0": RecomputeRule("view", _expanded),
    "GatherBackward0": RecomputeRule("gather", _gathered(_ATEN.gather)),
    "IndexBackward0": RecomputeRule("index", _taken),
    "IndexSelectBackward0": RecomputeRule("index", _gathered(_ATEN.index_select)),
    "ReshapeAliasBackward0": _SHAPED,
    "SplitBackward0": RecomputeRule("view", _part(_equal_part), many=True),
    "SplitWithSizesBackward0": RecomputeRule("view", _part(_unequal_part), many=True),
    "SqueezeBackward0": _SHAPED,
    "SqueezeBackward1": _SHAPED,
    "SqueezeBackward2": _SHAPED,
    "StackBackward0": RecomputeRule("concatenation", _stacked),
    "UnbindBackward0": RecomputeRule("view", _unbound, many=True),
    "UnsafeViewBackward0": _SHAPED,
    "ViewBackward0": _SHAPED,
}
