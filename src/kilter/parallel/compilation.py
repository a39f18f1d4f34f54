"""Pieces that are compiled: which pieces, in which order, all before the first capture.

Our Triton kernels are compiled at their first launch, and `torch.compile` compiles at the first
call. Both spend most of their time outside the interpreter, so the kernels are launched once by
threads, on numbers of the right shapes, while this thread calls the compiled pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from kilter.observe.torch_internals.branches import propagate
from kilter.parallel.folding import is_view
from kilter.parallel.heads import FusedHeads
from kilter.parallel.program import BranchCall, BranchProgram, Unit
from kilter.parallel.timing import like
from kilter.parallel.trace import value

COMPILER_THREADS = 8
"""So many threads launch kernels to have them compiled."""

# --- which pieces ---------------------------------------------------------------------------------


def merge_single(program: BranchProgram) -> BranchProgram:
    """For one stream: pieces that occur once and follow each other become one piece. The compiler
    can then fuse across them and has fewer pieces to compile. Pieces that occur several times stay
    apart, because they are compiled once for all. A piece that work ahead of time waits for stays
    apart too."""
    occurs = Counter(unit.key for unit in program.units())
    awaited = {slot for _, unit in program.ahead for slot in unit.reads}
    runs: list[list[Unit]] = []
    starts: list[int] = []
    """For each step it has the first run that begins with it or later."""
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
    """Units that follow each other as one unit. Its results are those that others read."""
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


def with_body(unit: Unit, body: fx.Graph, compiled: Container[Any], key: Hashable) -> Unit:
    """A unit with other operations. One of `compiled` operations alone has nothing to compile."""
    body.eliminate_dead_code()
    graph = fx.GraphModule(torch.nn.Module(), body)
    rest = [n for n in body.nodes if n.op == "call_function" and not is_view(n)]
    whole = all(node.target in compiled for node in rest)
    return replace(unit, run=graph, graph=None if whole else graph, key=key)


def to_compile(program: BranchProgram, compiled: Container[Hashable]) -> list[Hashable]:
    """The keys of the distinct units that are not compiled yet, those with the most launches in a
    call first. Kernels of our own, and units of views alone, have nothing to compile."""
    launches: dict[Hashable, int] = {}
    for unit in program.in_line().units():
        if unit.graph is None or unit.work == 0 or unit.key in compiled:
            continue
        nodes = unit.graph.graph.nodes
        count = sum(n.op == "call_function" and not is_view(n) for n in nodes)
        launches[unit.key] = launches.get(unit.key, 0) + count
    return sorted(launches, key=lambda key: -launches[key])


def compile_units(
    program: BranchProgram, compiled: dict[Hashable, BranchCall], at_most: int | None = None
) -> BranchProgram:
    """Every distinct unit through `torch.compile`, once: eight heads in six layers are a handful of
    distinct units. `compiled` keeps them for later calls. At most `at_most` new units are compiled,
    those that save the most launches first; the others run as they are."""
    wanted = set(to_compile(program, compiled)[:at_most]) | set(compiled)

    def unit(old: Unit) -> Unit:
        if old.graph is None or old.key not in wanted:
            return old
        if old.key not in compiled:
            compiled[old.key] = torch.compile(old.graph, dynamic=False, fullgraph=True)
        return replace(old, run=compiled[old.key])

    ahead = tuple((start, unit(u)) for start, u in program.ahead)
    return replace(program.with_units(unit), ahead=ahead)


# --- before the first capture ---------------------------------------------------------------------


def beside_each_other(
    jobs: Iterable[Callable[[], Any]],
    device: torch.device,
    meanwhile: Callable[[], Any] = lambda: None,
) -> None:
    """Run `jobs` in threads and `meanwhile` in this one. Raises the first error of the jobs."""

    def run(job: Callable[[], Any]) -> None:
        on = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.no_grad(), on:
            job()

    with ThreadPoolExecutor(COMPILER_THREADS, thread_name_prefix="kilter-compile") as threads:
        running = [threads.submit(run, job) for job in jobs]
        meanwhile()
        for each in running:
            each.result()


def warm(
    program: BranchProgram,
    compiled: Mapping[Hashable, BranchCall],
    done: set[Hashable],
    device: torch.device,
) -> None:
    """Compile everything that a call of the program launches, except the units of `done`. The
    program's units are added to `done`."""
    units = {unit.key: unit for unit in program.in_line().units() if unit.key not in done}
    done.update(units)
    jobs: dict[Hashable, Callable[[], Any]] = {}
    for unit in units.values():
        jobs |= _kernels_of(unit, device)

    def pieces() -> None:
        for unit in units.values():
            if unit.graph is not None and compiled.get(unit.key) is unit.run:
                nodes = [n for n in unit.graph.graph.nodes if n.op == "placeholder"]
                unit.run(*(like(value(node), device) for node in nodes))

    beside_each_other(jobs.values(), device, pieces)


def _kernels_of(unit: Unit, device: torch.device) -> dict[Hashable, Callable[[], Any]]:
    """Launches of the kernels in a unit, each distinct kernel once."""
    if isinstance(unit.run, FusedHeads):
        return unit.run.launches()
    if not isinstance(unit.run, fx.GraphModule):
        return {}
    nodes = [n for n in unit.run.graph.nodes if str(n.target).startswith("kilter.")]
    if not nodes:
        return {}
    fakes = [value(n) for n in unit.run.graph.nodes if n.op == "placeholder"]
    propagate(unit.run, fakes)
    found: dict[Hashable, Callable[[], Any]] = {}
    for node in nodes:
        arguments = fx.map_arg(node.args, lambda n: like(value(n), device))
        kind = node.meta.get("kind") or str(fx.map_arg(node.args, _kind))
        found[node.target, kind] = partial(node.target, *arguments)
    return found


def _kind(node: fx.Node) -> Hashable:
    """What a kernel is compiled for: its dtype, and whether each size is 1 or a multiple of 16."""
    fake = value(node)
    return fake.dtype, tuple(size == 1 or size % 16 == 0 for size in fake.shape)
