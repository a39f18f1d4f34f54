"""Host memory stays bounded where shapes change, and within its limit the job goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from tests.memory.steady_stand_in import SteadyStandIn
from torch import nn

from kilter.memory.engine import Swapper, SwapReport
from kilter.memory.host_memory import HostLimit
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=1e14, to_device_bytes_per_s=1e14, both_bytes_per_s=2e14)
WIDTH, LAYERS = 16, 6


class Scale(nn.Module):
    """A layer that, unlike a matrix product, costs no time for each new shape on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def lengths(count: int) -> Iterator[int]:
    chance = random.Random(0)
    return (chance.randint(16, 512) for _ in range(count))


def trained(
    rows: Iterator[int], budget_bytes: int | None, limit: HostLimit | None = None
) -> tuple[list[float], SwapReport | None]:
    """Losses of a job, and what the engine did, if there is a budget."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(Scale(), nn.SiLU()) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []

    def run() -> None:
        for count in rows:
            loss = net(torch.randn(count, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    if budget_bytes is None:
        run()
        return losses, None
    backend = SteadyStandIn(host=limit, spoil=True)
    with Swapper(backend, budget_bytes=budget_bytes, link=LINK, min_bytes=256) as swapper:
        run()
        report = swapper.report()
    return losses, report


def test_host_memory_is_bounded_where_lengths_vary() -> None:
    plain, _ = trained(lengths(400), None)
    losses, report = trained(lengths(400), 16 * WIDTH * 4)
    assert report is not None
    assert losses == plain
    assert report.spilled > 1000
    # Twice what one pass of the greatest length keeps: the last piece is larger than was asked for,
    # and parts that are free may be scattered.
    largest_bytes = 2 * LAYERS * 512 * WIDTH * 4
    assert report.host_bytes <= 2 * largest_bytes


@pytest.mark.parametrize("rows", [[256] * 24, list(lengths(40))])
@pytest.mark.parametrize("limit_bytes", [0, 5000, 3 * 256 * WIDTH * 4])
def test_within_the_limit_data_stay_or_are_recomputed(rows: list[int], limit_bytes: int) -> None:
    plain, _ = trained(iter(rows), None)
    limit = HostLimit(limit_bytes)
    losses, report = trained(iter(rows), 8 * 256 * WIDTH * 4, limit)
    assert report is not None
    assert losses == plain
    assert report.host_bytes <= limit_bytes
    assert limit.taken_bytes == 0  # all of it is given back at the end
    (reason,) = {str(reason) for reason in report.refused if reason.code == "host_memory"}
    assert "--host-memory" in reason
    assert "stays on the device or is recomputed" in reason


def test_a_plan_uses_what_the_limit_leaves() -> None:
    """Of what could go to the host some may; the plan meets the budget with that and recompute."""
    rows, limit_bytes = [256] * 24, 3 * 256 * WIDTH * 4
    _, free = trained(iter(rows), 8 * 256 * WIDTH * 4)
    _, bound = trained(iter(rows), 8 * 256 * WIDTH * 4, HostLimit(limit_bytes))
    assert free is not None
    assert bound is not None
    assert free.plans[0].host_bytes > limit_bytes
    assert 0 < bound.plans[0].host_bytes <= limit_bytes
    assert bound.plans[0].feasible
    assert bound.plans[0].recomputed > free.plans[0].recomputed
