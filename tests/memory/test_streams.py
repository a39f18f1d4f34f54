"""Several streams, and operations that are captured into a graph: nothing moves there.

On a CPU the stand-in says which stream operations are issued to; on a GPU they really are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kilter.core.units import MIB
from kilter.memory.engine import CpuStandIn, Swapper, SwapReport
from kilter.memory.engine.pass_record import PassRecord
from kilter.memory.engine.tensor_hooks import TensorHooks
from kilter.memory.plan.problem import Link
from kilter.session.fence import Fence

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=1.5e9)
SLOW = Link(to_host_bytes_per_s=1e5, to_device_bytes_per_s=1e5, both_bytes_per_s=2e5)
WIDTH, ROWS, STEPS = 64, 256, 12
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Streams(CpuStandIn):
    """Says that operations are issued to the stream `now`."""

    now: int | None = 0

    def stream(self) -> int | None:
        return self.now

    @contextmanager
    def on(self, stream: int | None) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class Branches(nn.Module):
    """Two branches, of which the other is issued to a stream of its own."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.main, self.other = (
            nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)))
            for _ in range(2)
        )

    def forward(self, x: Tensor, there: Any, join: Callable[[], None] = lambda: None) -> Tensor:
        y, z = x, x
        for mine, others in zip(self.main, self.other, strict=True):
            y = mine(y)
            with there():
                z = others(z)
        join()
        return y + z


def train(
    backend: Streams, there: Any, share: float | None
) -> tuple[list[Tensor], SwapReport, list[PassRecord]]:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    budget_bytes = 2**40 if share is None else int(share * 9 * ROWS * WIDTH * 4)
    errors: list[tuple[str, str]] = []
    fence = Fence(lambda where, error: errors.append((where, error)))
    values = []
    with Swapper(
        backend, budget_bytes=budget_bytes, link=LINK, min_bytes=1024, fence=fence
    ) as swapper:
        for _ in range(STEPS):
            loss = model(torch.randn(ROWS, WIDTH), there).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
    assert not errors
    records = [record for record in swapper.records() if record.passes > 1]
    return [*values, *model.parameters()], swapper.report(), records


def test_what_another_stream_saves_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiled library asks for real streams, of which a CPU has one.
    monkeypatch.setattr(TensorHooks, "use_library", lambda *arguments: None)
    backend = Streams()
    one, _, (together,) = train(Streams(), nullcontext, None)
    two, _, (apart,) = train(backend, lambda: backend.on(1), None)
    assert len(apart.data) * 2 <= len(together.data) + 2  # the input is saved by both
    planned, report, _ = train(backend, lambda: backend.on(1), 0.7)
    assert report.planned
    assert not report.deviations
    assert report.out_bytes + report.recomputed
    for other in (two, planned):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("begin", [0, 1])
def test_nothing_moves_while_operations_are_captured(begin: int) -> None:
    """Some passes of a job that runs under a plan are captured, from their first operation on or
    from the middle of the forward on."""
    plain, ours = run_captured(None, begin), run_captured(0.5, begin)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def run_captured(share: float | None, begin: int) -> list[Tensor]:
    torch.manual_seed(0)
    backend = Streams()
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    values: list[Tensor] = []
    swapper: Any = nullcontext()
    if share is not None:
        budget_bytes = int(share * 12 * ROWS * WIDTH * 4)
        swapper = Swapper(backend, budget_bytes=budget_bytes, link=LINK, min_bytes=1024)
    moved: list[tuple[int, int]] = []
    with swapper:
        for number in range(STEPS + 4):
            captured = None if STEPS <= number < STEPS + 2 else 0
            y = torch.randn(ROWS, WIDTH)
            for layer in layers[:begin]:
                y = layer(y)
            with backend.on(captured):
                assert share is None or swapper.captured is (captured is None)
                issued = backend._issued
                for layer in layers[begin:]:
                    y = layer(y)
                loss = y.square().mean()
                if captured is None:
                    assert backend._issued == issued
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
            if share is not None:
                moved.append((swapper.report().planned, swapper.report().out_bytes))
    if share is not None and begin == 0:
        before, first, second, after = moved[STEPS - 1 : STEPS + 3]
        assert before == first == second
        assert before[0] > 2
        assert after[0] == before[0] + 1
        assert after[1] > before[1]
    return [*values, *model.parameters()]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("link", [LINK, SLOW], ids=["offloaded", "recomputed"])
def test_on_a_gpu_a_branch_on_another_stream_gives_the_same_bits(link: Link) -> None:
    from kilter.memory.engine.cuda import Cuda

    def run(*, governed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Branches(1024).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        other = torch.cuda.Stream()
        values: list[Tensor] = []
        swapper: Any = nullcontext()
        if governed:
            swapper = Swapper(Cuda.open(), budget_bytes=2**50, link=link)
            swapper.may_plan = False
        with swapper:
            for number in range(24):
                if governed and number == 6:
                    record = swapper.largest_pass()
                    problem, _ = record.problem(link=link, budget_bytes=1, min_bytes=MIB)
                    # What is left to autograd stays, so a share of the peak may be out of reach.
                    swapper.limit((problem.floor_bytes + record.peak_bytes) // 2)
                torch.manual_seed(number)
                x = torch.randn(4096, 1024, device="cuda")
                other.wait_stream(torch.cuda.current_stream())
                y = model(
                    x,
                    lambda: torch.cuda.stream(other),
                    lambda: torch.cuda.current_stream().wait_stream(other),
                )
                loss = y.square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                values.append(loss.detach())
            if governed:
                report = swapper.report()
                assert report.planned, report.refused
                assert report.out_bytes + report.recomputed
        return [*values, *(p.detach() for p in model.parameters())]

    plain, again = run(governed=False), run(governed=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)), "plain differs"
    assert all(torch.equal(a, b) for a, b in zip(plain, run(governed=True), strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("warm", [3, 12])
def test_on_a_gpu_a_captured_training_plays_the_same(warm: int) -> None:
    """It is captured before there is a plan, and under one."""
    from kilter.memory.engine.cuda import Cuda

    def run(share: float | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6))
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        x = torch.randn(4096, 1024, device="cuda")
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        swapper: Any = nullcontext()
        if share is not None:
            budget_bytes = int(share * 13 * 4096 * 1024 * 4) + torch.cuda.memory_allocated()
            swapper = Swapper(Cuda.open(), budget_bytes=budget_bytes, link=LINK)
        values = []
        with swapper:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(warm):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                loss = step()
            for number in range(4):
                x.copy_(torch.full_like(x, 0.1 * number))
                graph.replay()
                values.append(loss.detach().clone())
        return [*values, *(p.detach() for p in model.parameters())]

    plain = run(None)
    assert all(torch.equal(a, b) for a, b in zip(plain, run(0.7), strict=True))
