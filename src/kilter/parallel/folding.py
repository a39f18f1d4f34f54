"""Exact simplifications of a traced graph: work that gives the same in every call leaves the step.

There are three, all without rounding. Tables that depend on integers and literals alone are
computed once. Chains of pure data movement (views, permutations, rolls, concatenations, lookups by
a constant table) become one lookup of whole rows. Equal operations on equal operands are done once.
A serial loop over windowed heads becomes a few lookups and matrix products for each head, and
heads that differed only in how they moved data then have equal graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from kilter.observe.torch_internals.branches import UNSAFE_VIEW, TorchOperation, pytree
from kilter.parallel.trace import WayRefused, tensor_of, value

aten = torch.ops.aten

IDENTITY = {aten.lift_fresh_copy.default, aten.detach.default, aten.alias.default}
VIEWS = {
    aten.view.default, UNSAFE_VIEW, aten.reshape.default, aten.permute.default,
    aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.slice.Tensor, aten.select.int,
    aten.expand.default,
}  # fmt: skip
SPLITS = {
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default,
}  # fmt: skip
COPIES = {
    aten.clone.default, aten.roll.default, aten.cat.default, aten.stack.default,
    aten.flip.default, aten.repeat.default,
}  # fmt: skip
LOOKUPS = {aten.index.Tensor, aten.index_select.default}
FACTORIES = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default,
    aten.zeros.default, aten.ones.default, aten.linspace.default, aten.scalar_tensor.default,
}  # fmt: skip
MIN_ROW = 8
"""Shorter rows than this many elements are moved better by the original operations."""


def fold(
    graph: fx.GraphModule, device: torch.device, *, movements: bool = True, products: bool = False
) -> list[torch.Tensor]:
    """Simplify in place. Returns the tensors that tables were computed from: a change of their
    values makes the graph stale. `device` is where the step runs. `movements`: turn data movement
    into lookups (whose gradient would be a slow scatter). `products`: also turn plain views that
    are multiplied into lookups, so that all operands of matrix products have one form."""
    _drop_identities(graph)
    sources = _fold_tables(graph, device)
    if products:
        _hoist_factors(graph)
    if movements:
        _fold_movements(graph, device, products=products)
        sources += _fold_tables(graph, device)
    _merge_equal(graph)
    _early_first(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return sources


def is_view(node: fx.Node) -> bool:
    """Whether a node costs nothing on the device."""
    if node.op != "call_function":
        return bool(node.op == "get_attr")
    return bool(node.target in VIEWS or node.target in SPLITS or "getitem" in str(node.target))


def weight_view(node: fx.Node) -> bool:
    """A weight, a table, or a view of one: free, so every unit that needs it makes it again."""
    if node.op == "get_attr":
        return True
    reads = node.all_input_nodes
    return len(reads) == 1 and is_view(node) and weight_view(reads[0])


def _drop_identities(graph: fx.GraphModule) -> None:
    for node in list(graph.graph.nodes):
        if node.target in IDENTITY:
            source = node.args[0]
            if node.target is aten.lift_fresh_copy.default and source.op == "get_attr":
                source.meta["literal"] = True
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)


# --- tables ---------------------------------------------------------------------------------------


def _integral(made: Any) -> bool:
    leaves = pytree.tree_leaves(made)
    return all(
        isinstance(t, torch.Tensor) and not t.is_floating_point() and not t.is_complex()
        for t in leaves
    )


def _constant_nodes(graph: fx.GraphModule, device: torch.device) -> set[fx.Node]:
    constant: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            tensor = tensor_of(graph, node)
            # A weight stays a weight: every replay sees a change of its values. A tensor on the
            # host would be read at capture time only, so it has to become a watched table.
            host = tensor.device != device
            if _integral(tensor) or node.meta.get("literal") or host:
                constant.add(node)
        elif node.op == "call_function" and isinstance(node.target, TorchOperation):
            reads = node.all_input_nodes
            if node.target in FACTORIES if not reads else all(r in constant for r in reads):
                constant.add(node)
        elif node.op == "call_function" and all(r in constant for r in node.all_input_nodes):
            constant.add(node)  # an element of a tuple
    return constant


def _fold_tables(graph: fx.GraphModule, device: torch.device) -> list[torch.Tensor]:
    """Compute tables once. Returns the tensors that they were computed from."""
    constant = _constant_nodes(graph, device)
    values: dict[fx.Node, Any] = {}
    for node in list(graph.graph.nodes):
        if node not in constant:
            continue
        needed = any(user not in constant for user in node.users)
        if not needed or isinstance(value(node), (list, tuple)):
            continue
        computed = _evaluate(graph, node, values)
        if node.op == "get_attr" and computed.device == device:
            continue
        name = _attribute(graph, computed.to(device))
        with graph.graph.inserting_before(node):
            table = graph.graph.get_attr(name)
        table.meta["val"] = _like(node, tuple(computed.shape), computed.dtype, device)
        table.meta["literal"] = True
        node.replace_all_uses_with(table)
    sources = [tensor_of(graph, n) for n in constant if n.op == "get_attr" and n in values]
    graph.graph.eliminate_dead_code()
    return sources


def _like(
    node: fx.Node, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    fake = next(t for t in pytree.tree_leaves(value(node)) if isinstance(t, torch.Tensor))
    with fake.fake_mode:
        return torch.empty(shape, dtype=dtype, device=device)


def _attribute(graph: fx.GraphModule, tensor: torch.Tensor) -> str:
    number = 0
    while hasattr(graph, f"_table{number}"):
        number += 1
    graph.register_buffer(f"_table{number}", tensor.detach(), persistent=False)
    return f"_table{number}"


def _evaluate(graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The value of a constant node, computed on the host."""
    if node not in values:
        if node.op == "get_attr":
            values[node] = tensor_of(graph, node).detach().cpu()
        else:
            for read in node.all_input_nodes:
                _evaluate(graph, read, values)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            here = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
            values[node] = node.target(*args, **here)
    return values[node]


