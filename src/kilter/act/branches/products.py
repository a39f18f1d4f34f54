"""Float32 linear layers of few rows on tensor cores: three TF32 products, errors added back.

At a few hundred rows the library's float32 kernels leave most of the card idle. The split product
(Ootomo and Yokota 2022) is about as exact as float32 itself; like everything else it is kept only
if its difference to the float64 reference stays within twice that of the serial loop.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from kilter.act.branches.program import Program, Unit
from kilter.act.branches.tracing import value

aten = torch.ops.aten

ROWS_AT_MOST = 2048
"""With more rows the library fills the card by itself."""


@cache
def _operation() -> Any:
    """The kernel as an operation that the compiler can call; registered at first use."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        from kilter.act.branches import kernels

        rows, inner = x.shape
        columns = weight.shape[0]
        out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        large = -(-rows // 64) * -(-columns // 64) >= 100
        block = 64 if large else 32
        kernels.linear[(-(-rows // block), -(-columns // block))](
            x, weight, bias, out, rows, columns, inner, x.stride(0), weight.stride(0),
            ROWS=block, COLUMNS=block, INNER=32 if large else 64, RELU=relu,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        return out

    def shape_of(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        return x.new_empty((x.shape[0], weight.shape[0]))

    schema = "(Tensor x, Tensor weight, Tensor bias, bool relu) -> Tensor"
    operation = torch.library.custom_op("kilter::linear", linear, mutates_args=(), schema=schema)
    operation.register_fake(shape_of)
    return torch.ops.kilter.linear.default


def split_products(program: Program) -> Program:
    """Every float32 linear layer of few rows in the serial steps, by the kernel."""
    steps = tuple(
        tuple(_with_products(unit) if len(step) == 1 else unit for unit in step)
        for step in program.steps
    )
    return replace(program, steps=steps)


def _with_products(unit: Unit) -> Unit:
    if unit.graph is None:
        return unit
    nodes = list(unit.graph.graph.nodes)
    layers = {n: w for n in nodes if (w := _weight_of(n)) is not None}
    if not layers:
        return unit
    body = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for old in nodes:
        if old in layers:
            bias, x, _ = old.args
            users = list(old.users)
            relu = len(users) == 1 and users[0].target is aten.relu.default
            given = (made[x], made[layers[old]], made[bias], relu)
            made[old] = body.call_function(_operation(), given)
        elif old.target is aten.relu.default and old.args[0] in layers:
            single = len(old.args[0].users) == 1
            made[old] = made[old.args[0]] if single else body.node_copy(old, made.__getitem__)
        else:
            made[old] = body.node_copy(old, made.__getitem__)
    graph = fx.GraphModule(torch.nn.Module(), body)
    return replace(unit, run=graph, graph=graph, key=("products", unit.key))


def _weight_of(node: fx.Node) -> fx.Node | None:
    """The weight (columns x inner) of a linear layer that the kernel can do."""
    if node.target is not aten.addmm.default or node.kwargs:
        return None
    bias, x, turned = node.args
    if turned.target is not aten.t.default:
        return None
    weight = turned.args[0]
    tensors = [value(n) for n in (bias, x, weight)]
    if any(not isinstance(t, Tensor) or t.dtype != torch.float32 for t in tensors):
        return None
    plain = tensors[0].dim() == 1 and tensors[1].stride(1) == 1 and tensors[2].stride(1) == 1
    if not plain or tensors[1].shape[0] > ROWS_AT_MOST or tensors[1].shape[1] % 64:
        return None
    return weight
