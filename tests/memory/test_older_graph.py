"""A generator whose graph is made before the critic's step, as in DCGAN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.plan.problem import Link

WIDTH, ROWS = 32, 128
DATUM_BYTES = 4 * WIDTH * ROWS
BLOCKS = 8
LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)


class Weighed(CpuStandIn):
    """Notes what saved tensors take."""

    def __init__(self) -> None:
        super().__init__(spoil=True)
        self.most_bytes = 0

    def holds(self, held_bytes: int) -> None:
        self.most_bytes = max(self.most_bytes, held_bytes)


def network() -> nn.Sequential:
    blocks = [
        layer
        for _ in range(BLOCKS)
        for layer in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
    ]
    return nn.Sequential(*blocks)


def iteration(
    critic: nn.Module, generator: nn.Module, optimizers: list[Any], number: int
) -> list[Tensor]:
    """The critic's passes begin alike. The last one goes on through the generator's graph, which
    was made before the critic has stepped."""
    torch.manual_seed(number)
    real = critic(torch.randn(ROWS, WIDTH)).square().mean()
    real.backward()
    made = generator(torch.randn(ROWS, WIDTH))
    fake = critic(made.detach()).mean()
    fake.backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    loss = -critic(made).mean()
    loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    return [real.detach(), fake.detach(), loss.detach()]


def trained(iterations: int, backend: Weighed | None = None) -> tuple[list[Tensor], list[int]]:
    """Losses and parameters; what each iteration took."""
    torch.manual_seed(0)
    models = network(), network()
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    found, most_bytes = list[Tensor](), list[int]()
    for number in range(iterations):
        found += iteration(*models, optimizers, number)
        if backend is not None:
            most_bytes.append(backend.most_bytes)
            backend.most_bytes = 0
    return [*found, *(p.detach() for model in models for p in model.parameters())], most_bytes


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize(
    ("share", "beyond_bytes"),
    [(0.5, 2 * DATUM_BYTES), (0.6, 0)],
    ids=["below what operations need", "met"],
)
def test_no_plan_of_a_pass_without_that_graph_is_taken_for_one_beside_it(
    share: float, beyond_bytes: int
) -> None:
    plain, _ = trained(12)
    backend, budget_bytes = Weighed(), int(share * 6 * BLOCKS) * DATUM_BYTES
    with Swapper(backend, budget_bytes=budget_bytes, link=LINK, min_bytes=DATUM_BYTES) as swapper:
        governed, most_bytes = trained(12, backend)
        report = swapper.report()
    assert all(map(torch.equal, plain, governed))
    assert report.planned
    assert max(most_bytes) <= budget_bytes + beyond_bytes
