"""The memory engine on a real GPU. Reads only: no setting of the card is touched."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kilter.memory.engine import Swapper, SwapReport, compiled_recorder, fused
from kilter.memory.engine.cuda import Cuda, measure_link
from kilter.memory.engine.fused import can_normalise, normalised
from kilter.memory.engine.plan_feedback import CHECK_AFTER
from kilter.memory.plan.problem import Link

pytestmark = pytest.mark.gpu

PCIE = Link(to_host_bytes_per_s=5e10, to_device_bytes_per_s=5e10, both_bytes_per_s=9e10)
BLOCKS = 12
SLOW = Link(to_host_bytes_per_s=1e8, to_device_bytes_per_s=1e8, both_bytes_per_s=2e8)


def trained(
    budget_bytes: int | None,
    link: Link,
    planner: str,
    *,
    count: int = 8,
    rows: int = 4096,
    weights: bool = True,
) -> tuple[list[torch.Tensor], int, SwapReport | None]:
    """Losses and gradients of so many and two more steps of a stack of blocks, and the peak of
    the last two."""
    torch.manual_seed(0)

    def block() -> nn.Module:
        norm = nn.LayerNorm(512, elementwise_affine=weights)
        return nn.Sequential(norm, nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    with torch.device("cuda"):
        net = nn.Sequential(*[block() for _ in range(BLOCKS)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    values: list[torch.Tensor] = []

    def steps(count: int) -> None:
        for _ in range(count):
            x = torch.randn(rows, 512, device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = net(x).float().square().mean()
            loss.backward()
            values.append(loss.detach().clone())
            values.extend(p.grad.clone() for p in net.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
            del loss
            values[:] = [value.cpu() for value in values]

    if budget_bytes is None:
        steps(count)
        torch.cuda.reset_peak_memory_stats()
        steps(2)
        return values, torch.cuda.max_memory_allocated(), None
    swapper = Swapper(Cuda.open(), budget_bytes=budget_bytes, link=link, planner=planner)
    with swapper:
        steps(count)
        torch.cuda.reset_peak_memory_stats()
        steps(2)
        peak_bytes = torch.cuda.max_memory_allocated()
    return values, peak_bytes, swapper.report()


@pytest.mark.parametrize(("link", "planner"), [(PCIE, "spanning"), (PCIE, "mix"), (SLOW, "mix")])
def test_planned_training_is_bitwise_plain_and_within_the_budget(link: Link, planner: str) -> None:
    plain, plain_bytes, _ = trained(None, link, planner)
    budget_bytes = int(0.75 * plain_bytes)
    values, peak_bytes, report = trained(budget_bytes, link, planner)
    assert report is not None
    assert report.planned >= 2
    assert report.late == 0
    assert peak_bytes <= budget_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain, values, strict=True))


def test_a_link_that_is_slower_than_its_table_is_noticed() -> None:
    """A table that promises a thousand times as much has everything swapped. The copies take longer
    than even a slow host needs to issue the iteration."""
    dream = Link(to_host_bytes_per_s=5e13, to_device_bytes_per_s=5e13, both_bytes_per_s=9e13)
    plain, plain_bytes, _ = trained(None, dream, "mix", count=20, rows=32768)
    budget_bytes = int(0.7 * plain_bytes)
    values, peak_bytes, report = trained(budget_bytes, dream, "mix", count=20, rows=32768)
    assert report is not None
    assert report.waited_s is not None
    assert report.hastened > 0 or any(reason.code == "slower_link" for reason in report.refused)
    assert peak_bytes <= budget_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain, values, strict=True))


def test_what_the_program_keeps_later_is_planned_for() -> None:
    """Copies of the weights, as of the best ones so far, long after the passes were planned."""

    def run(budget_bytes: int | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(12)]
        net = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        swapper = (
            None if budget_bytes is None else Swapper(Cuda.open(), budget_bytes=2**50, link=PCIE)
        )
        copies, values = [], []
        with swapper or nullcontext():
            for step in range(3 * CHECK_AFTER):
                if swapper is not None and budget_bytes is not None and step == 4:
                    swapper.limit(budget_bytes)
                if step == CHECK_AFTER:
                    copies += [p.detach().clone() for p in net.parameters()]
                if step == 3 * CHECK_AFTER - 3:
                    torch.cuda.reset_peak_memory_stats()
                loss = net(torch.randn(8192, 1024, device="cuda")).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                values.append(loss.detach())
            return [*values, *net.parameters(), *copies], torch.cuda.max_memory_allocated()

    plain, plain_bytes = run(None)
    budget_bytes = int(0.7 * plain_bytes)
    values, peak_bytes = run(budget_bytes)
    assert peak_bytes <= budget_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain, values, strict=True))


def test_the_link_is_measured_in_both_directions() -> None:
    backend = Cuda.open()
    link = measure_link(backend)
    backend.close()
    assert link.to_host_bytes_per_s > 1e9
    assert link.to_device_bytes_per_s > 1e9
    assert link.both_bytes_per_s > 0.8 * link.to_host_bytes_per_s


@pytest.mark.parametrize("weights", [True, False])
def test_norms_are_recomputed_without_python(
    weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled_recorder.library() is None:
        pytest.skip("needs the compiled library")
    asked: list[torch.Size] = []

    def ask(*given: Any) -> torch.Tensor:
        asked.append(given[0].shape)
        return normalised(*given)

    plain, plain_bytes, _ = trained(None, SLOW, "mix", count=20, weights=weights)
    monkeypatch.setattr(fused, "normalised", ask)
    budget_bytes = int(0.75 * plain_bytes)
    values, peak_bytes, report = trained(budget_bytes, SLOW, "mix", count=20, weights=weights)
    assert report is not None
    assert peak_bytes <= budget_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain, values, strict=True))
    assert any(key[2:] == (512, weights) for key in fused.kernels)
    assert len(asked) < BLOCKS * report.planned // 2  # when they were tried


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 768, 1280, 1600, 8192])
def test_a_norm_without_weights_is_the_frameworks_own(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 257, width, device="cuda")
    if not can_normalise(x, None, None, width):
        pytest.skip("needs Triton")
    out, mean, rstd = torch.native_layer_norm(x, [width], None, None, 1e-6)
    made = [normalised(x, mean, rstd, None, None, dtype) for _ in range(2)]
    assert all(torch.equal(one, out.to(dtype)) for one in made)
    without_a_kernel = fused.layer_norm(
        x[:, ::2], mean[:, ::2], rstd[:, ::2], None, None, [width], None, dtype
    )
    assert torch.equal(without_a_kernel, out[:, ::2].to(dtype))


@pytest.mark.parametrize("width", [64, 768, 1280, 1600, 8192])
def test_a_norm_from_its_statistics_is_the_frameworks_own(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 257, width, device="cuda")
    weight, bias = torch.randn(2, width, device="cuda")
    if not can_normalise(x, weight, bias, width):
        pytest.skip("needs Triton")
    out, mean, rstd = torch.native_layer_norm(x, [width], weight, bias, 1e-5)
    made = normalised(x, mean, rstd, weight, bias, torch.bfloat16)
    assert torch.equal(made, out.to(torch.bfloat16))
    again = normalised(2 * x, mean, rstd, weight, bias, torch.bfloat16)  # launched directly
    assert not torch.equal(again, made)
    assert torch.equal(normalised(x, mean, rstd, weight, bias, torch.bfloat16), made)
    shifted = torch.empty(width + 1, device="cuda")[1:].copy_(bias)  # not at a round address
    assert torch.equal(normalised(x, mean, rstd, weight, shifted, torch.bfloat16), made)


def test_a_number_that_is_read_does_not_wait_for_all_copies() -> None:
    """2 GiB are on their way to the host, some 40 ms. With one stream for them it would."""
    backend = Cuda.open()
    size_bytes = 2**28
    host, device = backend.reserve(size_bytes), backend.alloc(size_bytes)
    number = torch.ones((), device="cuda")
    assert number.item() == 1.0
    copies = [backend.copy_out(host, device) for _ in range(8)]
    assert number.item() == 1.0
    backend.wait(copies[-1])
    assert not backend.reached(backend.mark())
    backend.close()


def test_many_copies_in_flight_arrive_in_order() -> None:
    """More than the lane has events: a wait may be late, never too early."""
    backend = Cuda.open()
    count, size = 700, 4096
    host = backend.reserve(count * size)
    device = torch.randint(0, 255, (count, size), dtype=torch.uint8, device="cuda")
    events = [backend.copy_out(host[i * size : (i + 1) * size], device[i]) for i in range(count)]
    back = [backend.alloc_like(host[i * size : (i + 1) * size]) for i in range(count)]
    for i in reversed(range(count)):
        backend.wait(events[i])
        backend.wait(backend.copy_in(back[i], host[i * size : (i + 1) * size]))
    assert torch.equal(torch.stack(back), device)
    backend.close()
