"""Linear layers of few rows: fewer launches, and float32 on tensor cores.

A linear layer takes along its ReLU, or its residual and layer norm. At a few hundred rows the
library's float32 kernels leave most of the GPU idle. There each product becomes three TF32 products
with the errors added back (Ootomo and Yokota 2022), about as exact as float32, and long sums are
split over programs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from kilter.observe.torch_internals.branches import ADDMM_RELU
from kilter.parallel.checks import tf32_allowed
from kilter.parallel.compilation import with_body
from kilter.parallel.folding import is_view
from kilter.parallel.program import BranchProgram, Unit
from kilter.parallel.trace import value

aten = torch.ops.aten

ROWS_AT_MOST = 2048
"""With more rows the library's kernels fill the GPU."""
COLUMNS_AT_MOST = 8192
"""A row of a layer norm is one block of a kernel."""
LINEAR_PROGRAMS = 256
"""A launch of fewer programs leaves multiprocessors idle: sums are split until there are as many.
With the blocks below, the best of about 40 settings for each of four shapes on an H200."""
FEW = 64
"""With at most so many rows blocks have few rows, so that there are more blocks."""
WORTH = 4
"""Where no layer norm adds the parts of a sum up, fewer parts than this are not worth a launch."""


def blocks(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a block of the kernel."""
    if rows <= FEW:
        return 16, 32, 64
    wide = -(-rows // 64) * -(-columns // 64) >= LINEAR_PROGRAMS
    return (64, 64, 32) if wide else (64, 32, 64)


def splits_of(rows: int, columns: int, inner: int) -> int:
    """Over how many programs a sum is split."""
    high, wide, deep = blocks(rows, columns)
    count = 1
    while (
        count * -(-rows // high) * -(-columns // wide) < LINEAR_PROGRAMS
        and inner % (2 * count * deep) == 0
        and inner // (2 * count) >= 128
    ):
        count *= 2
    return count


# On a CPU the operations run by their definitions.


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
    from kilter.parallel.kernels import linear as kernels
    from kilter.parallel.kernels.common import launch

    high, wide, deep = blocks(rows, columns)
    launch(
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
    from kilter.parallel.kernels import linear as kernels
    from kilter.parallel.kernels.common import launch

    parts, residual = parts.contiguous(), residual.contiguous()
    out = torch.empty_like(residual)
    high = 4 if columns <= 1024 else 1
    launch(
        kernels.finish, (-(-rows // high),),
        parts, parts if bias is None else bias, residual, gain, shift, out, rows, columns, epsilon,
        ROWS=high, SPAN=1 << (columns - 1).bit_length(), PARTS=count, BIAS=bias is not None,
        num_warps=4,
    )  # fmt: skip
    return out


def _single(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    if not x.is_cuda:
        return _linear(x, weight, bias, relu, 0)
    from kilter.parallel.kernels import linear as kernels
    from kilter.parallel.kernels.common import launch

    columns, inner = weight.shape
    out = x.new_empty((1, columns))
    launch(
        kernels.single, (-(-columns // 4),), x, weight, bias, out, columns, inner,
        weight.stride(0), COLUMNS=4, INNER=1024, RELU=relu, num_warps=4,
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
            "single",
            _single,
            lambda x, weight, *_: x.new_empty((1, weight.shape[0])),
            f"{product}, bool relu",
        ),
    )


def join_layers(program: BranchProgram, *, triton: bool, split: bool = True) -> BranchProgram:
    """Every linear layer of few rows joined with what follows it. A unit of such layers alone then
    needs no compiler. Without Triton only a ReLU is joined, which the library can do. `split`:
    float32 products as three TF32 products."""

    def joined(unit: Unit) -> Unit:
        if unit.graph is None:
            return unit
        layers = _layers(unit.graph.graph, triton=triton, split=split and triton)
        return _rewritten(unit, layers, triton=triton) if layers else unit

    return program.with_units(joined)


@dataclass(frozen=True)
class _Layer:
    """A linear layer in a graph, and the operations that it takes along."""

    product: fx.Node
    bias: fx.Node
    x: fx.Node
    turned: fx.Node
    weight: fx.Node
    one_row: bool
    """It is computed by the kernel that reads every weight once. The library would use one row of
    its tiles."""
    split: bool
    """It is for float32, by the kernel of three TF32 products."""
    relu: fx.Node | None = None
    norm: fx.Node | None = None
    """It is the element of the layer norm's results that is its output."""
    residual: fx.Node | None = None


def _layers(graph: fx.Graph, *, triton: bool, split: bool) -> list[_Layer]:
    found = []
    for node in graph.nodes:
        layer = _layer(node, triton=triton, split=split)
        if layer is None:
            continue
        end = _only_user(node)
        if end is not None and end.target is aten.relu.default:
            layer = replace(layer, relu=end)
        elif triton and end is not None and end.target is aten.add.Tensor:
            layer = _with_norm(layer, end)
        ours = layer.one_row or layer.split
        if ours or layer.relu is not None or layer.norm is not None:
            found.append(layer)
    return found


def _layer(node: fx.Node, *, triton: bool, split: bool) -> _Layer | None:
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
    plain = tensors[1].stride(1) == tensors[2].stride(1) == tensors[0].stride(0) == 1
    known = tensors[0].dtype in (torch.float16, torch.bfloat16, torch.float32)
    one_row = triton and plain and known and tensors[1].shape[0] == 1
    exact = tensors[0].dtype == torch.float32 and not tf32_allowed()[0]
    split = split and plain and exact and not one_row and tensors[1].shape[1] % 64 == 0
    return _Layer(node, bias, x, turned, weight, one_row, split)


def _only_user(node: fx.Node) -> fx.Node | None:
    """The node that reads a result, behind views of it; None if several do."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if not is_view(node):
            return node
    return None


def _with_norm(layer: _Layer, added: fx.Node) -> _Layer:
    """The layer with the residual and the layer norm behind it, if there are any."""
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
    ours = operations() if triton else None
    for old in unit.graph.graph.nodes:
        if old in of_product:
            made[old] = _product(body, of_product[old], made, ours)
        elif old in of_relu:
            made[old] = made[old.args[0]]
        elif old in of_norm:
            assert ours is not None
            made[old] = _norm(body, of_norm[old], made, ours)
        else:
            made[old] = body.node_copy(old, made.__getitem__)
    alone = {aten.addmm.default, ADDMM_RELU}
    if ours is not None:
        alone |= {ours.linear, ours.finish, ours.single}
    ways = tuple((layer.one_row, layer.split) for layer in layers)
    return with_body(unit, body, alone, ("layers", ways, unit.key))


def _product(
    body: fx.Graph, layer: _Layer, made: dict[fx.Node, fx.Node], ours: _Operations | None
) -> fx.Node:
    """The layer with its ReLU, or the parts of its sum if a layer norm adds them up."""
    x, weight, bias = made[layer.x], made[layer.weight], made[layer.bias]
    relu = layer.relu is not None
    (rows, inner), columns = value(layer.x).shape, value(layer.product).shape[1]
    if layer.one_row and ours is not None:
        found = body.call_function(ours.single, (x, weight, bias, relu))
    elif layer.split and ours is not None:
        splits = splits_of(rows, columns, inner)
        added = layer.norm is None
        if added and splits < WORTH:
            splits = 0
        found = body.call_function(ours.linear, (x, weight, bias, relu and not splits, splits))
        found.meta["kind"] = (
            value(layer.x).dtype,
            blocks(rows, columns),
            splits,
            relu,
            rows % 16,
            columns % 16,
        )
        if not added:
            return found
        if splits:  # by the compiler, together with what follows
            found = body.call_function(aten.sum.dim_IntList, (found, [0]))
            found = body.call_function(aten.add.Tensor, (found, bias))
            found = body.call_function(aten.relu.default, (found,)) if relu else found
    elif relu:
        given = bias, x, made[layer.turned]
        found = body.call_function(ADDMM_RELU, given)
    else:
        found = body.node_copy(layer.product, made.__getitem__)
    found.meta["val"] = value(layer.product)
    return found


def _norm(
    body: fx.Graph, layer: _Layer, made: dict[fx.Node, fx.Node], ours: _Operations
) -> fx.Node:
    """The residual and the layer norm behind a layer."""
    assert layer.norm is not None
    assert layer.residual is not None
    rows, columns = value(layer.product).shape
    parts = body.call_function(aten.reshape.default, (made[layer.product], [-1, rows, columns]))
    flat = body.call_function(aten.reshape.default, (made[layer.residual], [rows, columns]))
    _, _, gain, shift, epsilon = layer.norm.args[0].args
    bias = made[layer.bias] if layer.split else None
    last = parts, bias, flat, made[gain], made[shift], epsilon
    done = body.call_function(ours.finish, last)
    shape = list(value(layer.residual).shape)
    found = body.call_function(aten.reshape.default, (done, shape))
    found.meta["val"] = value(layer.residual)
    return found
