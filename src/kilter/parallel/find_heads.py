"""Finds attention heads over row tables in a program and replaces each layer of them by one unit.

The form `softmax(a * rows_q(q) rows_k(k)^T + bias) rows_v(v)` is found in the traced operations,
whatever the class is called.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from kilter.observe.torch_internals.branches import SOFTMAX, TO_COPY, UNSAFE_VIEW
from kilter.parallel.checks import tf32_allowed
from kilter.parallel.heads import HALF, Blocks, FusedHeads, Head
from kilter.parallel.program import BranchProgram, Unit
from kilter.parallel.regions import graph_key
from kilter.parallel.trace import WayRefused, value

aten = torch.ops.aten

_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True)
class _Match:
    head: Head
    reads: tuple[int, int, int]
    """They are the slots of q, k and v."""
    bias: fx.GraphModule
    """It makes everything that is added to the scores: the scores of a product of zeros."""
    bias_reads: tuple[int, ...]
    bias_key: Hashable
    width: int
    device: torch.device
    dtype: torch.dtype


def fuse(program: BranchProgram) -> BranchProgram:
    """Every step whose units are all such heads becomes one unit."""
    fusion = _Fusion(program.slots, dict(program.constants))
    for step in program.steps:
        fusion.add(step)
    return fusion.program(program)


@dataclass
class _Fusion:
    """A program that is being rewritten, step by step."""

    slots: int
    constants: dict[int, Tensor]
    steps: list[tuple[Unit, ...]] = field(default_factory=list)
    ahead: list[tuple[int, Unit]] = field(default_factory=list)
    bias_slot: dict[Hashable, int] = field(default_factory=dict)
    """Layers with the same biases share them."""
    layers: dict[Hashable, FusedHeads] = field(default_factory=dict)
    """Layers with the same tables share them."""
    joined: dict[tuple[int, ...], int] = field(default_factory=dict)
    """It has, for the results of a layer's heads, the slot of their concatenation."""
    made_in: dict[int, int] = field(default_factory=dict)
    """It has, for each slot, the step that writes it."""

    def add(self, step: tuple[Unit, ...]) -> None:
        step = tuple(_with_joined(unit, self.joined) for unit in step)
        matches = [_match(unit, self.constants) for unit in step] if len(step) > 1 else []
        heads = [m for m in matches if m is not None]
        if not heads or len(heads) != len(step) or len({m.reads for m in heads}) != 1:
            self.made_in |= {slot: len(self.steps) for unit in step for slot in unit.writes}
            self.steps.append(step)
            return
        bias = self._bias(heads)
        tables = [(m.head.query, m.head.key, m.head.values, m.head.place) for m in heads]
        key = tuple(tuple(tuple(table.tolist()) for table in own) for own in tables)
        if key not in self.layers:
            self.layers[key] = _layer(heads)
        self.joined[tuple(unit.writes[0] for unit in step)] = self.slots
        fused = Unit(
            run=self.layers[key],
            reads=(*heads[0].reads, bias),
            writes=(self.slots,),
            key=("fused", key),
            name="+".join(u.name for u in step),
            work=sum(u.work for u in step),
            members=len(step),
        )
        self.steps.append((fused,))
        self.slots += 1

    def _bias(self, heads: Sequence[_Match]) -> int:
        """The slot of the heads' biases, which are made ahead of time: once what they read is
        there, while the layers before run."""
        key = tuple((m.bias_key, m.bias_reads) for m in heads)
        if key not in self.bias_slot:
            self.bias_slot[key] = self.slots
            unit = _bias_unit(heads, self.slots)
            start = 1 + max((self.made_in.get(s, -1) for s in unit.reads), default=-1)
            self.ahead.append((start, unit))
            self.slots += 1
        return self.bias_slot[key]

    def program(self, old: BranchProgram) -> BranchProgram:
        if not self.joined:
            text = "no layer whose branches are all attention heads over row tables"
            raise WayRefused("no_heads", text)
        read = {slot for step in self.steps for unit in step for slot in unit.reads}
        read |= set(old.outputs)
        if any(part in read for parts in self.joined for part in parts):
            text = "the heads' results are not simply joined side by side"
            raise WayRefused("heads_not_joined", text)
        steps, ahead = tuple(self.steps), tuple(self.ahead)
        return replace(old, slots=self.slots, steps=steps, ahead=ahead)


def _layer(heads: Sequence[_Match]) -> FusedHeads:
    one = heads[0]
    cut = Blocks() if one.dtype == torch.float32 else HALF
    if tf32_allowed()[0]:
        cut = replace(cut, precision="tf32")
    return FusedHeads([m.head for m in heads], one.width, one.device, cut, one.dtype)


