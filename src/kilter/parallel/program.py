"""A step of work as pieces: `Program` is a list of steps, each a few `Unit`s that need nothing
from each other. Every mode runs the same program; they differ in who runs the units, and where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from kilter.act.branches.folding import is_view, weight_view
from kilter.act.branches.tracing import TRACE_ERRORS, Refused, tensor_of, value
from kilter.plan.branches import find_regions, group_equal

Run = Callable[..., Any]
RunStep = Callable[[int, "Program", list[Tensor | None]], None]
"""Runs step `i` of a program: reads the units' slots, writes their results."""


@dataclass(frozen=True)
class Unit:
    """A piece of work: tensors in, a tuple of tensors out."""

    run: Run
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    key: Hashable
    """Units with equal keys do the same to tensors of the same shapes, strides and dtypes."""
    name: str
    graph: fx.GraphModule | None = None
    work: float = 1.0
    """A guess at its share of the time, until it is measured."""
    members: int = 1
    """Branches in it: more than one if stacked."""
    opaque: bool = False
    """A callable of the user's that is only called: it may do things that no graph can hold."""


@dataclass(frozen=True)
class Program:
    """Steps in order; inside a step, units in the order of the serial loop."""

    slots: int
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Tensor], ...]
    """Slots that hold weights, buffers and tables: read in place, never copied."""
    tables: frozenset[int]
    """Those constants whose values never change."""
    steps: tuple[tuple[Unit, ...], ...]
    outputs: tuple[int, ...]
    ahead: tuple[tuple[int, Unit], ...] = ()
    """(step, unit): work that may start with that step and is needed only by a later one."""

    def needed(self, unit: Unit) -> int:
        """The first step that reads what a unit of `ahead` makes."""
        made = set(unit.writes)
        readers = (i for i, s in enumerate(self.steps) if any(made & set(u.reads) for u in s))
        return next(readers, len(self.steps) - 1)

    def units(self) -> Iterator[Unit]:
        """All units, step by step."""
        for step in self.steps:
            yield from step

    def in_line(self) -> Program:
        """The same with the units of `ahead` as steps where they are needed."""
        if not self.ahead:
            return self
        steps: list[tuple[Unit, ...]] = []
        for index, step in enumerate(self.steps):
            steps += [(unit,) for _, unit in self.ahead if self.needed(unit) == index]
            steps.append(step)
        return replace(self, steps=tuple(steps), ahead=())

    def with_weights(self, convert: Callable[[Tensor], Tensor]) -> Program:
        """The same over other tensors in place of its constants."""
        return replace(self, constants=tuple((slot, convert(t)) for slot, t in self.constants))

    @property
    def branches(self) -> int:
        return sum(unit.members for step in self.steps if len(step) > 1 for unit in step)

    @property
    def widest(self) -> int:
        """Index of the step with the most units."""
        return max(range(len(self.steps)), key=lambda i: len(self.steps[i]), default=0)

    def arguments(self, unit: Unit, environment: list[Tensor | None]) -> list[Any]:
        return [environment[slot] for slot in unit.reads]

    def execute(self, inputs: Sequence[Tensor], run_step: RunStep) -> list[Tensor]:
        """Run all steps. A tensor is let go only after the step that read it last has been joined,
        so that no side stream can be given its memory while another still reads it."""
        environment: list[Tensor | None] = [None] * self.slots
        for slot, tensor in self.constants:
            environment[slot] = tensor
        for slot, tensor in zip(self.inputs, inputs, strict=True):
            environment[slot] = tensor
        last = self.last_uses()
        for index in range(len(self.steps)):
            run_step(index, self, environment)
            for slot in last[index]:
                environment[slot] = None
        return [environment[slot] for slot in self.outputs]

    def last_uses(self) -> list[list[int]]:
        """For each step the slots that nothing reads after it."""
        last: dict[int, int] = {}
        for index, step in enumerate(self.steps):
            for unit in step:
                for slot in (*unit.reads, *unit.writes):
                    last[slot] = index
        for _, unit in self.ahead:
            joined = self.needed(unit)
            for slot in (*unit.reads, *unit.writes):
                last[slot] = max(last.get(slot, 0), joined)
        kept = {slot for slot, _ in self.constants} | set(self.outputs) | set(self.inputs)
        ends: list[list[int]] = [[] for _ in self.steps]
        for slot, index in last.items():
            if slot not in kept:
                ends[index].append(slot)
        return ends


