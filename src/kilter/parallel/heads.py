"""All heads of a layer in four launches: heads of one slot by themselves, beside them scores,
softmax and values of the others, each for every head at once.

Heads of the form `softmax(a * rows_q(q) rows_k(k)^T + bias) rows_v(v)`, each with its own number of
rows and row tables, differ only in numbers. A program of the grid looks its head up in a work list,
so that eight heads of eight shapes fill the card together. The queries, keys and values are never
expanded in memory: a row of the score product is a sum over slots, and each slot is looked up where
it lies. The form is found in the traced graph, not in anybody's class; cards and hosts without
Triton run the reference, which is the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from kilter.act.branches.numerics import tf32_allowed
from kilter.act.branches.program import Program, Unit, graph_key
from kilter.act.branches.streams import Cuda
from kilter.act.branches.tracing import Refused, value

aten = torch.ops.aten


@dataclass(frozen=True)
class Cut:
    """How a kernel cuts its work: rows and columns of a block, warps, stages of its loop."""

    rows: int
    columns: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True)
class Blocks:
    """How the kernels of heads cut their work: the best of about 30 points for each kernel on an
    H200, for heads of 1 to 64 slots of 32 channels."""

    scores: Cut = Cut(16, 64, 4, 2)
    values: Cut = Cut(16, 64, 2, 2)
    attend: Cut = Cut(16, 128, 4, 3)
    slots: int = 8
    """Slots that one program of the score kernel adds up; longer sums are split over programs."""
    together: int = 1
    """Slots that are multiplied at once."""
    precision: str = "tf32x3"
    """Of float32 products: three TF32 products with the rounding errors added back, about as
    exact as `ieee`; the check against float64 judges it like everything else."""


HALF = replace(Blocks(), scores=Cut(16, 128, 4, 2), values=Cut(16, 128, 2, 2), together=2)
"""For 16-bit operands, whose blocks are half as large."""


_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True)
class Head:
    """One head as numbers. Row `m` of its scores adds up `slots` rows of q and k each."""

    rows: int
    columns: int
    slots: int
    scale: float
    query: Tensor
    """(rows * slots) rows of q."""
    key: Tensor
    """(columns * slots) rows of k."""
    values: Tensor
    """(columns * slots) rows of v."""
    place: Tensor
    """(rows * slots) where each row of the result goes."""


@dataclass(frozen=True)
class _Match:
    head: Head
    reads: tuple[int, int, int]
    """Slots of q, k and v."""
    bias: fx.GraphModule
    """The scores of an all-zero product: everything that is added to them."""
    bias_reads: tuple[int, ...]
    bias_key: Hashable
    width: int
    device: torch.device
    dtype: torch.dtype


class FusedHeads:
    """`(q, k, v, bias) -> (tokens, heads * width)` for a layer's heads."""

    def __init__(
        self,
        heads: Sequence[Head],
        width: int,
        device: torch.device,
        blocks: Blocks | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.heads, self.width, self.device, self.dtype = tuple(heads), width, device, dtype
        self.blocks = blocks or Blocks()
        self.tokens = heads[0].rows * heads[0].slots
        self._tables = _Tables(self.heads, self.blocks, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor]:
        if q.is_cuda and has_triton():
            return (self._launch(q, k, v, bias),)
        return (self.reference(q, k, v, bias),)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """The definition, head by head."""
        parts, at = [], 0
        for head in self.heads:
            a, b = head.rows, head.columns
            scores = q[head.query].reshape(a, -1) @ k[head.key].reshape(b, -1).T
            added = bias[at : at + a * b].reshape(a, b)
            at += a * b
            weights = (scores * head.scale + added).softmax(-1).to(v.dtype)
            found = (weights @ v[head.values].reshape(b, -1)).reshape(-1, self.width)
            parts.append(torch.empty_like(found).index_copy_(0, head.place, found))
        return torch.cat(parts, dim=1)

    def launches(self) -> dict[Hashable, Callable[[], Any]]:
        """Both chains of launches apart, on zeros: for whoever compiles kernels beforehand."""
        t = self._tables
        rows = 1 + max(int(x.max()) for x in (t.query, t.key, t.values))
        given = torch.zeros((rows, self.width), dtype=self.dtype, device=self.device)
        bias = torch.zeros(t.weight_numel, dtype=self.dtype, device=self.device)
        shape = self.tokens, len(self.heads) * self.width
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        chains = {self._launch_single: t.attend_work, self._launch_many: t.score_work}
        return {
            (chain.__name__, self.dtype, self.blocks): partial(
                chain, given, given, given, bias, out
            )
            for chain, work in chains.items()
            if work is not None
        }

    def _launch(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        shape = self.tokens, len(self.heads) * self.width
        out = torch.empty(shape, dtype=v.dtype, device=v.device)
        t = self._tables
        if t.attend_work is not None and t.score_work is not None:
            # Two chains that need nothing of each other; joined before anything is given back.
            streams = Cuda(v.device)
            main, side = streams.current(), streams.side(BESIDE)
            streams.wait(side, streams.record(main))
            self._launch_many(q, k, v, bias, out)
            with streams.use(side):
                self._launch_single(q, k, v, bias, out)
            streams.wait(main, streams.record(side))
        elif t.attend_work is not None:
            self._launch_single(q, k, v, bias, out)
        else:
            self._launch_many(q, k, v, bias, out)
        return out

    def _launch_single(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor) -> None:
        """The heads of one slot."""
        from kilter.act.branches import kernels

        t, b = self._tables, self.blocks
        kernels.launch(
            kernels.attend, t.attend_work.shape[:1],
            q, k, v, bias, out, t.heads, t.scales, t.attend_work, t.query, t.key, t.values,
            t.place, out.shape[1], WIDTH=self.width, PRECISION=b.precision, **b.attend.options(),
        )  # fmt: skip

    def _launch_many(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor) -> None:
        """The heads of several slots."""
        from kilter.act.branches import kernels

        t, b = self._tables, self.blocks
        scores = torch.empty(t.score_numel, dtype=torch.float32, device=q.device)
        weights = torch.empty(t.weight_numel, dtype=v.dtype, device=q.device)
        common = {"WIDTH": self.width, "PRECISION": b.precision}
        kernels.launch(
            kernels.scores, t.score_work.shape[:1],
            q, k, scores, t.heads, t.score_work, t.query, t.key,
            TOGETHER=b.together, **common, **b.scores.options(),
        )  # fmt: skip
        kernels.launch(
            kernels.softmax, t.row_work.shape[:1],
            scores, bias, weights, t.heads, t.scales, t.row_work,
            SPAN=t.span, SPLITS=t.splits, num_warps=4,
        )  # fmt: skip
        kernels.launch(
            kernels.values, t.value_work.shape[:1],
            weights, v, out, t.heads, t.value_work, t.values, t.place, out.shape[1],
            **common, **b.values.options(),
        )  # fmt: skip


BESIDE = -3
"""The number of the side stream for heads of one slot."""


class _Tables:
    """The heads' numbers on the device, and who does what."""

    def __init__(self, heads: Sequence[Head], blocks: Blocks, device: torch.device) -> None:
        numbers, score_work, value_work, row_work, attend_work = [], [], [], [], []
        row_at = column_at = score_at = bias_at = self.splits = 0
        for index, h in enumerate(heads):
            splits = math.ceil(h.slots / blocks.slots)
            numbers.append(
                [h.rows, h.columns, h.slots, splits, row_at, column_at, score_at, bias_at]
            )
            row_at += h.rows * h.slots
            column_at += h.columns * h.slots
            bias_at += h.rows * h.columns
            if h.slots == 1:
                high = math.ceil(h.rows / blocks.attend.rows)
                attend_work += [[index, block] for block in range(high)]
                continue
            self.splits = max(self.splits, splits)
            score_at += splits * h.rows * h.columns
            for split in range(splits):
                slots = min(blocks.slots, h.slots - split * blocks.slots)
                score_work += [
                    (slots, [index, row, column, split])
                    for row in range(math.ceil(h.rows / blocks.scores.rows))
                    for column in range(math.ceil(h.columns / blocks.scores.columns))
                ]
            high = math.ceil(h.rows / blocks.values.rows)
            value_work += [[index, row, slot] for row in range(high) for slot in range(h.slots)]
            row_work += [[index, row] for row in range(h.rows)]
        self.score_numel, self.weight_numel = score_at, bias_at
        self.span = 1 << (max(h.columns for h in heads) - 1).bit_length()
        # Longest first: the last programs of the grid are the short ones.
        score_work.sort(key=lambda item: -item[0])

        def work(items: list[list[int]]) -> Any:
            return torch.tensor(items, dtype=torch.int32).to(device) if items else None

        self.heads = torch.tensor(numbers, dtype=torch.int32, device=device)
        self.scales = torch.tensor([h.scale for h in heads], dtype=torch.float32, device=device)
        self.score_work = work([item for _, item in score_work])
        self.value_work = work(value_work)
        self.row_work = work(row_work)
        self.attend_work = work(attend_work)
        self.query = _joined([h.query for h in heads], device)
        self.key = _joined([h.key for h in heads], device)
        self.values = _joined([h.values for h in heads], device)
        self.place = _joined([h.place for h in heads], device)


def _joined(tables: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([t.to(torch.int32) for t in tables]).to(device)


@cache
def has_triton() -> bool:
    """Whether Triton can be imported here."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


# --- finding the form -----------------------------------------------------------------------------


def fuse(program: Program) -> Program:
    """Every step whose units are all such heads becomes one unit of three launches."""
    slots = program.slots
    constants = dict(program.constants)
    steps: list[tuple[Unit, ...]] = []
    bias_slot: dict[Hashable, int] = {}
    layers: dict[Hashable, FusedHeads] = {}
    joined: dict[tuple[int, ...], int] = {}
    made_in: dict[int, int] = {}
    ahead: list[tuple[int, Unit]] = []
    found = 0
    for step in program.steps:
        step = tuple(_with_joined(unit, joined) for unit in step)
        matches = [_match(unit, constants) for unit in step] if len(step) > 1 else []
        heads = [m for m in matches if m is not None]
        if not heads or len(heads) != len(step) or len({m.reads for m in heads}) != 1:
            made_in |= {slot: len(steps) for unit in step for slot in unit.writes}
            steps.append(step)
            continue
        found += 1
        bias_key = tuple((m.bias_key, m.bias_reads) for m in heads)
        if bias_key not in bias_slot:
            bias_slot[bias_key] = slots
            # What needs nothing of the layers before is done while they run.
            unit = _bias_unit(heads, slots)
            ahead.append((1 + max((made_in.get(s, -1) for s in unit.reads), default=-1), unit))
            slots += 1
        head_key = tuple(tuple(_identity(t) for t in _tables_of(m.head)) for m in heads)
        if head_key not in layers:
            one = heads[0]
            cut = Blocks() if one.dtype == torch.float32 else HALF
            if tf32_allowed()[0]:
                cut = replace(cut, precision="tf32")
            numbers = [m.head for m in heads]
            layers[head_key] = FusedHeads(numbers, one.width, one.device, cut, one.dtype)
        parts = tuple(unit.writes[0] for unit in step)
        joined[parts] = slots
        steps.append(
            (
                Unit(
                    run=layers[head_key],
                    reads=(*heads[0].reads, bias_slot[bias_key]),
                    writes=(slots,),
                    key=("fused", head_key),
                    name="+".join(u.name for u in step),
                    work=sum(u.work for u in step),
                    members=len(step),
                ),
            )
        )
        slots += 1
    if not found:
        raise Refused("no layer whose branches are all attention heads over row tables")
    read = {slot for step in steps for unit in step for slot in unit.reads}
    missing = [p for parts in joined for p in parts if p in read or p in program.outputs]
    if missing:
        raise Refused("the heads' results are not simply joined side by side")
    return replace(program, slots=slots, steps=tuple(steps), ahead=tuple(ahead))


def _tables_of(head: Head) -> tuple[Tensor, ...]:
    return head.query, head.key, head.values, head.place


def _identity(table: Tensor) -> Hashable:
    return tuple(table.tolist())


def _match(unit: Unit, constants: dict[int, Tensor]) -> _Match | None:
    """The unit as a head, or None if it is none."""
    if unit.graph is None or len(unit.writes) != 1:
        return None
    nodes = list(unit.graph.graph.nodes)
    slot = dict(zip((n for n in nodes if n.op == "placeholder"), unit.reads, strict=True))
    softmaxes = [n for n in nodes if n.target is aten._softmax.default]
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
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)


def _reshaped(node: Any) -> Any:
    """What a node only gives another shape to."""
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
    """The factor between the product and the softmax; None if there is more than adding, masking
    and multiplying by numbers."""
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
    """Where each row of the last product ends up in the unit's result (tokens x width)."""
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
    """The way from the product to the softmax with a product of zeros, in float32."""
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
    """Whether `node` depends on `other` by a way that does not lead through the product."""
    if node is product:
        return False
    return node is other or any(_reads_aside(r, other, product) for r in node.all_input_nodes)


def _bias_unit(matches: Sequence[_Match], slot: int) -> Unit:
    """All heads' biases, flat, one after the other, in the dtype the loop has them in; equal ones
    are computed once."""
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
        wide = body.call_function(aten._to_copy.default, (made,), {"dtype": dtype})
        shape = [m.head.rows, m.head.columns]
        whole = body.call_function(aten.expand.default, (wide, shape))
        done[key] = body.call_function(aten.reshape.default, (whole, [-1]))
    flat = [done[m.bias_key, m.bias_reads] for m in matches]
    body.output((body.call_function(aten.cat.default, (flat,)),))
    graph = fx.GraphModule(torch.nn.Module(), body)
    # Layers whose biases are made alike, of other tensors, share one compiled piece.
    alike = {slot: number for number, slot in enumerate(reads)}
    name = ("bias", tuple((m.bias_key, tuple(map(alike.get, m.bias_reads))) for m in matches))
    return Unit(run=graph, reads=tuple(reads), writes=(slot,), key=name, name="bias", graph=graph)


def _with_joined(unit: Unit, joined: dict[tuple[int, ...], int]) -> Unit:
    """A unit that joins a layer's heads side by side reads them joined already."""
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