def _match(unit: Unit, constants: dict[int, Tensor]) -> _Match | None:
    """The unit as a head; None if it is not one."""
    if unit.graph is None or len(unit.writes) != 1:
        return None
    nodes = list(unit.graph.graph.nodes)
    slot = dict(zip((n for n in nodes if n.op == "placeholder"), unit.reads, strict=True))
    softmaxes = [n for n in nodes if n.target is SOFTMAX]
    products = [n for n in nodes if n.target is aten.mm.default]
    if len(softmaxes) != 1 or len(products) != 2:
        return None
    (softmax,), (first, second) = softmaxes, products
    rows, columns = value(first).shape
    if softmax.args[1] not in (-1, 1) or tuple(value(softmax).shape) != (rows, columns):
        return None
    scale = _scale(softmax.args[0], first)
    turned = first.args[1]
    if scale is None or turned.target not in _TURNS:
        return None
    query, key = _lookup(first.args[0]), _lookup(turned.args[0])
    values = _lookup(second.args[1])
    if query is None or key is None or values is None or _reshaped(second.args[0]) is not softmax:
        return None
    width = int(value(query[0]).shape[-1])
    looked_up = (query, key, values)
    tables = [constants[slot[t]] for _, t in looked_up if slot.get(t) in constants]
    bases = [slot[b] for b, _ in looked_up if b in slot]
    widths = {int(value(b).shape[-1]) for b, _ in (query, key, values)}
    (results,) = nodes[-1].args
    place = _place(results[0], second, width, slot, constants)
    sizes = [t.numel() for t in tables]
    fits = width in (16, 32, 64, 128) and value(query[0]).dtype in _DTYPES
    if place is None or len(bases) != 3 or len(sizes) != 3 or len(widths) != 1 or not fits:
        return None
    slots = sizes[0] // rows
    if sizes != [rows * slots, columns * slots, columns * slots] or place.numel() != sizes[0]:
        return None
    bias, bias_reads = _bias(softmax.args[0], first, slot)
    return _Match(
        Head(
            rows=rows,
            columns=columns,
            slots=slots,
            scale=scale,
            query=tables[0].reshape(-1),
            key=tables[1].reshape(-1),
            values=tables[2].reshape(-1),
            place=place.to(tables[0].device),
        ),
        (bases[0], bases[1], bases[2]),
        bias,
        bias_reads,
        graph_key(bias.graph),
        width,
        value(first).device,
        value(first).dtype,
    )


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_RESHAPES = (
    aten.view.default,
    UNSAFE_VIEW,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)


def _reshaped(node: Any) -> Any:
    """The node behind those that only change the shape."""
    while isinstance(node, fx.Node) and node.target in _RESHAPES:
        node = node.args[0]
    return node


