"""How long a call and how long each unit takes, on the device itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kilter.parallel.capture import Captured, GraphPool, Turns
from kilter.parallel.program import BranchProgram, Unit, arguments, store

LONGEST_S = 0.3
"""So much time is spent on timing one candidate."""


def median_seconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Median time of each call, from as many of each as fit into `LONGEST_S` (3 to 50). Several
    calls take turns, so that other work on the machine slows them all alike."""
    warm_up = [min(_once(call, device) for _ in range(2)) for call in calls]
    count = max(3, min(50, int(LONGEST_S * len(calls) / max(sum(warm_up), 1e-6))))
    rounds = [[_once(call, device) for call in calls] for _ in range(count)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


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
    program: BranchProgram, inputs: Sequence[Tensor], device: torch.device
) -> dict[Hashable, float]:
    """The time of each distinct unit that has siblings, measured alone. On a GPU it is measured
    inside a graph: the eager time of a small unit is the time of its launches."""
    calls: dict[Hashable, tuple[Unit, list[Any]]] = {}

    def remember(index: int, program: BranchProgram, environment: list[Tensor | None]) -> None:
        for unit in program.steps[index]:
            given = arguments(unit, environment)
            if len(program.steps[index]) > 1:
                calls.setdefault(unit.key, (unit, given))
            store(unit, unit.run(*given), environment)

    program.in_line().execute(inputs, remember)
    seconds: dict[Hashable, float] = {}
    for key, (unit, given) in calls.items():
        call = partial(unit.run, *given)
        on_gpu = device.type == "cuda" and not unit.opaque
        seconds[key] = graph_seconds(call, device) if on_gpu else median_seconds([call], device)[0]
    return seconds


def graph_seconds(call: Callable[[], Any], device: torch.device, *, times: int = 1) -> float:
    """The time of `times` calls inside a graph, one after the other, without their launches."""

    def step(_: Sequence[Tensor]) -> list[Tensor]:
        for _number in range(times):
            call()
        return []

    captured = Captured(step, [], device, pool=GraphPool(), turns=Turns())
    try:
        return min(_once(lambda: captured([]), device) for _ in range(10))
    finally:
        captured.release()


def like(fake: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape, strides and dtype, filled without a random generator. Integers
    are zero, so that they are valid as an index."""
    count = 1 + sum((n - 1) * step for n, step in zip(fake.shape, fake.stride(), strict=True))
    if fake.numel() == 0 or not fake.is_floating_point():
        numbers = torch.zeros(max(count, 1), dtype=fake.dtype, device=device)
    else:
        numbers = torch.linspace(0.1, 1.0, count, device=device).to(fake.dtype)
    return numbers.as_strided(fake.shape, fake.stride())
