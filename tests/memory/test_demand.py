"""Without a plan the oldest tensors leave, early enough, and come back before they are used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.backend import CopyEvent
from kilter.memory.engine.demand import MOST_SURGES, Demand, SurgeShown
from kilter.memory.engine.host import IDLE_PASSES, HostPool
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
LAYERS, SIZE_BYTES = 12, 64 * 64 * 4
BUDGET_BYTES = (LAYERS // 2) * SIZE_BYTES


class Counted(CpuStandIn):
    """Tells what saved tensors take, and remembers each copy and what waited for it."""

    def __init__(self) -> None:
        super().__init__(spoil=True)
        self.swapper: Swapper | None = None
        self.begun: list[tuple[str, CopyEvent]] = []
        self.at_once = 0
        """So many copies to the device were waited for with no other one begun since."""
        self.most_bytes = 0

    def used_bytes(self) -> int:
        assert self.swapper is not None
        used_bytes = self.swapper._store.counts.held_bytes
        self.most_bytes = max(self.most_bytes, used_bytes)
        return used_bytes

    def peak_bytes(self) -> int:
        return self.used_bytes()

    def copy_out(self, host: torch.Tensor, device: torch.Tensor) -> CopyEvent:
        event = super().copy_out(host, device)
        self.begun.append(("out", event))
        return event

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> CopyEvent:
        event = super().copy_in(device, host)
        self.begun.append(("in", event))
        return event

    def wait(self, event: CopyEvent) -> None:
        self.at_once += bool(self.begun) and self.begun[-1] == ("in", event)
        super().wait(event)


class Full(Counted):
    """There is no memory for what comes back early: two attempts fail, and the one after them, when
    the tensor is needed, does not."""

    failed = 0

    def alloc_like(self, host: torch.Tensor) -> torch.Tensor:
        if self.failed % 3 < 2:
            self.failed += 1
            raise torch.OutOfMemoryError("no room")
        self.failed += 1
        return super().alloc_like(host)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(LAYERS)))


def trained(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def penalised(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.square().mean() + slope.square().sum()).backward()


def run(
    step: Callable[[nn.Module, torch.Tensor], None], passes: int, backend: Counted | None = None
) -> tuple[Counted, Swapper]:
    """The gradients are those of a plain run. The last pass is the one that is told of."""
    model, plain = net(), net()
    backend = backend or Counted()
    swapper = backend.swapper = Swapper(
        backend, budget_bytes=BUDGET_BYTES, link=LINK, min_bytes=SIZE_BYTES
    )
    swapper.may_plan = False
    swapper._demand._surges[0] = SurgeShown(0, 0)  # nothing goes above the level
    with swapper:
        for i in range(passes):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(i))
            backend.begun.clear()
            backend.at_once = backend.most_bytes = 0
            for one in (model, plain):
                one.zero_grad()
            step(model, x)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                step(plain, x)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                if theirs.grad is None:
                    assert ours.grad is None
                else:
                    assert torch.equal(ours.grad, theirs.grad)
    return backend, swapper


def test_only_what_the_budget_lacks_leaves_and_it_is_back_before_it_is_used() -> None:
    backend, swapper = run(trained, passes=4)
    out = [event for way, event in backend.begun if way == "out"]
    back = [event for way, event in backend.begun if way == "in"]
    # Each layer saves one tensor, as the program's input is; the last copies begin early.
    assert LAYERS // 2 <= len(out) <= LAYERS // 2 + 3
    assert 0 < len(back) <= len(out)
    assert backend.at_once <= 1  # the one that is used last has none behind it
    assert backend.most_bytes <= BUDGET_BYTES + SIZE_BYTES
    assert swapper.report().spilled


def test_what_there_is_no_memory_for_comes_back_when_it_is_needed() -> None:
    backend, swapper = run(trained, passes=4, backend=Full())
    assert backend.failed > 3  # type: ignore[attr-defined]
    assert swapper.report().in_bytes


def test_a_graph_of_backward_itself_needs_the_room() -> None:
    _, swapper = run(penalised, passes=4)
    report = swapper.report()
    assert report.spilled
    assert report.in_bytes <= report.out_bytes  # nothing comes back only to leave again


@pytest.mark.parametrize("passes", [1, 7])
def test_tensors_that_nobody_uses_are_let_go(passes: int) -> None:
    _, swapper = run(lambda model, x: model(x).detach(), passes)
    assert swapper._store.counts.alive == 0
    assert swapper.report().in_bytes == 0


def test_a_new_plan_takes_no_host_memory_from_passes_without_one() -> None:
    """To reserve it again would stop the program."""
    pool = HostPool(CpuStandIn())
    blocks = [pool.take(SIZE_BYTES) for _ in range(3)]
    for block in blocks:
        pool.put(block)
    for _ in range(IDLE_PASSES - 1):
        pool.rest()
    taken_bytes = pool.taken_bytes
    pool.put(pool.take(SIZE_BYTES))
    assert pool.taken_bytes == taken_bytes
    for _ in range(IDLE_PASSES - 1):
        pool.rest()
    assert pool.taken_bytes >= 3 * SIZE_BYTES
    pool.rest()  # no pass has needed it for long
    assert pool.taken_bytes == 0


class Working(Counted):
    """Some passes need memory for their work that no offloading gives back."""

    beside_bytes = 0

    def peak_bytes(self) -> int:
        return self.used_bytes() + self.beside_bytes


def test_a_pass_that_never_fits_takes_no_room_from_others() -> None:
    """A generator whose one operation exceeds the budget, and a critic that fits: the critic's
    tensors stay as far as they fit, however many passes of the other have exceeded the budget."""
    backend = Working()
    swapper = backend.swapper = Swapper(
        backend, budget_bytes=BUDGET_BYTES, link=LINK, min_bytes=SIZE_BYTES
    )
    swapper.may_plan = False
    model, left = net(), []
    with swapper:
        for _ in range(12):
            for rows, beside_bytes in ((64, 0), (80, 2 * BUDGET_BYTES)):
                backend.begun.clear()
                backend.beside_bytes = beside_bytes
                trained(model, torch.randn(rows, 64))
                left.append(sum(way == "out" for way, _ in backend.begun))
    fits, never_fits = left[-2:]
    assert LAYERS // 2 <= fits <= LAYERS // 2 + 3
    assert never_fits > LAYERS // 2 + 3  # all that can leave does
    assert swapper._demand.offload_above_bytes(BUDGET_BYTES) == 0


def test_the_first_pass_under_a_budget_leaves_room_for_what_it_was_not_seen_to_need() -> None:
    """Passes that were watched before the budget was known have reached no level."""
    backend = Working()
    backend.beside_bytes = BUDGET_BYTES // 4
    swapper = backend.swapper = Swapper(
        backend, budget_bytes=2**40, link=LINK, min_bytes=SIZE_BYTES
    )
    swapper.may_plan = False
    model = net()
    with swapper:
        for _ in range(3):
            trained(model, torch.randn(64, 64))
        swapper.limit(BUDGET_BYTES)
        swapper.may_plan = False
        backend.most_bytes = 0
        trained(model, torch.randn(64, 64))
    assert 0 < backend.most_bytes <= BUDGET_BYTES - backend.beside_bytes
    assert swapper.report().spilled


def seen(passes: dict[int, int]) -> Demand:
    """After passes that begin with these events and go so far above their level."""
    demand = Swapper(CpuStandIn(), budget_bytes=BUDGET_BYTES, link=LINK)._demand
    for first, over_bytes in passes.items():
        demand.begin(first)
        demand.learn(demand.offload_above_bytes(BUDGET_BYTES) + over_bytes, BUDGET_BYTES)
    return demand


def room_bytes(demand: Demand, first: int) -> int:
    """What is left free for a pass that begins with this event."""
    demand.begin(first)
    return BUDGET_BYTES - demand.offload_above_bytes(BUDGET_BYTES)


def test_of_ever_new_passes_the_last_ones_are_remembered() -> None:
    demand = seen({first: first for first in range(1, 2 * MOST_SURGES)})
    assert len(demand._surges) == MOST_SURGES
    assert room_bytes(demand, 2 * MOST_SURGES - 1) == 2 * MOST_SURGES - 1


def test_room_is_left_as_for_the_passes_that_begin_the_most_alike() -> None:
    """Texts of changing lengths: a short one needs less room than a long one."""
    lengths = {100 * n: 10 * n for n in (10, 2, 8, 4)}
    demand = seen(lengths)
    assert [room_bytes(demand, first) for first in lengths] == list(lengths.values())
    assert demand._short_bytes == 0  # each began between two of which one went as far
    assert room_bytes(demand, 300) == 40
    assert room_bytes(demand, 500) == room_bytes(demand, 700) == 80
    assert room_bytes(demand, 10) == 20
    # More than all others: in proportion to the largest.
    assert room_bytes(demand, 1500) == 150
    assert room_bytes(demand, 10**9) == BUDGET_BYTES


def test_where_alike_passes_differ_room_is_left_for_that() -> None:
    demand = seen({100: 10, 200: 20, 150: 500, 400: 40})
    assert demand._short_bytes == 480
    assert room_bytes(demand, 300) == 500  # as far as any: less than 40 and 480
    assert room_bytes(demand, 100) == 10


def test_a_pass_that_exceeds_the_budget_makes_room_for_good() -> None:
    demand = seen({100: 10})
    demand.begin(100)
    demand.learn(BUDGET_BYTES + 90, BUDGET_BYTES)
    assert room_bytes(demand, 100) == 100
    demand.learn(BUDGET_BYTES - 50, BUDGET_BYTES)
    assert room_bytes(demand, 100) == 100


class Weighty(Counted):
    """Weights and state take most of the budget, and backward needs memory for its own work."""

    BUDGET_BYTES = 16 * SIZE_BYTES
    WEIGHTS_BYTES = 10 * SIZE_BYTES
    WORK_BYTES = SIZE_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.peaks: list[int] = []

    def used_bytes(self) -> int:
        used_bytes = super().used_bytes() + self.WEIGHTS_BYTES
        self.peak = max(self.peak, used_bytes)
        return used_bytes

    def peak_bytes(self) -> int:
        used_bytes = self.used_bytes()
        peak_bytes, self.peak = self.peak + self.WORK_BYTES, used_bytes
        self.peaks.append(peak_bytes)
        return peak_bytes


def test_a_level_that_is_out_of_reach_is_left_again() -> None:
    """The first level is below what weights take, so that everything leaves that can. That says
    nothing of how far passes go above a level that they can be kept at."""
    backend = Weighty()
    swapper = backend.swapper = Swapper(
        backend, budget_bytes=backend.BUDGET_BYTES, link=LINK, min_bytes=SIZE_BYTES
    )
    swapper.may_plan = False
    assert swapper._demand.offload_above_bytes(backend.BUDGET_BYTES) < backend.WEIGHTS_BYTES
    model, left = net(), []
    with swapper:
        for _ in range(8):
            before = swapper.report().spilled
            trained(model, torch.randn(64, 64))
            left.append(swapper.report().spilled - before)
    left_free = backend.BUDGET_BYTES - swapper._demand.offload_above_bytes(backend.BUDGET_BYTES)
    assert left_free <= backend.WORK_BYTES + 2 * SIZE_BYTES
    assert left[-1] == left[-2] < left[0]
    assert max(backend.peaks[1:]) <= backend.BUDGET_BYTES