# --- movements ------------------------------------------------------------------------------------


def _moved_from(node: fx.Node, root: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """The one node whose elements `node` only rearranges, or None."""
    if node.op != "call_function":
        return None
    target = node.target
    if target in LOOKUPS:
        source, *tables = node.all_input_nodes
        if any(t.op != "get_attr" or not _integral(value(t)) for t in tables) or not tables:
            return None
        if any(value(t).dtype == torch.bool for t in tables):
            return None
        if source is not node.args[0]:
            return None
        return root[source]
    if target in VIEWS or target in SPLITS or target in COPIES or "getitem" in str(target):
        roots = {root[r] for r in node.all_input_nodes}
        if len(roots) == 1:
            return roots.pop()
    return None


def _roots(graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """For each node the node whose elements it rearranges; itself if it makes new elements."""
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        moved = _moved_from(node, root)
        root[node] = node if moved is None else moved
    return root


def _fold_movements(graph: fx.GraphModule, device: torch.device, *, products: bool) -> None:
    root = _roots(graph)

    def copies(node: fx.Node) -> bool:
        return root[node] is not node and (node.target in COPIES or node.target in LOOKUPS)

    def read_by_work(node: fx.Node) -> bool:
        """Whether some user needs these elements as they lie, and not only moves them further."""
        return any(
            root[user] is not root[node] or (not copies(user) and read_by_work(user))
            for user in node.users
        )

    ends = [n for n in graph.graph.nodes if copies(n) and read_by_work(n)]
    if products:
        ends += _multiplied_views(graph, root, copies)
    positions: dict[fx.Node, Any] = {}
    flattened: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in ends:
        source = root[node]
        source_value = value(source)
        if not isinstance(source_value, torch.Tensor) or not source_value.is_floating_point():
            continue
        if source_value.numel() >= 2**31:
            continue
        shape = list(value(node).shape)
        rows = _rows(_position(graph, node, source, positions), source_value.numel(), shape)
        if rows is None:
            continue
        width, table = rows
        if (source, width) not in flattened:
            with graph.graph.inserting_after(source):
                flat = graph.graph.call_function(aten.reshape.default, (source, [-1, width]))
            flat.meta["val"] = _call(aten.reshape.default, source_value, [-1, width])
            flattened[source, width] = flat
        flat = flattened[source, width]
        with graph.graph.inserting_before(node):
            moved = flat
            if table is not None:
                name = _attribute(graph, table.to(device))
                at = graph.graph.get_attr(name)
                at.meta["val"] = _like(node, tuple(table.shape), table.dtype, device)
                at.meta["literal"] = True
                moved = graph.graph.call_function(aten.index.Tensor, (flat, [at]))
                moved.meta["val"] = _call(aten.index.Tensor, flat.meta["val"], [at.meta["val"]])
            shaped = graph.graph.call_function(aten.view.default, (moved, shape))
            shaped.meta["val"] = _call(aten.reshape.default, moved.meta["val"], shape)
        node.replace_all_uses_with(shaped)
    graph.graph.eliminate_dead_code()


def _multiplied_views(
    graph: fx.GraphModule, root: dict[fx.Node, fx.Node], copies: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """Operands of matrix products that are views of another operation's result."""
    found = []
    for product in graph.graph.nodes:
        if product.target is not aten.mm.default:
            continue
        for operand in product.args:
            while operand.target in (aten.t.default, aten.transpose.int):
                operand = operand.args[0]
            chain = operand
            while chain is not root[chain] and not copies(chain):
                chain = chain.all_input_nodes[0]
            plain = chain is root[operand] and chain is not operand
            if plain and chain.op == "call_function" and operand not in found:
                found.append(operand)
    return found


def _hoist_factors(graph: fx.GraphModule) -> None:
    """A number that multiplies an operand of matrix products multiplies their results instead, if
    nothing else reads the operand. That is one rounding less, and the operand is then moved data
    alone."""
    moved: dict[fx.Node, list[fx.Node]] = {}
    for node, root in _roots(graph).items():
        moved.setdefault(root, []).append(node)
    for node, movements in moved.items():
        if node.target not in (aten.mul.Tensor, aten.mul.Scalar):
            continue
        source, factor = node.args
        if not isinstance(factor, (int, float)) or value(source).dtype != value(node).dtype:
            continue
        products = [user for n in movements for user in n.users if user not in movements]
        if any(p.target is not aten.mm.default for p in products):
            continue
        node.replace_all_uses_with(source)
        for product in products:
            with graph.graph.inserting_after(product):
                scaled = graph.graph.call_function(aten.mul.Tensor, (product, factor))
            scaled.meta["val"] = value(product)
            product.replace_all_uses_with(scaled, lambda user, scaled=scaled: user is not scaled)
    graph.graph.eliminate_dead_code()


def _call(op: Any, fake: Any, *args: Any) -> Any:
    with fake.fake_mode:
        return op(fake, *args)


def _position(
    graph: fx.GraphModule, node: fx.Node, source: fx.Node, positions: dict[fx.Node, Any]
) -> Any:
    """For each element of `node` its position in `source`: the movements are run on positions
    instead of data."""
    if node is source:
        if node not in positions:
            shape = value(node).shape
            positions[node] = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
        return positions[node]
    if node not in positions:
        for read in node.all_input_nodes:
            if read.op == "get_attr" and read is not source:
                positions[read] = tensor_of(graph, read).detach().cpu()
            else:
                _position(graph, read, source, positions)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: positions[n])
        target = aten.reshape.default if node.target in RESHAPES else node.target
        positions[node] = target(*args, **kwargs)
    return positions[node]


RESHAPES = {aten.view.default, UNSAFE_VIEW}
"""On positions these run as `reshape`, since the strides may differ from those of the data."""


def _rows(
    position: torch.Tensor, source_numel: int, shape: Sequence[int]
) -> tuple[int, torch.Tensor | None] | None:
    """Width and table of the longest equal rows that a movement keeps together. There is no table
    if it moves nothing; None if rows would be too short. Rows end at the last dimension if that is
    long enough, so that movements of one kind have tables of one shape."""
    flat = position.reshape(-1)
    numel = flat.numel()
    if numel == 0:
        return None
    breaks = torch.nonzero(flat[1:] - flat[:-1] != 1).reshape(-1) + 1
    starts = flat[torch.cat([breaks.new_zeros(1), breaks])]
    width = math.gcd(numel, source_numel, *_gcds(breaks), *_gcds(starts))
    if width == numel == source_numel:
        return width, None
    inner = math.gcd(width, shape[-1]) if shape else width
    width = inner if inner >= MIN_ROW else width
    if width < MIN_ROW:
        return None
    return width, (flat[::width] // width).to(torch.int64)


def _gcds(numbers: torch.Tensor) -> Sequence[int]:
    """The greatest common divisor of a tensor of integers, as at most one number."""
    while numbers.numel() > 1:
        half = numbers.numel() // 2
        odd = numbers[2 * half :]
        numbers = torch.cat([torch.gcd(numbers[:half], numbers[half : 2 * half]), odd])
    return [int(n) for n in numbers.tolist()]


# --- equal operations, and order ------------------------------------------------------------------


def _merge_equal(graph: fx.GraphModule) -> None:
    """Common subexpressions. The operations are pure, so doing one of two equal ones is exact."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            tensor = tensor_of(graph, node)
            key: Any = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if node.meta.get("literal") and tensor.numel() <= 2**22:
                key = (tensor.dtype, tensor.shape, tensor.cpu().contiguous().numpy().tobytes())
        elif node.op == "call_function":
            flat, spec = pytree.tree_flatten((node.args, node.kwargs))
            key = (node.target, str(spec), tuple((type(a), a) for a in map(_plain, flat)))
        else:
            continue
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.graph.erase_node(node)
        else:
            seen[key] = node


def _plain(argument: Any) -> Any:
    return argument if isinstance(argument, (int, float, bool, fx.Node)) else repr(argument)


def _early_first(graph: fx.GraphModule) -> None:
    """Operations that depend on weights and masks alone come before all others. Several layers and
    branches share their results; inside one branch they would make the others depend on it."""
    early: set[fx.Node] = set()
    nodes = list(graph.graph.nodes)
    for node in nodes:
        if node.op == "call_function" and not weight_view(node):
            is_early = all(r in early or weight_view(r) for r in node.all_input_nodes)
        else:
            mask = node.op == "placeholder" and value(node).dtype == torch.bool
            is_early = node.op == "get_attr" or mask
        if is_early:
            early.add(node)
    work = [n for n in nodes if n.op == "call_function" and not is_view(n)]
    if 2 * sum(n in early for n in work) > len(work):
        return
    placeholders = [n for n in nodes if n.op == "placeholder"]
    if not placeholders:
        return
    last = placeholders[-1]
    for node in early:
        node.meta["early"] = True
    for node in nodes:
        if (node in early or weight_view(node)) and node.op != "placeholder":
            last.append(node)
            last = node


def check_devices(graph: fx.GraphModule, device: torch.device) -> None:
    """`WayRefused` if the step works on several devices: a replay could not follow."""
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "call_function"):
            continue
        for made in pytree.tree_leaves(value(node)):
            if isinstance(made, torch.Tensor) and made.device != device:
                text = f"works on {made.device} inside a step on {device} ({node.target})"
                raise WayRefused("several_devices", text, str(node.target))
