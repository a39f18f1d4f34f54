"""Memory that the framework did not allocate is never evicted, overwritten or read at another time.

The stand-in overwrites what is evicted, so a data set of NumPy or a file that the engine took for
its own would show here as other bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.backend import SPOIL, owned
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=1e14, to_device_bytes_per_s=1e14, both_bytes_per_s=2e14)
SLOW = Link(to_host_bytes_per_s=1e6, to_device_bytes_per_s=1e6, both_bytes_per_s=2e6)
"""A link so slow that plans recompute."""
ROWS, WIDTH, STEPS = 32, 64, 14
SIZE_BYTES = 4 * ROWS * WIDTH

Batches = Callable[[], torch.Tensor]
"""Hands out another tensor each time, on the same memory, as loaders do: nothing else holds it."""


def values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)


def mapped_file(folder: Path) -> Path:
    path = folder / "data.bin"
    values().tofile(path)
    return path


def of_numpy(folder: Path) -> Batches:
    data = values()
    return lambda: torch.from_numpy(data)


def of_dlpack(folder: Path) -> Batches:
    data = values()
    return lambda: torch.from_dlpack(data)


def of_a_buffer(folder: Path) -> Batches:
    data = bytearray(values().tobytes())
    return lambda: torch.frombuffer(data, dtype=torch.float32).view(ROWS, WIDTH)


def of_a_memory_map(folder: Path) -> Batches:
    data = np.memmap(mapped_file(folder), dtype=np.float32, mode="r+", shape=(ROWS, WIDTH))
    return lambda: torch.from_numpy(data)


def of_a_file(folder: Path) -> Batches:
    path = str(mapped_file(folder))
    return lambda: torch.from_file(path, shared=True, size=ROWS * WIDTH).view(ROWS, WIDTH)


def of_a_storage_of_a_file(folder: Path) -> Batches:
    path = str(mapped_file(folder))

    def batch() -> torch.Tensor:
        storage = torch.UntypedStorage.from_file(path, True, SIZE_BYTES)
        return torch.empty(0).set_(storage, 0, (ROWS, WIDTH))

    return batch


def of_a_checkpoint(folder: Path) -> Batches:
    torch.save(torch.from_numpy(values()), folder / "saved.pt")
    return lambda: torch.load(folder / "saved.pt", mmap=True)


def of_a_cut_storage(folder: Path) -> Batches:
    whole = torch.from_numpy(values()).clone().untyped_storage()
    return lambda: torch.empty(0).set_(whole[:SIZE_BYTES], 0, (ROWS, WIDTH))


def of_other_processes(folder: Path) -> Batches:
    return lambda: torch.from_numpy(values()).clone().share_memory_()


FOREIGN = [
    of_numpy, of_dlpack, of_a_buffer, of_a_memory_map, of_a_file, of_a_storage_of_a_file,
    of_a_checkpoint, of_a_cut_storage, of_other_processes,
]  # fmt: skip


@pytest.mark.parametrize("foreign", FOREIGN)
def test_foreign_memory_is_told_from_the_frameworks(
    foreign: Callable[[Path], Batches], tmp_path: Path
) -> None:
    tensor = foreign(tmp_path)()
    assert not owned(tensor.untyped_storage(), on_cuda=False)
    assert not owned(tensor[::2].untyped_storage(), on_cuda=False)
    assert owned(tensor.clone().untyped_storage(), on_cuda=False)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(8),
        torch.ones(8)[::2],
        torch.tensor([1.0]),
        torch.mm(torch.ones(4, 4), torch.ones(4, 4)),
        nn.functional.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)),
        nn.LSTM(4, 4)(torch.ones(3, 2, 4))[0],
    ],
)
def test_what_operations_return_is_the_frameworks(tensor: torch.Tensor) -> None:
    assert owned(tensor.untyped_storage(), on_cuda=False)


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    """A view that is no leaf, of a batch that wants a gradient."""
    return x.detach().requires_grad_().view(x.shape[0] // 2, 2, x.shape[1])


def every_second_row(x: torch.Tensor) -> torch.Tensor:
    return x[::2]


def through_operations_that_do_nothing(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, training=False).contiguous().to(torch.float32)


def written_to(x: torch.Tensor) -> torch.Tensor:
    """A result of an operation in memory that is not the framework's."""
    return torch.mul(x, 1.0, out=x)


def trained(batches: Batches, link: Link | None) -> list[float]:
    """Losses; governed if there is a link."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []

    def run() -> None:
        for _ in range(STEPS):
            y = batches()  # saved by the first layer
            for layer in net:
                y = layer(y)
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    if link is None:
        run()
        return losses
    with Swapper(CpuStandIn(spoil=True), budget_bytes=1, link=link, min_bytes=1024) as swapper:
        run()
    assert swapper.report().spilled
    return losses


CASES = [(foreign, as_it_is) for foreign in FOREIGN] + [
    (of_numpy, used)
    for used in (with_gradient, every_second_row, through_operations_that_do_nothing, written_to)
]


@pytest.mark.parametrize(("foreign", "used"), CASES)
def test_a_data_set_keeps_its_bytes(
    foreign: Callable[[Path], Batches],
    used: Callable[[torch.Tensor], torch.Tensor],
    tmp_path: Path,
) -> None:
    batches = foreign(tmp_path)
    before = batches().clone()
    plain = trained(lambda: used(before.clone()), None)
    assert trained(lambda: used(batches()), LINK) == plain
    assert torch.equal(batches(), before)
    file = tmp_path / "data.bin"
    assert not file.exists() or file.read_bytes() == values().tobytes()


def test_memory_that_others_write_to_is_read_when_the_program_reads_it() -> None:
    """A buffer that is filled with the next batch while backward of this one is to come: what was
    computed from the old batch is not recomputed from the new one."""

    def losses(governed: bool) -> list[float]:
        torch.manual_seed(0)
        buffer = values()
        rng = np.random.default_rng(1)
        net = nn.Linear(WIDTH, WIDTH)
        found = []
        swapper = Swapper(
            CpuStandIn(spoil=True), budget_bytes=7 * SIZE_BYTES, link=SLOW, min_bytes=1024
        )
        if governed:
            swapper.__enter__()
        for number in range(STEPS):
            # Saved are results of operations on the buffer: casts, which are cheap to recompute.
            y = torch.from_numpy(buffer).requires_grad_().to(torch.float64).to(torch.float32)
            for _ in range(3):
                y = torch.tanh(net(y).to(torch.float64)).to(torch.float32)
            loss = y.square().mean()
            if number > 8:  # before that recipes are tried, and what differs is never recomputed
                buffer[:] = rng.standard_normal(buffer.shape)
            loss.backward()
            assert net.weight.grad is not None
            found += [loss.item(), net.weight.grad.sum().item()]
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            net.zero_grad()
        if governed:
            swapper.__exit__(None, None, None)
            assert swapper.report().recomputed
        return found

    assert losses(governed=True) == losses(governed=False)


def test_a_users_run_overwrites_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests ask for that, by the environment or by hand."""
    evicted = torch.ones(8)
    monkeypatch.delenv(SPOIL)
    CpuStandIn().evicted(evicted.untyped_storage())
    assert torch.equal(evicted, torch.ones(8))
    monkeypatch.setenv(SPOIL, "1")
    CpuStandIn().evicted(evicted.untyped_storage())
    assert not torch.equal(evicted, torch.ones(8))
