"""Gradients consumed and optimizer state streamed on a real GPU: plain's numbers, less memory."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kilter.core.units import MIB
from kilter.memory.engine import Swapper
from kilter.memory.engine.cuda import Cuda
from kilter.memory.engine.state import StateMover, StateReport
from kilter.memory.plan.problem import Link
from kilter.memory.state_and_weights import StateAndWeightPolicy
from kilter.session.fence import Fence

pytestmark = pytest.mark.gpu

PCIE = Link(to_host_bytes_per_s=5e10, to_device_bytes_per_s=5e10, both_bytes_per_s=9e10)
WIDTH, LAYERS = 1024, 12


def fail(where: str, error: str) -> None:
    raise AssertionError(f"{where}: {error}")


def trained(**options: Any) -> tuple[list[torch.Tensor], int, StateReport | None]:
    """Parameters and state after ten steps, and what the device held before the last forward."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def steps(count: int) -> None:
        for _ in range(count):
            net(torch.randn(256, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = None
    if options:
        mover = StateMover(Cuda.open(), link=PCIE, bucket_bytes=4 * MIB, **options)
        with mover:
            steps(9)
            held_bytes = torch.cuda.memory_allocated()
            steps(1)
            report = mover.report()
    else:
        steps(9)
        held_bytes = torch.cuda.memory_allocated()
        steps(1)
    found = [p.detach().cpu() for p in net.parameters()]
    for p in net.parameters():
        found += [value.cpu() for _, value in sorted(optimizer.state[p].items())]
    return found, held_bytes, report


@pytest.mark.parametrize("gradients", ["consume", "keep"])
@pytest.mark.parametrize("room_mib", [None, 40, 10])
def test_same_numbers_in_less_memory(gradients: str, room_mib: int | None) -> None:
    plain, plain_bytes, _ = trained()
    room_bytes = None if room_mib is None else room_mib * MIB
    ours, held_bytes, report = trained(gradients=gradients, room_bytes=room_bytes)
    assert all(map(torch.equal, plain, ours))
    assert report is not None
    assert report.late == 0
    assert report.consuming == (gradients == "consume")
    if room_mib is not None:
        assert report.state_bytes <= room_mib * MIB
        assert plain_bytes - held_bytes >= 0.9 * report.offloaded_bytes


def test_state_streams_beside_feature_maps() -> None:
    """144 MiB of weights and state and what an operation needs beside them do not fit 224 MiB."""

    def train(
        budget_bytes: int | None,
    ) -> tuple[list[torch.Tensor], StateAndWeightPolicy | None, Swapper | None]:
        torch.manual_seed(0)
        with torch.device("cuda"):
            net = nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
            )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        floor = swapper = None
        with ExitStack() as stack:
            if budget_bytes is not None:
                swapper = Swapper(Cuda.open(), budget_bytes=budget_bytes, link=PCIE)
                floor = StateAndWeightPolicy(swapper, Cuda.open, PCIE, Fence(fail), "consume")
                stack.enter_context(swapper)
                stack.callback(floor.close)
            for _ in range(40):
                net(torch.randn(4096, WIDTH, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if floor is not None and swapper is not None and budget_bytes is not None:
                    floor.iteration_ended(swapper.report(), budget_bytes, time.perf_counter())
        return [p.detach().cpu() for p in net.parameters()], floor, swapper

    budget_bytes = 224 * MIB
    ours, floor, swapper = train(budget_bytes)
    assert floor is not None
    assert swapper is not None
    assert floor.settled
    assert floor.report is not None
    assert floor.report.consuming
    assert floor.report.offloaded_bytes > 0
    report = swapper.report()
    assert report.planned > 10
    assert report.late == report.deviations == 0
    assert report.peaks_bytes[-1] <= budget_bytes
    plain, _, _ = train(None)
    assert all(map(torch.equal, plain, ours))
