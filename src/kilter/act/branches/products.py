"""Linear layers of few rows between the branches: fewer launches, and float32 on tensor cores.

A linear layer takes its ReLU along, or its residual and layer norm. At a few hundred rows the
library's float32 kernels leave most of the card idle: there each product is three TF32 products
with the errors added back (Ootomo and Yokota 2022), about as exact as float32 itself, and long sums
are split over programs. Like everything else it is kept only if its difference to the float64
reference stays within twice that of the serial loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from kilter.act.branches.folding import is_view
from kilter.act.branches.program import Program, Unit
from kilter.act.branches.tracing import value

aten = torch.ops.aten

ROWS_AT_MOST = 2048
"""With more rows the library fills the card by itself."""
COLUMNS_AT_MOST = 8192
"""A row of a layer norm is one block of a kernel."""
PROGRAMS = 256
"""A launch of fewer programs leaves multiprocessors idle; sums are split until there are as many.
With the blocks below, the best of about 40 points for each of four shapes on an H200."""


def blocks(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a block of the kernel."""
    wide = -(-rows // 64) * -(-columns // 64) >= PROGRAMS
    return (64, 64, 32) if wide else (64, 32, 64)


def splits_of(rows: int, columns: int, inner: int) -> int:
    """Over how many programs a sum is split."""
    high, wide, deep = blocks(rows, columns)
    count = 1
    while (
        count * -(-rows // high) * -(-columns // wide) < PROGRAMS
        and inner % (2 * count * deep) == 0
        and inner // (2 * count) >= 128
    ):
        count *= 2
    return count


# On a host, where there are no kernels, the operations are their definitions.


def _linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, splits: int) -> Tensor:
    out = _linear_shape(x, weight, bias, relu, splits)
    rows, inner = x.shape
    columns = weight.shape[0]
    if not x.is_cuda:
        if splits:
            shares = zip(x.chunk(splits, 1), weight.chunk(splits, 1), strict=True)
            return torch.stack([a @ b.T for a, b in shares])
        found = torch.addmm(bias, x, weight.T)
        return found.relu() if relu else found
    from kilter.act.branches import kernels

    high, wide, deep = blocks(rows, columns)
    kernels.launch(
        kernels.linear, (-(-rows // high), -(-columns // wide), max(1, splits)),
        x, weight, bias, out, rows, columns, inner // max(1, splits), x.stride(0),
        weight.stride(0), ROWS=high, COLUMNS=wide, INNER=deep, SPLITS=splits, RELU=relu,
        PRECISION="tf32x3", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor, relu: bool, splits: int) -> Tensor:
    rows, columns = x.shape[0], weight.shape[0]
    return x.new_empty((splits, rows, columns) if splits else (rows, columns))


def _finish(
    parts: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    gain: Tensor,
    shift: Tensor,
    epsilon: float,
) -> Tensor:
    count, rows, columns = parts.shape
    if not parts.is_cuda:
        total = parts.float().sum(0) + residual.float()
        total = total if bias is None else total + bias.float()
        norm = torch.nn.functional.layer_norm
        return norm(total, (columns,), gain.float(), shift.float(), epsilon).to(residual.dtype)
    from kilter.act.branches import kernels

    parts, residual = parts.contiguous(), residual.contiguous()
    out = torch.empty_like(residual)
    high = 4 if columns <= 1024 else 1
    kernels.launch(
        kernels.finish, (-(-rows // high),),
        parts, parts if bias is None else bias, residual, gain, shift, out, rows, columns, epsilon,
        ROWS=high, SPAN=1 << (columns - 1).bit_length(), PARTS=count, BIAS=bias is not None,
        num_warps=4,
    )  # fmt: skip
    return out


def _single(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if not x.is_cuda:
        return torch.addmm(bias, x, weight.T)
    from kilter.act.branches import kernels

    columns, inner = weight.shape
    out = x.new_empty((1, columns))
    kernels.launch(
        kernels.single, (-(-columns // 4),), x, weight, bias, out, columns, inner,
        weight.stride(0), COLUMNS=4, INNER=1024, num_warps=4,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class _Operations:
    linear: Any
    finish: Any
    single: Any


@cache
def operations() -> _Operations:
    """The kernels as operations that the compiler can call; registered at first use."""

    def register(name: str, run: Callable[..., Tensor], shape: Any, arguments: str) -> Any:
        schema = f"({arguments}) -> Tensor"
        made = torch.library.custom_op(f"kilter::{name}", run, mutates_args=(), schema=schema)
        made.register_fake(shape)
        return getattr(torch.ops.kilter, name).default

    product = "Tensor x, Tensor weight, Tensor bias"
    return _Operations(
        register("linear", _linear, _linear_shape, f"{product}, bool relu, int splits"),
        register(
            "finish",
            _finish,
            lambda parts, bias, residual, *_: torch.empty_like(
                residual, memory_format=torch.contiguous_format
            ),
            "Tensor parts, Tensor? bias, Tensor residual, Tensor gain, Tensor shift, float epsilon",
        ),
        register(
            "single", _single, lambda x, weight, bias: x.new_empty((1, weight.shape[0])), product
        ),
    )


def single_rows(program: Program) -> Program:
    """Linear layers of one row, by the kernel: the library has tiles for them, of which one row is
    used."""

    def replaced(unit: Unit) -> Unit:
        nodes = [] if unit.graph is None else list(unit.graph.graph.nodes)
        layers = {n: layer for n in nodes if (layer := _layer(n, triton=True)) is not None}
        fitting = {n for n, layer in layers.items() if layer.one_row}
        if not fitting:
            return unit
        body = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for old in nodes:
            if old in fitting:
                layer = layers[old]
                given = made[layer.x], made[layer.weight], made[layer.bias]
                made[old] = body.call_function(operations().single, given)
                made[old].meta = dict(old.meta)
            else:
                made[old] = body.node_copy(old, made.__getitem__)
        body.eliminate_dead_code()
        graph = fx.GraphModule(torch.nn.Module(), body)
        return replace(unit, run=graph, graph=graph, key=("single", unit.key))

    return replace(program, steps=tuple(tuple(map(replaced, step)) for step in program.steps))


def join_layers(program: Program, *, triton: bool) -> Program:
    """Every linear layer of few rows in the serial steps, with what follows it. A unit of nothing
    else needs no compiler any more. Without Triton only what the library itself can join."""

    def joined(unit: Unit) -> Unit:
        layers = [] if unit.graph is None else _layers(unit.graph.graph, triton=triton)
        return _rewritten(unit, layers, triton=triton) if layers else unit

    steps = tuple(
        tuple(joined(unit) if len(step) == 1 else unit for unit in step) for step in program.steps
    )
    return replace(program, steps=steps)


@dataclass(frozen=True)
class _Layer:
    """A linear layer in a graph, and the end of what it takes along."""

    product: fx.Node
    bias: fx.Node
    x: fx.Node
    turned: fx.Node
    weight: fx.Node
    split: bool
    """Float32: by the kernel of ours."""
    one_row: bool
    relu: fx.Node | None = None
    norm: fx.Node | None = None
    """The element of the layer norm's results that is its output."""
    residual: fx.Node | None = None


def _layers(graph: fx.Graph, *, triton: bool) -> list[_Layer]:
    found = []
    for node in graph.nodes:
        layer = _layer(node, triton=triton)
        if layer is None:
            continue
        end = _only_user(node)
        if end is not None and end.target is aten.relu.default:
            layer = replace(layer, relu=end)
        elif triton and end is not None and end.target is aten.add.Tensor:
            layer = _with_norm(layer, end)
        if layer.split or layer.relu is not None or layer.norm is not None:
            found.append(layer)
    return found


def _layer(node: fx.Node, *, triton: bool) -> _Layer | None:
    if node.target is not aten.addmm.default or node.kwargs:
        return None
    bias, x, turned = node.args
    if turned.target is not aten.t.default:
        return None
    weight = turned.args[0]
    tensors = [value(n) for n in (bias, x, weight)]
    if any(not isinstance(t, Tensor) or t.dtype != tensors[0].dtype for t in tensors):
        return None
    if tensors[0].dim() != 1 or tensors[1].shape[0] > ROWS_AT_MOST:
        return None
    exact = tensors[0].dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    rows_lie_plain = tensors[1].stride(1) == tensors[2].stride(1) == tensors[0].stride(0) == 1
    split = triton and exact and rows_lie_plain and tensors[1].shape[1] % 64 == 0
    known = tensors[0].dtype in (torch.float16, torch.bfloat16, torch.float32)
    one_row = triton and known and rows_lie_plain and tensors[1].shape[0] == 1
    return _Layer(node, bias, x, turned, weight, split, one_row)


def _only_user(node: fx.Node) -> fx.Node | None:
    """Who reads a result, behind views of it; None if several do."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if not is_view(node):
            return node
    return None


def _with_norm(layer: _Layer, added: fx.Node) -> _Layer:
    """The layer with the residual and the layer norm behind it, if they are there."""
    norm = next(iter(added.users)) if len(added.users) == 1 else None
    if norm is None or norm.target is not aten.native_layer_norm.default or added.kwargs:
        return layer
    columns = value(layer.product).shape[1]
    _, shape, gain, shift, _ = norm.args
    results = list(norm.users)
    first = len(results) == 1 and results[0].target is operator.getitem and results[0].args[1] == 0
    operands = [a for a in added.args if isinstance(a, fx.Node)]
    residual = [a for a in operands if not _behind(a, layer.product)]
    fits = list(shape) == [columns] and columns <= COLUMNS_AT_MOST
    affine = gain is not None and shift is not None
    if not first or not fits or not affine or len(operands) != 2 or len(residual) != 1:
        return layer
    if not value(gain).is_contiguous() or not value(shift).is_contiguous():
        return layer
    whole = value(residual[0]).shape == value(added).shape
    if not whole or value(residual[0]).dtype != value(layer.product).dtype:
        return layer
    return replace(layer, norm=results[0], residual=residual[0])


def _behind(node: fx.Node, product: fx.Node) -> bool:
    while node is not product:
        if not is_view(node) or len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return True


def _rewritten(unit: Unit, layers: list[_Layer], *, triton: bool) -> Unit:
    assert unit.graph is not None
    of_product = {layer.product: layer for layer in layers}
    of_relu = {layer.relu for layer in layers if layer.relu is not None}
    of_norm = {layer.norm: layer for layer in layers if layer.norm is not None}
    body = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    linear, finish = (operations().linear, operations().finish) if triton else (None, None)
    for old in unit.graph.graph.nodes:
        if old in of_product:
            layer = of_product[old]
            operands = made[layer.x], made[layer.weight], made[layer.bias]
            relu = layer.relu is not None
            if layer.split:
                (rows, inner), columns = value(layer.x).shape, value(old).shape[1]
                splits = 0 if layer.norm is None else splits_of(rows, columns, inner)
                made[old] = body.call_function(linear, (*operands, relu, splits))
            elif relu:
                given = made[layer.bias], made[layer.x], made[layer.turned]
                made[old] = body.call_function(aten._addmm_activation.default, given)
            else:
                made[old] = body.node_copy(old, made.__getitem__)
        elif old in of_relu:
            made[old] = made[old.args[0]]
        elif old in of_norm:
            layer = of_norm[old]
            assert layer.residual is not None
            rows, columns = value(layer.product).shape
            shape = [-1, rows, columns]
            parts = body.call_function(aten.reshape.default, (made[layer.product], shape))
            flat = body.call_function(aten.reshape.default, (made[layer.residual], [rows, columns]))
            _, _, gain, shift, epsilon = old.args[0].args
            bias = made[layer.bias] if layer.split else None
            last = parts, bias, flat, made[gain], made[shift], epsilon
            done = body.call_function(finish, last)
            shape = list(value(layer.residual).shape)
            made[old] = body.call_function(aten.reshape.default, (done, shape))
        else:
            made[old] = body.node_copy(old, made.__getitem__)
    body.eliminate_dead_code()
    graph = fx.GraphModule(torch.nn.Module(), body)
    rest = [n for n in body.nodes if n.op == "call_function" and not is_view(n)]
    ours = {linear, finish, aten.addmm.default, aten._addmm_activation.default}
    whole = all(node.target in ours for node in rest)
    kept = None if whole else graph
    return replace(unit, run=graph, graph=kept, key=("layers", unit.key))
