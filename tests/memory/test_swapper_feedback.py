"""Copies that come later than planned are noticed, and later triggers move earlier.

The device has a clock of its own: layers take a second each, and copies what the link really
takes, which its table need not know. Time is simulated, bytes really move.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kilter.memory.engine import CpuStandIn, Swapper, SwapReport
from kilter.memory.engine.plan_feedback import LISTEN_EVERY, MAX_ANSWERS
from kilter.memory.plan.problem import Link

LAYERS, WIDTH, ROWS = 24, 16, 64
SIZE_BYTES = 4 * WIDTH * ROWS
FIRST = 10
"""Iterations until there surely is a plan."""


class Clocked(CpuStandIn):
    """One channel a direction, with real rates and a clock that only work and waiting move on."""

    shows_waits = True

    def __init__(self, out: float, back: float) -> None:
        super().__init__()
        self.now_s = self.waited_s = 0.0
        self.rates = {"out": out, "in": back}
        self._free_s = {"out": 0.0, "in": 0.0}

    def work(self, seconds: float) -> None:
        self.now_s += seconds

    def copy_out(self, host: torch.Tensor, device: torch.Tensor) -> Any:
        return self._issue(host, device), self._end_s("out", host)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> Any:
        return self._issue(device, host), self._end_s("in", host)

    def _end_s(self, lane: str, host: torch.Tensor) -> float:
        begin_s = max(self.now_s, self._free_s[lane])
        self._free_s[lane] = begin_s + host.nbytes / self.rates[lane]
        return self._free_s[lane]

    def wait(self, event: Any) -> None:
        super().wait(event[0])
        self.waited_s += max(0.0, event[1] - self.now_s)
        self.now_s = max(self.now_s, event[1])

    def mark(self) -> float:
        return self.now_s


class Layer(torch.autograd.Function):
    """Saves its input and takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backend: Clocked) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.backend = backend
        backend.work(1.0)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.backend.work(1.0)
        return gradient * x.cos(), None


def trained(
    backend: Clocked, link: Link, *, share: float, iterations: int, beside_s: float = 0.0
) -> tuple[list[torch.Tensor], list[float], list[float], SwapReport]:
    """Weights at the end, and of each iteration its time and how long it waited for copies.
    `beside_s` is what the program does after each optimizer step."""
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.01)
    x = torch.randn(ROWS, WIDTH)
    times_s, waits_s = [], []
    budget = int(share * (LAYERS + 2) * SIZE_BYTES)
    with Swapper(backend, budget_bytes=budget, link=link, min_bytes=SIZE_BYTES) as swapper:
        for _ in range(iterations):
            begin_s, waited_s = backend.now_s, backend.waited_s
            y = first(x)
            for _ in range(LAYERS):
                y = Layer.apply(y, backend)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            backend.work(beside_s)
            times_s.append(backend.now_s - begin_s)
            waits_s.append(backend.waited_s - waited_s)
    return [p.detach().clone() for p in first.parameters()], times_s, waits_s, swapper.report()


def table(layers_per_s: float) -> Link:
    rate = layers_per_s * SIZE_BYTES
    return Link(to_host_bytes_per_s=rate, to_device_bytes_per_s=rate, both_bytes_per_s=2 * rate)


def clocked(out: float, back: float, *, tells: bool = True) -> Clocked:
    """Rates in layers a second."""
    backend = Clocked(out * SIZE_BYTES, back * SIZE_BYTES)
    backend.shows_waits = tells
    return backend


def test_loads_that_were_late_start_earlier() -> None:
    """The way back is slower than its table says; there is memory to start earlier."""
    found = {}
    for tells in (False, True):
        backend = clocked(1.0, 0.6, tells=tells)
        found[tells] = trained(backend, table(1.0), share=0.6, iterations=FIRST + 20)
    deaf, heard = found[False], found[True]
    assert all(torch.equal(a, b) for a, b in zip(deaf[0], heard[0], strict=True))
    assert deaf[3].hastened == 0
    assert deaf[3].waited_s is None
    assert deaf[2][-1] > 1.0
    assert heard[3].hastened > 0
    assert heard[2][-1] < 0.1 * deaf[2][-1]
    assert heard[1][-1] < deaf[1][-1]
    assert [plan.swapped for plan in heard[3].plans] == [plan.swapped for plan in deaf[3].plans]
    assert heard[3].held_peak_bytes <= 0.6 * (LAYERS + 2) * SIZE_BYTES
    assert heard[3].deviations == 0
    assert heard[3].waited_s is not None


def test_waits_that_are_a_small_share_of_the_iteration_are_left_alone() -> None:
    """The same passes in a program that takes most of its time beside them."""
    backend = clocked(1.0, 0.6)
    found = trained(backend, table(1.0), share=0.6, iterations=FIRST + 20, beside_s=1000.0)
    assert found[2][-1] > 1.0, "passes do wait"
    assert found[3].hastened == 0
    assert not any(reason.code == "slower_link" for reason in found[3].refused)


def test_where_the_link_is_too_slow_less_is_moved() -> None:
    found = {}
    for tells in (False, True):
        backend = clocked(0.25, 0.25, tells=tells)
        found[tells] = trained(backend, table(1.0), share=0.7, iterations=FIRST + 40)
    deaf, heard = found[False], found[True]
    assert all(torch.equal(a, b) for a, b in zip(deaf[0], heard[0], strict=True))
    assert any(reason.code == "slower_link" for reason in heard[3].refused)
    assert heard[2][-1] < 0.75 * deaf[2][-1]


def test_a_link_as_in_its_table_is_left_alone() -> None:
    backend = clocked(1.0, 1.0)
    *_, report = trained(backend, table(1.0), share=0.6, iterations=FIRST + 10)
    assert report.hastened == 0
    assert report.refused == ()
    assert report.plans[0].swapped > 0
    assert report.waited_s is not None
    assert report.waited_s <= report.plans[0].stall_s + 0.5


def test_a_link_that_slows_down_later_is_noticed() -> None:
    backend = clocked(1.0, 1.0)
    slow_from = FIRST + 10
    work, seen = backend.work, [0]

    def counted(seconds: float) -> None:
        seen[0] += 1
        if seen[0] == slow_from * 2 * LAYERS:
            backend.rates["in"] /= 2
        work(seconds)

    backend.work = counted  # type: ignore[method-assign]
    _, _, waits_s, report = trained(
        backend, table(1.0), share=0.7, iterations=slow_from + LISTEN_EVERY + 30
    )
    assert max(waits_s[FIRST + 2 : slow_from - 1]) == 0.0
    assert report.hastened > 0
    assert waits_s[-1] < 0.5 * waits_s[slow_from + 1]


def test_no_more_answers_than_some() -> None:
    """A link that is late whatever is planned does not have the job planned for ever."""

    class Hopeless(Clocked):
        def wait(self, event: Any) -> None:
            super().wait((event[0], max(event[1], self.now_s + 2.0)))

    backend = Hopeless(4.0 * SIZE_BYTES, 4.0 * SIZE_BYTES)
    *_, report = trained(backend, table(4.0), share=0.6, iterations=FIRST + 8 * MAX_ANSWERS)
    assert len(report.refused) <= MAX_ANSWERS
    assert report.deviations == 0
