"""How long a call and how long each unit takes, on the device itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kilter.act.branches.program import Program, Unit, store

LONGEST_S = 0.3
"""Time spent on timing one candidate."""


def median_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call, of as many calls as fit into `LONGEST_S` (3 to 50)."""
    first = _once(call, device)
    _once(call, device)
    count = max(3, min(50, int(LONGEST_S / max(first, 1e-6))))
    return statistics.median(_once(call, device) for _ in range(count))


def _once(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def unit_seconds(
    program: Program, inputs: Sequence[Tensor], device: torch.device
) -> dict[Hashable, float]:
    """The time of each distinct unit that has siblings, alone; on a GPU inside a graph, since the
    eager time of a small unit is the time of its launches."""
    arguments: dict[Hashable, tuple[Unit, list[Any]]] = {}

    def remember(index: int, program: Program, environment: list[Tensor | None]) -> None:
        for unit in program.steps[index]:
            given = program.arguments(unit, environment)
            if len(program.steps[index]) > 1:
                arguments.setdefault(unit.key, (unit, given))
            store(unit, unit.run(*given), environment)

    program.in_line().execute(inputs, remember)
    seconds: dict[Hashable, float] = {}
    for key, (unit, given) in arguments.items():
        call = partial(unit.run, *given)
        on_gpu = device.type == "cuda" and not unit.opaque
        seconds[key] = graph_seconds(call, device) if on_gpu else median_seconds(call, device)
    return seconds


def graph_seconds(call: Callable[[], Any], device: torch.device, *, times: int = 1) -> float:
    """The time of so many calls inside a graph, one after the other, without launches from here."""
    from kilter.act.branches.capture import Captured, Turns

    def step(_: Sequence[Tensor]) -> list[Tensor]:
        for _number in range(times):
            call()
        return []

    pool = torch.cuda.graph_pool_handle()
    captured = Captured(step, [], device, pool=pool, turns=Turns())
    try:
        return min(_once(lambda: captured([]), device) for _ in range(10))
    finally:
        captured.release()
