"""Finds the independent branches in a traced graph and cuts the graph into a `BranchProgram`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, fx

from kilter.observe.torch_internals.branches import pytree
from kilter.parallel.folding import is_view, weight_view
from kilter.parallel.plan import find_regions
from kilter.parallel.program import BranchProgram, Unit
from kilter.parallel.trace import WayRefused, tensor_of, value

Chunks = list[list[list[fx.Node]]]
"""It has, for each step and each unit, the unit's nodes."""


def from_graph(graph: fx.GraphModule) -> BranchProgram:
    """Find the independent branches and cut the graph into steps of units."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and not weight_view(n)]
    number = {node: i for i, node in enumerate(nodes)}
    producers = [[number[r] for r in n.all_input_nodes if r in number] for n in nodes]
    weights = [_weight(n) for n in nodes]
    chunks: Chunks = []
    position = 0
    # The operations that depend on weights and masks alone come first. They are one piece that
    # runs once, which is not worth dividing.
    early = sum(bool(n.meta.get("early")) for n in nodes)
    for region in find_regions(producers, weights):
        if region.start < early:
            continue
        chunks.append([nodes[position : region.start]])
        chunks.append([[nodes[i] for i in branch] for branch in region.branches])
        position = region.end
    chunks.append([nodes[position:]])
    _move_leading_views(chunks)
    _move_elements(chunks)
    return _Cut(graph, [c for c in ([u for u in s if u] for s in chunks) if c]).program()


def _weight(node: fx.Node) -> float:
    """An estimate of a node's time. At batch 1 launches count most; moving a megabyte takes about
    as long as a launch."""
    if is_view(node):
        return 0.0
    tensors = [
        t
        for n in (node, *node.all_input_nodes)
        for t in pytree.tree_leaves(value(n))
        if isinstance(t, Tensor)
    ]
    return 1.0 + float(sum(t.numel() * t.element_size() for t in tensors)) / 1e6


def _move_leading_views(chunks: Chunks) -> None:
    """Views at the start of a branch go to the piece before it: equal branches often differ in
    these views alone."""
    for before, step in pairwise(chunks):
        if len(step) == 1 or len(before) > 1:
            continue
        inside = {node for unit in step for node in unit}
        for unit in step:
            for node in list(unit):
                if is_view(node) and not any(r in inside for r in node.all_input_nodes):
                    unit.remove(node)
                    inside.discard(node)
                    before[0].append(node)


def _move_elements(chunks: Chunks) -> None:
    """An element of a tuple goes to the unit that makes the tuple: units exchange tensors only."""
    home = {n: unit for step in chunks for unit in step for n in unit}
    for node, unit in list(home.items()):
        made = node.all_input_nodes
        if "getitem" in str(node.target) and made and home.get(made[0]) is not unit:
            unit.remove(node)
            home[made[0]].append(node)
            home[node] = home[made[0]]


class _Cut:
    """A graph that is being cut into units."""

    def __init__(self, graph: fx.GraphModule, chunks: Chunks) -> None:
        self.graph, self.chunks = graph, chunks
        order = {node: i for i, node in enumerate(graph.graph.nodes)}
        units = [unit for step in chunks for unit in step]
        for unit in units:
            unit.sort(key=order.__getitem__)
        self.home = {node: number for number, unit in enumerate(units) for node in unit}
        self.slots: dict[fx.Node, int] = {}
        output = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
        self.results = [n for n in pytree.tree_leaves(output.args) if isinstance(n, fx.Node)]

    def program(self) -> BranchProgram:
        inputs = tuple(self.slot(n) for n in self.graph.graph.nodes if n.op == "placeholder")
        steps = tuple(
            tuple(self.unit(nodes, f"{i}.{j}") for j, nodes in enumerate(step))
            for i, step in enumerate(self.chunks)
        )
        for node in self.results:
            if node not in self.slots and weight_view(node) and node.op != "get_attr":
                raise WayRefused("returns_weight_view", "returns a view of a weight", str(node))
        outputs = tuple(map(self.slot, self.results))
        constants = tuple(
            (slot, tensor_of(self.graph, n)) for n, slot in self.slots.items() if n.op == "get_attr"
        )
        return BranchProgram(
            slots=len(self.slots),
            inputs=inputs,
            constants=constants,
            steps=steps,
            outputs=outputs,
        )

    def slot(self, node: fx.Node) -> int:
        return self.slots.setdefault(node, len(self.slots))

    def unit(self, nodes: Sequence[fx.Node], name: str) -> Unit:
        writes = [n for n in nodes if isinstance(value(n), Tensor) and self.is_read_outside(n)]
        body, reads = _extract(self.graph, nodes, writes)
        return Unit(
            run=body,
            reads=tuple(map(self.slot, reads)),
            writes=tuple(map(self.slot, writes)),
            key=graph_key(body.graph),
            name=name,
            graph=body,
            work=sum(map(_weight, nodes)),
        )

    def is_read_outside(self, node: fx.Node) -> bool:
        """Whether another unit, or the caller, reads what a node makes."""
        mine = self.home[node]
        return node in self.results or any(self.home.get(u, mine) != mine for u in node.users)


def graph_key(graph: fx.Graph) -> Hashable:
    """Equal for graphs that do the same to tensors of the same shapes, strides and dtypes. The
    names of nodes make no difference."""
    number: dict[fx.Node, int] = {}
    key: list[Hashable] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            tensor = value(node)
            key.append((tuple(tensor.shape), tensor.stride(), tensor.dtype))
        else:
            key.append(_entry(node, number))
        number[node] = len(number)
    return tuple(key)


def _entry(node: fx.Node, number: dict[fx.Node, int]) -> Hashable:
    """An operation and its arguments, other nodes by their numbers."""
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    return (
        str(node.target),
        str(spec),
        tuple(f"%{number[a]}" if isinstance(a, fx.Node) else repr(a) for a in flat),
    )


def _extract(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], writes: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The nodes as a graph of their own, and the nodes that it reads. Views of weights that lie
    outside are repeated inside."""
    body = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    reads: list[fx.Node] = []
    inside = set(nodes)

    def bring(node: fx.Node) -> None:
        if node in copied:
            return
        if node not in inside and not (weight_view(node) and node.op != "get_attr"):
            copied[node] = body.placeholder(f"read{len(reads)}")
            copied[node].meta["val"] = value(node)
            reads.append(node)
            return
        for read in node.all_input_nodes:
            bring(read)
        copied[node] = body.node_copy(node, copied.__getitem__)

    for node in nodes:
        bring(node)
    body.output(tuple(copied[n] for n in writes))
    # Placeholders must come first in a graph.
    first = next(iter(body.nodes))
    for read in reads:
        if copied[read] is not first:
            first.prepend(copied[read])
    order = {node: at for at, node in enumerate(body.nodes)}
    reads.sort(key=lambda read: order[copied[read]])
    return fx.GraphModule(torch.nn.Module(), body), reads
