"""Below what feature maps can give: gradients first, then so much optimizer state as is missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kilter.act.fence import Fence
from kilter.act.floor import Floor, words
from kilter.act.swapper import CpuStandIn
from kilter.core.units import MIB
from kilter.plan.swap.problem import H200_PCIE5

WIDTH = 256


class Plans:
    """What the floor needs of a swapper."""

    def __init__(self) -> None:
        self.forgotten = 0

    def before_update(self, parameters: Iterable[torch.Tensor]) -> None:
        """Nothing is owed."""

    def forget(self) -> None:
        self.forgotten += 1


def fail(where: str, error: str) -> None:
    raise AssertionError(f"{where}: {error}")


def train(steps: int, floor: Floor | None = None, missing: Iterable[int] = ()) -> list[bytes]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rest = iter(missing)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().numpy().tobytes())
        if floor is not None:
            floor.border()
            missing_bytes = next(rest, 0)
            if missing_bytes:
                floor.lower(missing_bytes, 1e-3)
    return losses + [p.detach().numpy().tobytes() for p in model.parameters()]


def floor(plans: Any) -> Floor:
    return Floor(plans, CpuStandIn, H200_PCIE5, Fence(fail))


def test_gradients_go_first_and_that_may_be_enough() -> None:
    plans = Plans()
    made = floor(plans)
    assert train(26, made, [MIB] * 6) == train(26)
    report = made.report
    assert report is not None
    assert report.consuming
    assert report.away_bytes == 0
    assert plans.forgotten > 0
    assert words(report).startswith("gradients are used up as they arrive")
    made.close()


def test_so_much_state_goes_as_is_missing() -> None:
    made = floor(Plans())
    assert train(30, made, [MIB] * 30) == train(30)
    report = made.report
    assert report is not None
    assert made.room_bytes is not None
    assert report.state_bytes <= made.room_bytes
    assert report.away_bytes >= MIB
    assert "of optimizer state wait on the host" in words(report)
    made.close()
    assert train(3) == train(3)