def laid_like(made: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> list[Tensor]:
    """Results as they lie in memory after the serial loop: what is made of them next, a view say,
    may need that."""

    def fits(t: Tensor, wanted: Sequence[int]) -> bool:
        return all(n < 2 or a == b for n, a, b in zip(t.shape, t.stride(), wanted, strict=True))

    return [
        t if fits(t, wanted) else t.new_empty_strided(t.shape, wanted).copy_(t)
        for t, wanted in zip(made, strides, strict=True)
    ]


def run_in_order(index: int, program: Program, environment: list[Tensor | None]) -> None:
    """The serial loop."""
    for unit in program.steps[index]:
        store(unit, unit.run(*program.arguments(unit, environment)), environment)


def store(unit: Unit, results: Any, environment: list[Tensor | None]) -> None:
    for slot, tensor in zip(unit.writes, results, strict=True):
        environment[slot] = tensor


def from_callables(
    functions: Sequence[Run], splits: Sequence[Sequence[int]], count: int
) -> Program:
    """One step: each function reads the inputs at its positions and makes one value."""
    units = tuple(
        Unit(
            run=lambda *args, function=function: (function(*args),),
            reads=tuple(reads),
            writes=(count + number,),
            key=("callable", number),
            name=f"branch {number}",
            opaque=True,
        )
        for number, (function, reads) in enumerate(zip(functions, splits, strict=True))
    )
    return Program(
        slots=count + len(units),
        inputs=tuple(range(count)),
        constants=(),
        tables=frozenset(),
        steps=(units,),
        outputs=tuple(range(count, count + len(units))),
    )


# --- from a traced graph --------------------------------------------------------------------------


def from_graph(graph: fx.GraphModule) -> Program:
    """Find the independent branches and cut the graph into steps of units."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and not weight_view(n)]
    number = {node: i for i, node in enumerate(nodes)}
    producers = [[number[r] for r in n.all_input_nodes if r in number] for n in nodes]
    weights = [_weight(n) for n in nodes]
    chunks: list[list[list[fx.Node]]] = []
    position = 0
    # What comes first for everybody is one piece, run once: not worth cutting up.
    early = sum(bool(n.meta.get("early")) for n in nodes)
    for region in find_regions(producers, weights):
        if region.start < early:
            continue
        chunks.append([nodes[position : region.start]])
        chunks.append([[nodes[i] for i in branch] for branch in region.branches])
        position = region.end
    chunks.append([nodes[position:]])
    _move_free_work(chunks)
    output = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
    return _program(graph, [c for c in ([u for u in s if u] for s in chunks) if c], output)


def _weight(node: fx.Node) -> float:
    """Launches count most at batch 1; a megabyte moved is about as long as a launch saved."""
    if is_view(node):
        return 0.0
    tensors = [
        t
        for n in (node, *node.all_input_nodes)
        for t in pytree.tree_leaves(value(n))
        if isinstance(t, Tensor)
    ]
    return 1.0 + float(sum(t.numel() * t.element_size() for t in tensors)) / 1e6


def _move_free_work(chunks: list[list[list[fx.Node]]]) -> None:
    """Views at the head of a branch go to the piece before it, where equal branches do not differ
    by them; an element of a tuple goes where the tuple is made, since only tensors cross."""
    for index in range(1, len(chunks)):
        if len(chunks[index]) == 1:
            continue
        inside = {n for unit in chunks[index] for n in unit}
        before = chunks[index - 1]
        if len(before) > 1:
            continue
        for unit in chunks[index]:
            for node in list(unit):
                if is_view(node) and not any(r in inside for r in node.all_input_nodes):
                    unit.remove(node)
                    inside.discard(node)
                    before[0].append(node)
    home = {n: unit for step in chunks for unit in step for n in unit}
    for step in chunks:
        for unit in step:
            for node in list(unit):
                made = node.all_input_nodes
                if "getitem" in str(node.target) and made and home.get(made[0]) is not unit:
                    unit.remove(node)
                    home[made[0]].append(node)
                    home[node] = home[made[0]]


def _program(graph: fx.GraphModule, chunks: list[list[list[fx.Node]]], output: fx.Node) -> Program:
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    home: dict[fx.Node, int] = {}
    unit_number = 0
    for step in chunks:
        for unit in step:
            unit.sort(key=order.__getitem__)
            for node in unit:
                home[node] = unit_number
            unit_number += 1
    slots: dict[fx.Node, int] = {}
    constants: dict[fx.Node, Tensor] = {}
    tables: set[int] = set()

    def slot(node: fx.Node) -> int:
        if node not in slots:
            slots[node] = len(slots)
            if node.op == "get_attr":
                constants[node] = tensor_of(graph, node)
                if node.meta.get("literal") and str(node.target).startswith("_table"):
                    tables.add(slots[node])
        return slots[node]

    inputs = tuple(slot(n) for n in graph.graph.nodes if n.op == "placeholder")
    results = [n for n in pytree.tree_leaves(output.args) if isinstance(n, fx.Node)]
    steps: list[tuple[Unit, ...]] = []
    for step in chunks:
        units: list[Unit] = []
        for nodes in step:
            mine = home[nodes[0]]
            writes = [
                n
                for n in nodes
                if n in results or any(home.get(u, -1) != mine for u in n.users if u in home)
            ]
            writes = [n for n in writes if isinstance(value(n), Tensor)]
            body, reads, key = _extract(graph, nodes, writes)
            units.append(
                Unit(
                    run=body,
                    reads=tuple(slot(n) for n in reads),
                    writes=tuple(slot(n) for n in writes),
                    key=key,
                    name=f"{len(steps)}.{len(units)}",
                    graph=body,
                    work=sum(_weight(n) for n in nodes),
                )
            )
        steps.append(tuple(units))
    outputs = []
    for node in results:
        if node not in slots and weight_view(node) and node.op != "get_attr":
            raise Refused("returns a view of a weight")
        outputs.append(slot(node))
    return Program(
        slots=len(slots),
        inputs=inputs,
        constants=tuple((slots[n], t) for n, t in constants.items()),
        tables=frozenset(tables),
        steps=tuple(steps),
        outputs=tuple(outputs),
    )


def graph_key(graph: fx.Graph) -> Hashable:
    """Equal for graphs that do the same to tensors of the same shapes, strides and dtypes, whatever
    their nodes are called."""
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
) -> tuple[fx.GraphModule, list[fx.Node], Hashable]:
    """The nodes as a graph of their own: its body, what it reads, and a key that equal bodies
    share. Views of weights that lie outside are repeated inside."""
    body = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    reads: list[fx.Node] = []
    inside = set(nodes)
    key: list[Hashable] = []
    number: dict[fx.Node, int] = {}

    def bring(node: fx.Node) -> fx.Node:
        if node in copied:
            return copied[node]
        outside = node not in inside
        if outside and not (weight_view(node) and node.op != "get_attr"):
            made = body.placeholder(f"read{len(reads)}")
            made.meta["val"] = value(node)
            reads.append(node)
            tensor = value(node) if node.op != "get_attr" else tensor_of(graph, node)
            entry: Hashable = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        else:
            for read in node.all_input_nodes:
                bring(read)
            made = body.node_copy(node, lambda n: copied[n])
            entry = _entry(node, number)
        number[node] = len(number)
        key.append(entry)
        copied[node] = made
        return made

    for node in nodes:
        bring(node)
    body.output(tuple(copied[n] for n in writes))
    key.append(tuple(number[n] for n in writes))
    # Placeholders must come first in a graph.
    first = next(iter(body.nodes))
    for node in [n for n in body.nodes if n.op == "placeholder"]:
        if node is not first:
            first.prepend(node)
    ordered = [n for n in body.nodes if n.op == "placeholder"]
    by_name = {copied[n]: n for n in reads}
    return fx.GraphModule(torch.nn.Module(), body), [by_name[n] for n in ordered], tuple(key)


# --- transformations ------------------------------------------------------------------------------


def stack_equal(program: Program) -> Program:
    """Units of one step with equal keys become one batched call (`torch.vmap`). Tables are stacked
    now; weights and activations at every call, so that a changed weight is seen."""
    slots = program.slots
    constants = dict(program.constants)
    tables = set(program.tables)
    made: dict[Hashable, fx.GraphModule] = {}
    stacked_tables: dict[tuple[int, ...], int] = {}
    steps = []
    for step in program.steps:
        units: list[Unit] = []
        for members in group_equal([unit.key for unit in step]):
            group = [step[i] for i in members]
            if len(group) == 1 or group[0].graph is None:
                units.extend(group)
                continue
            kinds, reads = [], []
            for position in zip(*(u.reads for u in group), strict=True):
                if len(set(position)) == 1:
                    kinds.append("shared")
                    reads.append(position[0])
                elif all(slot in tables for slot in position):
                    kinds.append("table")
                    if position not in stacked_tables:
                        stacked_tables[position] = slots
                        constants[slots] = torch.stack([constants[s] for s in position])
                        tables.add(slots)
                        slots += 1
                    reads.append(stacked_tables[position])
                else:
                    kinds.append("each")
                    reads.extend(position)
            key = ("stack", len(group), tuple(kinds), group[0].key)
            if key not in made:
                made[key] = _stacked(group[0].graph, kinds, len(group))
            writes = [slot for per in zip(*(u.writes for u in group), strict=True) for slot in per]
            units.append(
                Unit(
                    run=made[key],
                    reads=tuple(reads),
                    writes=tuple(writes),
                    key=key,
                    name="+".join(u.name for u in group),
                    graph=made[key],
                    work=sum(u.work for u in group),
                    members=sum(u.members for u in group),
                )
            )
        steps.append(tuple(units))
    if not made:
        raise Refused("no two branches of a step are equal")
    return replace(
        program,
        slots=slots,
        constants=tuple(constants.items()),
        tables=frozenset(tables),
        steps=tuple(steps),
    )


def _stacked(graph: fx.GraphModule, kinds: Sequence[str], count: int) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes = [value(n) for n in graph.graph.nodes if n.op == "placeholder"]
    mode = next(f.fake_mode for f in fakes if hasattr(f, "fake_mode"))
    batched = torch.vmap(graph, in_dims=tuple(None if k == "shared" else 0 for k in kinds))

    def function(*flat: Tensor) -> tuple[Tensor, ...]:
        rest = iter(flat)
        taken = [
            torch.stack([next(rest) for _ in range(count)]) if kind == "each" else next(rest)
            for kind in kinds
        ]
        return tuple(part for out in batched(*taken) for part in out.unbind(0))

    with mode:
        # The tracer knows its inputs by identity, so every one needs to be a tensor of its own.
        examples: list[Tensor] = []
        for fake, kind in zip(fakes, kinds, strict=True):
            if kind == "table":
                examples.append(fake.new_empty((count, *fake.shape)))
            else:
                examples += [
                    torch.empty_strided(
                        fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device
                    )
                    for _ in range(count if kind == "each" else 1)
                ]
        try:
            with torch.no_grad():
                made = make_fx(torch.func.functionalize(function, remove="mutations"))(*examples)
        except TRACE_ERRORS as error:
            raise Refused(f"equal branches cannot be stacked ({error})") from error
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


def merge_single(program: Program) -> Program:
    """For one stream: pieces that occur once and follow each other become one. The compiler then
    sees across their borders, and has fewer to start with; pieces that occur again stay apart, to
    be compiled once for all, and so does what work ahead of time waits for."""
    occurs = Counter(unit.key for unit in program.units())
    awaited = {slot for _, unit in program.ahead for slot in unit.reads}
    runs: list[list[Unit]] = []
    starts: list[int] = []
    """For each step the first run that begins with it or later."""
    open_run = False
    for step in program.steps:
        for number, unit in enumerate(step):
            once = unit.graph is not None and occurs[unit.key] == 1
            if number == 0:
                starts.append(len(runs))
            if once and open_run:
                runs[-1].append(unit)
            else:
                runs.append([unit])
            open_run = once and awaited.isdisjoint(unit.writes)
    everyone = [*program.units(), *(unit for _, unit in program.ahead)]
    readers = Counter([*(s for unit in everyone for s in unit.reads), *program.outputs])
    return replace(
        program,
        steps=tuple((_merged(run, readers) if len(run) > 1 else run[0],) for run in runs),
        ahead=tuple((starts[start], unit) for start, unit in program.ahead),
    )


def _merged(run: Sequence[Unit], readers: Mapping[int, int]) -> Unit:
    """Units that follow each other as one; what nobody else reads stays inside."""
    body = fx.Graph()
    made: dict[int, fx.Node] = {}
    reads: list[int] = []
    inside: Counter[int] = Counter()
    given = [[n for n in _graph(u).graph.nodes if n.op == "placeholder"] for u in run]
    written: set[int] = set()
    for unit, placeholders in zip(run, given, strict=True):
        for slot, old in zip(unit.reads, placeholders, strict=True):
            inside[slot] += 1
            if slot not in written and slot not in made:
                made[slot] = body.placeholder(f"read{len(reads)}")
                made[slot].meta = dict(old.meta)
                reads.append(slot)
        written.update(unit.writes)
    for unit, placeholders in zip(run, given, strict=True):
        known = {old: made[slot] for slot, old in zip(unit.reads, placeholders, strict=True)}
        results: Any = body.graph_copy(_graph(unit).graph, known)
        made |= dict(zip(unit.writes, results, strict=True))
    writes = [s for unit in run for s in unit.writes if readers[s] > inside[s]]
    body.output(tuple(made[slot] for slot in writes))
    graph = fx.GraphModule(torch.nn.Module(), body)
    number = {slot: at for at, slot in enumerate(made)}
    wires = [tuple(number[slot] for slot in (*u.reads, *u.writes)) for u in run]
    return Unit(
        run=graph,
        reads=tuple(reads),
        writes=tuple(writes),
        key=("merged", *(u.key for u in run), *wires, *(number[slot] for slot in writes)),
        name="+".join(u.name for u in run),
        graph=graph,
        work=sum(u.work for u in run),
        members=sum(u.members for u in run),
    )


def _graph(unit: Unit) -> fx.GraphModule:
    assert unit.graph is not None
    return unit.graph


def to_compile(program: Program, compiled: Container[Hashable]) -> list[Hashable]:
    """The keys of the distinct units that are not compiled yet, most launches of a call first.
    Kernels of our own, and units of nothing but views, have nothing to compile."""
    launches: dict[Hashable, int] = {}
    for unit in program.in_line().units():
        if unit.graph is None or unit.work == 0 or unit.key in compiled:
            continue
        nodes = unit.graph.graph.nodes
        count = sum(n.op == "call_function" and not is_view(n) for n in nodes)
        launches[unit.key] = launches.get(unit.key, 0) + count
    return sorted(launches, key=lambda key: -launches[key])


def compile_units(
    program: Program, compiled: dict[Hashable, Run], at_most: int | None = None
) -> Program:
    """Every distinct unit through `torch.compile`, once: the loop's eight heads in six layers are
    a handful of bodies. `compiled` remembers them over calls. Of new ones `at_most` so many, those
    that save the most; the others run as they are."""
    wanted = set(to_compile(program, compiled)[:at_most]) | set(compiled)

    def unit(old: Unit) -> Unit:
        if old.graph is None or old.key not in wanted:
            return old
        if old.key not in compiled:
            compiled[old.key] = torch.compile(old.graph, dynamic=False, fullgraph=True)
        return replace(old, run=compiled[old.key])

    return replace(
        program,
        steps=tuple(tuple(unit(u) for u in step) for step in program.steps),
        ahead=tuple((start, unit(u)) for start, u in program.ahead),
    )
