"""Jobs whose passes differ: few of them are watched, and what comes again gets a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from kilter.memory.engine import CpuStandIn, Swapper, SwapReport
from kilter.memory.engine.other_sizes import TRIES
from kilter.memory.engine.watch import IN_VAIN, RARELY, SELDOM, Attention
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=1e14, to_device_bytes_per_s=1e14, both_bytes_per_s=2e14)
WIDTH, LAYERS = 16, 4
ROW_BYTES = 4 * WIDTH


class Scale(nn.Module):
    """A layer that, unlike a matrix product, costs no time for each new shape on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Job:
    """A network whose passes have as many rows as they are told."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(Scale(), nn.Tanh()) for _ in range(LAYERS)))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.losses: list[float] = []

    def step(self, rows: int, *, layers: int = LAYERS) -> None:
        loss = self.net[:layers](torch.randn(rows, WIDTH)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def evaluate(self, rows: int, *, graph: bool) -> None:
        """With a graph that nobody uses, or without one."""
        with torch.set_grad_enabled(graph):
            self.losses.append(self.net(torch.randn(rows, WIDTH)).square().mean().item())


def compared(work: Callable[[Job], Iterable[None]], budget_bytes: int) -> SwapReport:
    """What the engine does under a budget to a job whose numbers are those of the plain one."""
    plain = Job()
    for _ in work(plain):
        pass
    job, backend = Job(), CpuStandIn(spoil=True)
    with Swapper(backend, budget_bytes=budget_bytes, link=LINK, min_bytes=256) as swapper:
        for _ in work(job):
            pass
        report = swapper.report()
    assert job.losses == plain.losses
    return report


def test_ever_changing_shapes_are_watched_a_bounded_number_of_times() -> None:
    passes = 300

    def work(job: Job) -> Iterable[None]:
        for number in range(passes):
            yield job.step(16 + number)

    report = compared(work, 100 * ROW_BYTES)
    assert report.passes == passes - 1  # the last one is still open
    # Each is larger than all before, so what is tried serves none of them.
    seldom = IN_VAIN + IN_VAIN + (passes - IN_VAIN - IN_VAIN * SELDOM) // RARELY
    assert report.watched <= seldom + TRIES
    assert report.planned == 0
    assert report.watched_every == RARELY
    assert report.spilled > passes  # the budget holds without a plan


def test_a_job_that_settles_gets_a_plan() -> None:
    def work(job: Job) -> Iterable[None]:
        for number in range(IN_VAIN + 2 * SELDOM):
            yield job.step(16 + number)
        for _ in range(5 * SELDOM):
            yield job.step(200)

    report = compared(work, 1000 * ROW_BYTES)
    assert report.planned > 2 * SELDOM


@pytest.mark.parametrize("kinds", [2, 3, 8])
def test_shapes_that_take_turns_get_a_plan_each(kinds: int) -> None:
    def work(job: Job) -> Iterable[None]:
        for number in range(10 * kinds):
            yield job.step(64 + 16 * (number % kinds))

    report = compared(work, 700 * ROW_BYTES)
    assert len(report.plans) == kinds
    assert report.deviations == 0
    # Twice for what happens, once for what can be recomputed, and the first one of all once more.
    assert report.watched <= 3 * kinds + 1
    assert report.watched_every == 1


def test_two_kinds_of_passes_that_begin_alike_get_a_plan_each() -> None:
    passes = 120

    def work(job: Job) -> Iterable[None]:
        for number in range(passes):
            yield job.step(64, layers=2 if number % 2 else LAYERS)

    report = compared(work, 256 * ROW_BYTES)
    assert len(report.plans) == 2
    assert report.planned >= passes // 3
    assert report.watched <= 3 * 2 + 1 + IN_VAIN + passes // SELDOM


@pytest.mark.parametrize("graph", [False, True])
def test_evaluation_in_between_is_no_obstacle(graph: bool) -> None:
    def work(job: Job) -> Iterable[None]:
        for number in range(40):
            yield job.step(64)
            if number % 5 == 4:
                job.evaluate(128, graph=graph)

    report = compared(work, 200 * ROW_BYTES)
    assert report.planned >= 20
    assert report.watched_every == 1


def test_attention_wanes_and_comes_back() -> None:
    attention = Attention()

    def watched(count: int, *, useful: bool) -> int:
        found = 0
        for _ in range(count):
            if attention.asks():
                attention.met(useful=useful)
                found += 1
        return found

    assert watched(IN_VAIN, useful=False) == IN_VAIN
    assert watched(IN_VAIN * SELDOM, useful=False) == IN_VAIN
    assert watched(10 * RARELY, useful=False) == 10
    assert watched(RARELY, useful=True) == 1
    assert attention.every == 1
    assert watched(100, useful=True) == 100
