"""Python's collector: off while a forward runs, on again whatever happens then."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from kilter.memory.engine import CpuStandIn, Swapper, pass_kinds
from kilter.memory.plan.problem import Link

FAST = Link(to_host_bytes_per_s=1e14, to_device_bytes_per_s=1e14, both_bytes_per_s=2e14)


def collects() -> bool:
    return gc.isenabled() and gc.get_threshold()[0] < 10**6


class Probe(nn.Module):
    """What the program's own forward sees; it may also fail."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(collects())
        if self.fails:
            raise ValueError("the program's own")
        return x


class Loop:
    """A training loop under a budget that needs a plan."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.probe = Probe()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
        self.net = nn.Sequential(*layers[:3], self.probe, *layers[3:])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.swapper = Swapper(CpuStandIn(), budget_bytes=120_000, link=FAST, min_bytes=256)

    def forward(self) -> torch.Tensor:
        return self.net(torch.randn(64, 64)).square().mean()

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop()
    with found.swapper:
        for _ in range(8):
            found.step()
        assert found.swapper.report().planned >= 2
        yield found
    assert collects()


def test_it_waits_for_the_end_of_the_pass(loop: Loop) -> None:
    loop.probe.seen.clear()
    value = loop.forward()
    assert loop.probe.seen == [False]
    value.backward()
    assert collects()


def test_it_does_not_run_while_a_plan_is_made(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plan = list[bool](), pass_kinds.plan

    def planning(*args: Any, **options: Any) -> Any:
        seen.append(collects())
        return plan(*args, **options)

    monkeypatch.setattr(pass_kinds, "plan", planning)
    loop.swapper.limit(110_000)  # plan anew
    loop.step()
    assert seen == [False]
    assert collects()


def test_a_forward_that_fails_leaves_it_on(loop: Loop) -> None:
    loop.probe.fails = True
    with pytest.raises(ValueError, match="the program's own"):
        loop.forward()
    assert collects()


def test_a_forward_without_backward_leaves_it_on(loop: Loop) -> None:
    value = loop.forward()
    del value
    assert collects()


def test_what_is_never_used_does_not_keep_it_off(loop: Loop) -> None:
    beside = loop.net[0](torch.randn(64, 64))
    loop.step()
    assert collects()
    del beside


def test_a_pass_that_goes_another_way_has_it_on(loop: Loop) -> None:
    loop.net[0](torch.randn(64, 64)).exp().sum()
    assert collects()


def test_who_switched_it_off_finds_it_off(loop: Loop) -> None:
    gc.disable()
    try:
        loop.step()
        assert not gc.isenabled()
    finally:
        gc.enable()
