"""On demand, data leave early enough for what an operation takes at one go."""

from __future__ import annotations

import torch
from torch import nn

from kilter.act.swapper import CpuStandIn, Swapper
from kilter.plan.swap.problem import Link

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
SURGE_BYTES = 6000
BUDGET_BYTES = 20_000


class Weighed(CpuStandIn):
    """Tells what saved data take, as a device's allocator would, and one surge in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.swapper: Swapper | None = None
        self.most_bytes = 0

    def used_bytes(self) -> int:
        assert self.swapper is not None
        return self.swapper._store.held_bytes

    def peak_bytes(self) -> int:
        used_bytes = self.used_bytes()
        self.most_bytes = max(self.most_bytes, used_bytes)
        return used_bytes + SURGE_BYTES


def test_room_is_left_for_surges() -> None:
    backend = Weighed()
    swapper = backend.swapper = Swapper(
        backend, budget_bytes=BUDGET_BYTES, link=LINK, min_bytes=256
    )
    swapper.may_plan = False
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.GELU())))
    size_bytes = 16 * 32 * 4
    with swapper:
        for share in (0.6, None, (BUDGET_BYTES - SURGE_BYTES) / BUDGET_BYTES):
            backend.most_bytes = 0
            net(torch.randn(16, 32)).square().mean().backward()
            if share is None:  # a pass that is only timed
                continue
            assert share * BUDGET_BYTES - size_bytes <= backend.most_bytes
            assert backend.most_bytes <= share * BUDGET_BYTES + 2 * size_bytes
