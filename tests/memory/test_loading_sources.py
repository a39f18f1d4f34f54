"""A tensor that is recomputed from one whose bytes are just coming back is evicted as planned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kilter.memory.engine import CpuStandIn, Swapper, pass_kinds
from kilter.memory.plan.choose import MemoryPlan, described
from kilter.memory.plan.problem import Link, Problem
from kilter.memory.plan.simulate import Move, Schedule, simulate

pytestmark = pytest.mark.usefixtures("recorder")

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
SIZE_BYTES = 4 * 64 * 64
LAYERS = 16


HELD, UNTIL = 4, 10
"""What the first of these layers is given is held by the program until the second one."""


def forced(problem: Problem, planner: str) -> MemoryPlan:
    """What the held tensor is made of leaves at once, and comes back before the program lets go of
    that one, which is recomputed."""
    del planner
    source, made = HELD - 1, HELD
    assert problem.intervals[made].needs == (source,)
    after = problem.intervals[source].after
    assert after + 4 < problem.intervals[made].after
    moves = (Move(source, release=after + 2, load=after + 4),)
    schedule = Schedule(moves=moves, recomputed=(made,))
    return described(problem, schedule, simulate(problem, schedule), planner="mix")


def test_what_is_made_from_a_tensor_that_comes_back_leaves_as_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64))
    swapper = Swapper(
        CpuStandIn(spoil=True), budget_bytes=LAYERS * SIZE_BYTES, link=LINK, min_bytes=2048
    )
    monkeypatch.setattr(pass_kinds, "plan", forced)

    def step() -> Tensor:
        found, held = weight.exp(), None
        for layer in range(LAYERS):
            held = found if layer == HELD else None if layer == UNTIL else held
            found = found.sin()
        assert held is None
        found.sum().backward()
        grad, weight.grad = weight.grad, None
        assert grad is not None
        return grad

    plain = step()
    with swapper:
        grads = [step() for _ in range(12)]
        (kind,) = swapper._kinds
    assert all(torch.equal(grad, plain) for grad in grads)
    assert swapper.report().planned > 0
    assert kind.plan is not None
    assert 0 < kind.plan.use.peak_bytes <= kind.plan.value.peak_bytes
