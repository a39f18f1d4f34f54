"""Weights leave where activations and all state do not meet the budget, and only there."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from kilter.core.units import MIB
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.plan.problem import H200_PCIE5
from kilter.memory.state_and_weights import StateAndWeightPolicy, words
from kilter.session.fence import Fence


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    """Weights stay in a process that compiles, and other tests do."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:
        compiler.counters.clear()


WIDTH = 256
LAYERS = 12
CLASSES = 256
WEIGHT_BYTES = 4 * WIDTH * (WIDTH * LAYERS + CLASSES)
LOSS_BYTES = 4 * 64 * 64 * CLASSES
"""What the end of forward takes beside weights, and nobody can move."""


class Weighed(CpuStandIn):
    """Tells what saved data, optimizer state and weights take, as a device's allocator would."""

    def __init__(self) -> None:
        super().__init__()
        self.swapper: Any = None
        self.floor: Any = None
        self.most_bytes = 0

    def govern(self, swapper: Swapper, floor: StateAndWeightPolicy) -> None:
        self.swapper, self.floor = swapper, floor

    def holds(self, saved_bytes: int) -> None:
        self.used_bytes()

    def used_bytes(self) -> int:
        mover = self.floor and self.floor.mover
        weights = self.floor and self.floor.weights.mover
        state_bytes = mover._stream.held_bytes if mover else 2 * WEIGHT_BYTES
        weight_bytes = WEIGHT_BYTES - (weights._store.offloaded_bytes if weights else 0)
        store = self.swapper._store
        used_bytes = int(
            weight_bytes + state_bytes + store.counts.held_bytes + store.counts.beside_bytes
        )
        self.most_bytes = max(self.most_bytes, used_bytes)
        return used_bytes

    def peak_bytes(self) -> int:
        used_bytes = self.used_bytes()
        peak_bytes, self.most_bytes = self.most_bytes, used_bytes
        return peak_bytes


def fail(where: str, error: str) -> None:
    raise AssertionError(f"{where}: {error}")


def train(
    steps: int,
    budget_bytes: int | None = None,
    autocast: bool = False,
    weights: str = "offload",
) -> tuple[list[bytes], StateAndWeightPolicy | None, Swapper | None]:
    """A training under a swapper and a floor, or plain."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)),
        nn.Linear(WIDTH, CLASSES),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(64, WIDTH)).repeat(64, 1).float().softmax(-1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().numpy().tobytes())

    fence = Fence(fail)
    made = swapper = None
    if budget_bytes is None:
        for _ in range(steps):
            step()
    else:
        backend = Weighed()
        swapper = Swapper(backend, budget_bytes=budget_bytes, link=H200_PCIE5, min_bytes=1024)
        made = StateAndWeightPolicy(
            swapper, CpuStandIn, H200_PCIE5, fence, weights=weights, min_bytes=1024
        )
        backend.govern(swapper, made)
        with swapper:
            made.begin(0, budget_bytes)
            iteration_ended = register_optimizer_step_post_hook(  # where a session tells it
                lambda *_: made.iteration_ended(swapper.report(), budget_bytes, float(len(losses)))
            )
            for _ in range(steps):
                step()
            iteration_ended.remove()
            made.close()
    assert not fence.down
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return losses + [p.detach().numpy().tobytes() for p in model.parameters()], made, swapper


STEPS = 60
"""Enough for plans of state, then of weights, and more than 20 passes under them."""


@cache
def plain(steps: int, autocast: bool = False) -> list[bytes]:
    return train(steps, autocast=autocast)[0]


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_go_where_all_state_is_not_enough(autocast: bool) -> None:
    budget_bytes = WEIGHT_BYTES + LOSS_BYTES - MIB  # 1 MiB below what all else can give
    steps = 40 if autocast else STEPS  # bfloat16 is slow on a CPU
    values, made, swapper = train(steps, budget_bytes, autocast)
    assert values == plain(steps, autocast)
    assert made is not None
    assert swapper is not None
    weights = made.weights.report
    assert weights is not None
    assert weights.moving
    assert weights.offloaded_bytes >= MIB // 2
    assert made.report is not None
    assert "of weights are on the host between forward and backward" in words(made.report, weights)
    assert made.settled
    assert weights.late == 0
    report = swapper.report()
    assert report.planned > steps - 36
    assert report.late == report.deviations == 0
    assert max(report.peaks_bytes[-2:]) <= budget_bytes


def test_weights_stay_where_state_is_enough() -> None:
    values, made, _ = train(STEPS, 2 * WEIGHT_BYTES + LOSS_BYTES)
    assert values == plain(STEPS)
    assert made is not None
    assert made.weights.report is None
    assert made.settled


def test_weights_stay_unless_they_are_allowed_to_leave() -> None:
    values, made, _ = train(STEPS, WEIGHT_BYTES + LOSS_BYTES - MIB, weights="keep")
    assert values == plain(STEPS)
    assert made is not None
    assert made.weights.report is None
    assert made.weights.kept
    assert made.settled


def test_weights_that_nobody_needs_room_from_are_not_spoken_of() -> None:
    _, made, _ = train(STEPS, 2 * WEIGHT_BYTES + LOSS_BYTES, weights="keep")
    assert made is not None
    assert not made.weights.kept
