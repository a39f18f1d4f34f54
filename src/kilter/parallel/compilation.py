"""What a program has to have compiled, compiled beside each other before it is captured.

Kernels of ours are compiled at their first launch, `torch.compile` at its first call, each while
everything else waits. Most of the time of both is spent outside the interpreter, so the kernels are
launched once by threads, on numbers of the right shapes, while this thread calls the compiled
pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from kilter.act.branches.fused import FusedHeads
from kilter.act.branches.program import Program, Run, Unit
from kilter.act.branches.tracing import value

THREADS = 8


def like(fake: Tensor, device: torch.device) -> Tensor:
    """Numbers in a tensor's shape, strides and dtype, without drawing from anybody's generator; an
    index among them is a right one."""
    count = 1 + sum((n - 1) * step for n, step in zip(fake.shape, fake.stride(), strict=True))
    if fake.numel() == 0 or not fake.is_floating_point():
        numbers = torch.zeros(max(count, 1), dtype=fake.dtype, device=device)
    else:
        numbers = torch.linspace(0.1, 1.0, count, device=device).to(fake.dtype)
    return numbers.as_strided(fake.shape, fake.stride())


def beside_each_other(
    jobs: Iterable[Callable[[], Any]],
    device: torch.device,
    meanwhile: Callable[[], Any] = lambda: None,
) -> None:
    """Run jobs in threads and something else in this one; raises what the first of them raises."""

    def run(job: Callable[[], Any]) -> None:
        on = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.no_grad(), on:
            job()

    with ThreadPoolExecutor(THREADS, thread_name_prefix="kilter-compile") as threads:
        running = [threads.submit(run, job) for job in jobs]
        meanwhile()
        for each in running:
            each.result()


def warm(
    program: Program, compiled: Mapping[Hashable, Run], done: set[Hashable], device: torch.device
) -> None:
    """Compile everything that a call of the program launches, but for the units of `done`, to which
    the program's are added."""
    units = {unit.key: unit for unit in program.in_line().units() if unit.key not in done}
    done.update(units)
    jobs: dict[Hashable, Callable[[], Any]] = {}
    for unit in units.values():
        jobs |= _kernels_of(unit, device)

    def pieces() -> None:
        for unit in units.values():
            if unit.graph is not None and compiled.get(unit.key) is unit.run:
                unit.run(*_examples(unit.graph, device))

    beside_each_other(jobs.values(), device, pieces)


def _examples(graph: fx.GraphModule, device: torch.device) -> list[Tensor]:
    return [like(value(n), device) for n in graph.graph.nodes if n.op == "placeholder"]


def _kernels_of(unit: Unit, device: torch.device) -> dict[Hashable, Callable[[], Any]]:
    """Launches of the kernels in a unit, each distinct one once."""
    if isinstance(unit.run, FusedHeads):
        return unit.run.launches()
    if not isinstance(unit.run, fx.GraphModule):
        return {}
    nodes = [n for n in unit.run.graph.nodes if str(n.target).startswith("kilter.")]
    if not nodes:
        return {}
    fakes = [value(n) for n in unit.run.graph.nodes if n.op == "placeholder"]
    FakeTensorProp(unit.run, fakes[0].fake_mode).propagate_dont_convert_inputs(*fakes)
    found: dict[Hashable, Callable[[], Any]] = {}
    for node in nodes:
        arguments = fx.map_arg(node.args, lambda n: like(value(n), device))
        kind = node.meta.get("kind") or str(fx.map_arg(node.args, _kind))
        found[node.target, kind] = partial(node.target, *arguments)
    return found


def _kind(node: fx.Node) -> Hashable:
    """What a kernel is compiled for: only whether a size is one, or can be divided by 16."""
    fake = value(node)
    return fake.dtype, tuple(size == 1 or size % 16 == 0 for size in fake.shape)
