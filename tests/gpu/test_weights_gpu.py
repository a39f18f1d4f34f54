"""Weights that come and go on a real GPU: plain's numbers in less memory, and what ends it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kilter.core.units import MIB
from kilter.memory.engine.cuda import Cuda
from kilter.memory.engine.state import StateMover
from kilter.memory.engine.weights import WeightMover, WeightReport
from kilter.memory.plan.problem import Link

pytestmark = pytest.mark.gpu

PCIE = Link(to_host_bytes_per_s=50e9, to_device_bytes_per_s=50e9, both_bytes_per_s=90e9)
WIDTH = 1024
LAYERS = 8
STEPS = 12
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def network() -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
        )


def mover(**options: Any) -> WeightMover:
    return WeightMover(Cuda.open(), link=PCIE, **options)


def away(net: nn.Module) -> int:
    return sum(type(p) is not nn.Parameter for p in net.parameters())


def trained(
    governed: WeightMover | None = None, *, autocast: bool = True, consume: bool = False
) -> tuple[list[torch.Tensor], int, WeightReport | None]:
    """Losses and all that was learned; what is allocated at the end of forward."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    found: list[torch.Tensor] = []
    held_bytes = 0
    report = None
    before = governed.before_update if governed else None
    state = StateMover(Cuda.open(), link=PCIE, gradients="consume", before_update=before)
    with state if consume else nullcontext(), governed or nullcontext():
        for number in range(STEPS):
            torch.manual_seed(number)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = net(torch.randn(64, WIDTH, device="cuda")).float().square().mean()
            held_bytes = torch.cuda.memory_allocated()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
        if governed is not None:
            report = governed.report()
    for p in net.parameters():
        found += [p.detach().cpu(), *(v.cpu() for v in optimizer.state[p].values())]
    return found, held_bytes, report


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("consume", [True, False])
def test_same_numbers_in_less_memory(autocast: bool, consume: bool) -> None:
    plain, plain_bytes, _ = trained(autocast=autocast)
    ours, held_bytes, report = trained(mover(), autocast=autocast, consume=consume)
    assert all(map(torch.equal, plain, ours))
    assert report is not None
    assert report.refused == ()
    assert report.late == report.stayed == 0
    assert report.offloaded_bytes == (LAYERS - 1) * WEIGHT_BYTES
    assert plain_bytes - held_bytes >= report.offloaded_bytes - MIB


def test_reading_between_forward_and_backward() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    count = 0
    with mover():
        for _ in range(6):
            before = [p.detach().clone() for p in net.parameters()]
            loss = net(torch.randn(64, WIDTH, device="cuda")).square().mean()
            count = max(count, away(net))  # in the end they stay, since they are asked for
            found = [p.detach().clone() for p in net.parameters()]
            assert all(map(torch.equal, before, found))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert count > 0


def test_recurrent_weights_share_a_storage_and_stay() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        net = nn.LSTM(WIDTH, WIDTH, num_layers=2)
        last = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD([*net.parameters(), *last.parameters()], lr=1e-3)
    with mover() as governed:
        for _ in range(6):
            last(net(torch.randn(5, 4, WIDTH, device="cuda"))[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert governed.report().most_offloaded_bytes == 0


def test_captured_graphs_keep_weights_where_they_are() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(64, WIDTH, device="cuda")
    with mover() as governed:
        for _ in range(6):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert governed.report().moving
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            captured = net(x)
        for _ in range(3):
            net(x).square().mean().backward()
            assert not away(net)
            optimizer.step()
            optimizer.zero_grad()
        graph.replay()
        with torch.no_grad():
            assert torch.equal(captured, net(x))
        assert not governed.report().moving


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # plain warns, too
def test_several_streams_end_it() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    side = torch.cuda.Stream()
    x = torch.randn(64, WIDTH, device="cuda")
    with mover() as governed:
        for _ in range(6):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert governed.report().moving
        with torch.no_grad():
            expected = sum(p.double().sum() for p in net.parameters())
        loss = net(x).square().mean()
        assert away(net)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            found = sum(p.double().sum() for p in net.parameters())
        torch.cuda.synchronize()
        assert torch.equal(found, expected)  # type: ignore[arg-type]
        loss.backward()
        with torch.cuda.stream(side):
            net(x).square().mean().backward()
        torch.cuda.synchronize()
        assert str(governed.report().refused[-1]) == (
            "weights stay: the program computes on several streams"
        )