def _lookup(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(rows, table) of a lookup of whole rows."""
    node = _reshaped(node)
    if node.target is not aten.index.Tensor or len(node.args[1]) != 1:
        return None
    return node.args[0], node.args[1][0]


def _scale(node: Any, product: fx.Node) -> float | None:
    """The factor between the product and the softmax; None if there are other operations between
    them than additions, masks and multiplications by numbers."""
    scale = 1.0
    while node is not product:
        if not isinstance(node, fx.Node) or node.op != "call_function" or node.kwargs:
            return None
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        path = [a for a in operands if _depends(a, product)]
        if len(path) != 1:
            return None
        other = node.args[1] if node.args[0] is path[0] else node.args[0]
        if node.target in (aten.mul.Tensor, aten.mul.Scalar) and isinstance(other, (int, float)):
            scale *= other
        elif (
            node.target in (aten.div.Tensor, aten.div.Scalar)
            and node.args[0] is path[0]
            and isinstance(other, (int, float))
        ):
            scale /= other
        elif node.target is aten.masked_fill.Scalar:
            if node.args[0] is not path[0] or node.args[2] != float("-inf"):
                return None
        elif node.target is not aten.add.Tensor:
            return None
        node = path[0]
    return scale


def _depends(node: fx.Node, on: fx.Node) -> bool:
    return node is on or any(_depends(read, on) for read in node.all_input_nodes)


def _place(
    result: Any,
    product: fx.Node,
    width: int,
    slot: dict[fx.Node, int],
    constants: dict[int, Tensor],
) -> Tensor | None:
    """The position of each row of the last product in the unit's result (tokens x width)."""
    shape = tuple(value(result).shape)
    result = _reshaped(result)
    if len(shape) != 2 or shape[1] != width:
        return None
    if result is product:
        return torch.arange(shape[0])
    found = _lookup(result)
    if found is None or _reshaped(found[0]) is not product:
        return None
    table = constants.get(slot.get(found[1], -1))
    if table is None or int(value(found[0]).shape[-1]) != width:
        return None
    table = table.reshape(-1).cpu()
    everywhere = torch.arange(table.numel())
    if not torch.equal(table.sort().values, everywhere):
        return None
    return torch.empty_like(table).index_copy_(0, table, everywhere)


def _bias(
    node: fx.Node, product: fx.Node, slot: dict[fx.Node, int]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The operations from the product to the softmax, on a product of zeros, in float32."""
    body = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    reads: list[int] = []

    def bring(old: fx.Node) -> None:
        if old in made or old is product:
            return
        if old.op == "placeholder":
            made[old] = body.placeholder(f"read{len(reads)}")
            made[old].meta = dict(old.meta)
            reads.append(slot[old])
            return
        for read in old.all_input_nodes:
            bring(read)
        made[old] = body.node_copy(old, made.__getitem__)

    shape, device = list(value(product).shape), value(product).device
    # Placeholders first, then the zeros, then the rest.
    others = [
        n for n in node.graph.nodes if n.op == "placeholder" and _reads_aside(node, n, product)
    ]
    for other in others:
        bring(other)
    made[product] = body.call_function(
        aten.full.default, (shape, 0.0), {"dtype": torch.float32, "device": device}
    )
    bring(node)
    body.output(made[node])
    return fx.GraphModule(torch.nn.Module(), body), tuple(reads)


def _reads_aside(node: fx.Node, other: fx.Node, product: fx.Node) -> bool:
    """Whether `node` depends on `other` by a path that does not pass the product."""
    if node is product:
        return False
    return node is other or any(_reads_aside(r, other, product) for r in node.all_input_nodes)


def _bias_unit(matches: Sequence[_Match], slot: int) -> Unit:
    """All heads' biases, flat, one after the other, in the loop's dtype. Equal biases are computed
    once."""
    dtype = matches[0].dtype
    body = fx.Graph()
    # In the order of their first use, so that layers that differ only in tensors are alike.
    reads = list(dict.fromkeys(s for m in matches for s in m.bias_reads))
    given = {s: body.placeholder(f"read{i}") for i, s in enumerate(reads)}
    for m in matches:
        theirs = [n for n in m.bias.graph.nodes if n.op == "placeholder"]
        for old, read in zip(theirs, m.bias_reads, strict=True):
            given[read].meta = dict(old.meta)
    done: dict[Hashable, Any] = {}
    for m in matches:
        key = (m.bias_key, m.bias_reads)
        if key in done:
            continue
        theirs = [n for n in m.bias.graph.nodes if n.op == "placeholder"]
        known = {n: given[s] for n, s in zip(theirs, m.bias_reads, strict=True)}
        made = body.graph_copy(m.bias.graph, known)
        wide = body.call_function(TO_COPY, (made,), {"dtype": dtype})
        shape = [m.head.rows, m.head.columns]
        whole = body.call_function(aten.expand.default, (wide, shape))
        done[key] = body.call_function(aten.reshape.default, (whole, [-1]))
    flat = [done[m.bias_key, m.bias_reads] for m in matches]
    body.output((body.call_function(aten.cat.default, (flat,)),))
    graph = fx.GraphModule(torch.nn.Module(), body)
    # Layers that make their biases alike, of different tensors, share one compiled piece.
    alike = {slot: number for number, slot in enumerate(reads)}
    name = ("bias", tuple((m.bias_key, tuple(map(alike.get, m.bias_reads))) for m in matches))
    return Unit(run=graph, reads=tuple(reads), writes=(slot,), key=name, name="bias", graph=graph)


def _with_joined(unit: Unit, joined: dict[tuple[int, ...], int]) -> Unit:
    """A unit that joins a layer's heads side by side reads the joined result instead."""
    if unit.graph is None or not joined:
        return unit
    placeholders = [n for n in unit.graph.graph.nodes if n.op == "placeholder"]
    slot = dict(zip(placeholders, unit.reads, strict=True))
    for node in unit.graph.graph.nodes:
        if node.target is not aten.cat.default or len(node.args) < 2 or node.args[1] not in (1, -1):
            continue
        whole = joined.get(tuple(slot.get(n, -1) for n in node.args[0]))
        if whole is None:
            continue
        body = fx.Graph()
        made = {node: body.placeholder("joined")}
        made[node].meta = dict(node.meta)
        keep = [p for p in placeholders if p not in node.args[0] or len(p.users) > 1]
        for old in keep:
            made[old] = body.node_copy(old, made.__getitem__)
        for old in unit.graph.graph.nodes:
            if old in made or old.op in ("placeholder", "output"):
                continue
            made[old] = body.node_copy(old, made.__getitem__)
        (results,) = next(n for n in unit.graph.graph.nodes if n.op == "output").args
        body.output(tuple(made[n] for n in results))
        graph = fx.GraphModule(torch.nn.Module(), body)
        reads = (whole, *(slot[p] for p in keep))
        return replace(unit, run=graph, graph=graph, reads=reads, key=("joined", unit.key))
    return unit
