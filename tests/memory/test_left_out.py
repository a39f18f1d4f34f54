"""Jobs whose passes leave out layers at random, take one of many branches, or end in tensors of
other sizes each time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from tests.memory.steady_stand_in import SteadyStandIn
from torch import Tensor, nn

from kilter.memory.engine import Swapper, SwapReport
from kilter.memory.plan.problem import Link
from kilter.memory.usable_bytes import countable_bytes

WIDTH, ROWS = 16, 64
BLOCK_BYTES = 4 * ROWS * WIDTH * 6
"""What a block saves: twice its input, its normalized input, and two tensors twice as wide."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + self.dropout(y)


class Dropped(nn.Module):
    """An encoder and a decoder, each of which leaves out some of its blocks."""

    def __init__(self, blocks: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.encoder = nn.ModuleList(Block() for _ in range(blocks))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            if random.random() >= self.share:
                x = block(x)
        x = torch.tanh(self.between(x))
        for block in self.decoder:
            if random.random() >= self.share:
                x = block(x)
        found: Tensor = self.head(x).log_softmax(-1)
        return found


class Reading(nn.Module):
    """A decoder's block: it reads the encoder's output, as each of them does, and its own input
    three times."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.across = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.block = Block()

    def forward(self, x: Tensor, found: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + torch.sigmoid(self.query(y)) * self.value(y) * torch.tanh(self.key(y))
        return self.block(x * self.across(found))  # type: ignore[no-any-return]


class Translator(nn.Module):
    """An encoder, and a decoder that reads its output in each block; both leave out some."""

    def __init__(self, blocks: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.encoder = nn.ModuleList(Block() for _ in range(blocks))
        self.decoder = nn.ModuleList(Reading() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = x
        for block in self.encoder:
            if random.random() >= self.share:
                found = block(found)
        found = torch.tanh(found)
        for block in self.decoder:
            if random.random() >= self.share:
                x = block(x, found)
        last: Tensor = self.head(self.norm(x)).log_softmax(-1)
        return last


class Tasks(nn.Module):
    """Blocks that all tasks have in common, and one head of another width for each."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH + 4 * task) for task in range(tasks))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = random.choice(self.heads)(self.blocks(x)).log_softmax(-1)
        return found


class Detector(nn.Module):
    """Blocks for all rows, and some more for as many rows as were found. Now and then these pass
    another layer before."""

    def __init__(self, blocks: int, more: int, each: int = 1, seldom: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.more = nn.Sequential(*(Block() for _ in range(more)))
        self.before = nn.Linear(WIDTH, WIDTH)
        self.each, self.seldom = each, seldom

    def forward(self, x: Tensor) -> Tensor:
        found = torch.randperm(ROWS)[: random.randrange(ROWS // 4, ROWS + 1, self.each)]
        y = self.blocks(x)[found]
        if random.random() < self.seldom:
            y = torch.tanh(self.before(y))
        last: Tensor = self.more(y).log_softmax(-1)
        return last


class Mixture(nn.Module):
    """Blocks, each with experts behind it, of which each row takes one. An expert may have none."""

    def __init__(self, blocks: int, experts: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.experts = nn.ModuleList(
            nn.ModuleList(Block() for _ in range(experts)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = block(x)
            chosen, added = torch.randint(0, len(self.experts[0]), (ROWS,)), torch.zeros_like(x)
            for number, expert in enumerate(experts):
                rows = (chosen == number).nonzero().flatten()
                added = added.index_put((rows,), expert(x[rows]))
            x = x + added
        found: Tensor = x.log_softmax(-1)
        return found


def trained(
    make: Callable[[], nn.Module], iterations: int, swapper: Swapper | None = None
) -> tuple[list[Tensor], list[SwapReport]]:
    """Losses and parameters, and how the engine stood after half of the iterations and at the
    end."""
    torch.manual_seed(0)
    random.seed(1)
    net, reports = make(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    found = []
    for number in range(iterations):
        loss = net(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        if swapper is not None and number in (iterations // 2, iterations - 1):
            reports.append(swapper.report())
    return [*found, *(p.detach() for p in net.parameters())], reports


def compared(
    make: Callable[[], nn.Module],
    iterations: int,
    budget_bytes: int,
    bytes_per_s: float,
    *,
    segments: bool = False,
    min_bytes: int = 1024,
) -> tuple[SwapReport, int, int]:
    """The last report on a job whose numbers are those of the plain one; how many passes of its
    second half ran to their end under a plan, and how many did not."""
    plain, _ = trained(make, iterations)
    link = Link(
        to_host_bytes_per_s=bytes_per_s,
        to_device_bytes_per_s=bytes_per_s,
        both_bytes_per_s=2 * bytes_per_s,
    )
    with Swapper(
        SteadyStandIn(spoil=True),
        budget_bytes=budget_bytes,
        link=link,
        min_bytes=min_bytes,
        segments=segments,
    ) as swapper:
        governed, (half, end) = trained(make, iterations, swapper)
    assert all(map(torch.equal, plain, governed))
    planned = end.planned - half.planned
    return end, planned, end.passes - half.passes - planned


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("bytes_per_s", [1e9, 3e6], ids=["offloaded", "recomputed"])
def test_passes_that_leave_out_layers_keep_the_plan_of_the_whole(bytes_per_s: float) -> None:
    budget_bytes = int(0.6 * 12 * BLOCK_BYTES)
    end, planned, otherwise = compared(lambda: Dropped(6, 0.2), 300, budget_bytes, bytes_per_s)
    assert (planned, otherwise) == (149, 0)
    assert end.highest_bytes <= budget_bytes
    assert end.settled
    assert end.in_bytes > 0
    assert end.recomputed > 0 or bytes_per_s == 1e9


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("bytes_per_s", [1e9, 3e6], ids=["offloaded", "recomputed"])
def test_layers_that_read_one_tensor_may_be_left_out(bytes_per_s: float) -> None:
    budget_bytes = int(0.6 * 6 * 3 * BLOCK_BYTES)
    end, planned, otherwise = compared(lambda: Translator(6, 0.1), 300, budget_bytes, bytes_per_s)
    assert (planned, otherwise) == (149, 0)
    # Two tensors that the program holds may have taken the places of some that leave: they stay.
    assert end.highest_bytes <= budget_bytes + 2 * 4 * ROWS * WIDTH
    assert end.in_bytes > 0
    assert end.recomputed > 0 or bytes_per_s == 1e9


def test_the_longest_passes_are_planned_though_they_come_seldom() -> None:
    budget_bytes = int(0.5 * 24 * BLOCK_BYTES)
    end, planned, otherwise = compared(lambda: Dropped(12, 0.1), 300, budget_bytes, 1e9)
    assert (planned, otherwise) == (149, 0)
    assert end.highest_bytes <= budget_bytes


@pytest.mark.usefixtures("recorder")
def test_calls_of_modules_are_not_recomputed_where_layers_are_left_out() -> None:
    budget_bytes = int(0.6 * 12 * BLOCK_BYTES)
    end, planned, otherwise = compared(
        lambda: Dropped(6, 0.2), 300, budget_bytes, 3e6, segments=True
    )
    assert planned > 4 * otherwise
    assert end.highest_bytes <= budget_bytes


@pytest.mark.usefixtures("recorder")
def test_one_plan_serves_many_tasks_in_no_order() -> None:
    budget_bytes = int(0.7 * 5 * BLOCK_BYTES)
    end, planned, otherwise = compared(lambda: Tasks(12), 200, budget_bytes, 1e9)
    assert (planned, otherwise) == (99, 0)
    assert end.highest_bytes <= budget_bytes


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("bytes_per_s", [1e9, 3e6], ids=["offloaded", "recomputed"])
def test_one_plan_serves_passes_that_end_in_other_sizes_each_time(
    bytes_per_s: float, segments: bool
) -> None:
    budget_bytes = int(0.6 * 8 * BLOCK_BYTES)
    end, planned, otherwise = compared(
        lambda: Detector(5, 3), 100, budget_bytes, bytes_per_s, segments=segments
    )
    assert (planned, otherwise) == (49, 0)
    assert end.highest_bytes <= budget_bytes
    assert end.in_bytes > 0
    assert end.recomputed > 0 or bytes_per_s == 1e9


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("bytes_per_s", [1e9, 3e6], ids=["offloaded", "recomputed"])
def test_a_layer_that_comes_seldom_needs_no_plan_of_its_own(bytes_per_s: float) -> None:
    budget_bytes = int(0.6 * 8 * BLOCK_BYTES)
    end, planned, otherwise = compared(
        lambda: Detector(4, 4, seldom=0.15), 100, budget_bytes, bytes_per_s
    )
    assert (planned, otherwise) == (49, 0)
    assert end.highest_bytes <= 1.02 * budget_bytes
    assert end.recomputed > 0 or bytes_per_s == 1e9


def test_a_few_sizes_in_no_order_come_to_share_a_plan() -> None:
    budget_bytes = int(0.6 * 8 * BLOCK_BYTES)
    end, planned, otherwise = compared(
        lambda: Detector(5, 3, each=ROWS // 4), 300, budget_bytes, 1e9
    )
    assert planned > 5 * otherwise
    assert end.highest_bytes <= budget_bytes


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("bytes_per_s", [1e9, 3e6], ids=["offloaded", "recomputed"])
def test_one_plan_serves_a_loop_over_experts(bytes_per_s: float) -> None:
    budget_bytes = int(0.6 * 6 * BLOCK_BYTES)
    end, planned, otherwise = compared(
        lambda: Mixture(3, 8), 100, budget_bytes, bytes_per_s, min_bytes=256
    )
    assert (planned, otherwise) == (49, 0)
    assert end.highest_bytes <= 1.05 * budget_bytes  # later passes save more than those watched
    assert end.in_bytes > 0
    assert end.recomputed > 0 or bytes_per_s == 1e9


class Rising(SteadyStandIn):
    """Tells of what is in use only the most so far."""

    most_bytes = 0

    def peak_so_far_bytes(self) -> int:
        return self.most_bytes


@pytest.mark.parametrize("within", [True, False], ids=["in a pass", "between passes"])
def test_a_pass_above_the_budget_is_planned_for_less(within: bool) -> None:
    device, budget_bytes = Rising(spoil=True), int(0.6 * 8 * BLOCK_BYTES)
    link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    begun = iter(range(100))

    def make() -> nn.Module:
        net = Detector(5, 3)
        where = net.register_forward_hook if within else net.register_forward_pre_hook
        where(lambda *_: rise(next(begun)))
        return net

    def rise(number: int) -> None:
        if number == 60:
            device.most_bytes = budget_bytes + 1000

    with Swapper(device, budget_bytes=budget_bytes, link=link, min_bytes=1024) as swapper:
        trained(make, 70, swapper)
        (plan,) = swapper.plans()
        report = swapper.report()
    assert report.deviations == 0
    less_bytes = 1000 if within else 0
    assert plan.problem.budget_bytes == countable_bytes(budget_bytes) - less_bytes
    assert (report.most_bytes == budget_bytes + 1000) is within
