"""Iterations without the engine, with which plans are compared: they end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from kilter.memory.budget import MOST_STEPS, PLAIN, PlainIterations
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.saved_hooks import innermost_are_ours
from kilter.memory.iteration_times import IterationTimes
from kilter.memory.plan.problem import H200_PCIE5
from kilter.session.fence import Fence


def fail(where: str, error: str) -> None:
    raise AssertionError(f"{where}: {error}")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_they_end_where_iterations_end_in_another_thread() -> None:
    """As where two threads train, and the one with the engine is always ahead."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    swapper = Swapper(CpuStandIn(), budget_bytes=2**40, link=H200_PCIE5)
    plain = PlainIterations(swapper, torch.device("cpu"), None, IterationTimes(), Fence(fail))
    with swapper, ThreadPoolExecutor(1) as other:
        assert not plain.over()
        assert not innermost_are_ours()
        for _ in range(MOST_STEPS):
            assert not other.submit(plain.over).result()
            step(model, optimizer)
        assert innermost_are_ours()
        assert other.submit(plain.over).result()
        plain.end()
        assert innermost_are_ours()


def test_as_many_as_are_asked_for() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    swapper = Swapper(CpuStandIn(), budget_bytes=2**40, link=H200_PCIE5)
    plain = PlainIterations(swapper, torch.device("cpu"), None, IterationTimes(), Fence(fail))
    with swapper:
        found = []
        for _ in range(PLAIN + 1):
            found.append((plain.over(), innermost_are_ours()))
            step(model, optimizer)
        assert found == [(False, False)] * PLAIN + [(True, True)]
