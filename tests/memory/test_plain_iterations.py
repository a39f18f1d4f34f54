"""Iterations without the engine, with which plans are compared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kilter.memory.budget import PLAIN, PlainIterations
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.saved_hooks import innermost_are_ours
from kilter.memory.iteration_times import IterationTimes
from kilter.memory.plan.problem import H200_PCIE5


def test_as_many_as_are_asked_for() -> None:
    model = nn.Linear(4, 1)
    swapper = Swapper(CpuStandIn(), budget_bytes=2**40, link=H200_PCIE5)
    plain = PlainIterations(swapper, torch.device("cpu"), None, IterationTimes())
    with swapper:
        found = []
        for _ in range(PLAIN + 1):
            found.append((plain.over(), innermost_are_ours()))
            model(torch.ones(1, 4)).sum().backward()
        assert found == [(False, False)] * PLAIN + [(True, True)]


class Alarm(Exception):
    """A signal handler of the program raises it, between two lines of ours."""


@pytest.mark.parametrize("call", ["exit", "step_in"])
def test_an_alarm_in_between_leaves_no_hooks_too_few_or_too_many(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper = Swapper(CpuStandIn(), budget_bytes=2**40, link=H200_PCIE5)
    plain = PlainIterations(swapper, torch.device("cpu"), None, IterationTimes())

    def ring() -> None:
        monkeypatch.undo()
        raise Alarm

    assert not innermost_are_ours()
    with swapper:
        monkeypatch.setattr(swapper.hooks, call, ring)
        rang = 0
        for _ in range(PLAIN + 2):
            try:
                plain.over()
            except Alarm:
                rang += 1
        assert rang == 1
        assert plain.over()
        assert innermost_are_ours()
        plain.end()
    assert not innermost_are_ours()
