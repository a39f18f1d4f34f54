"""What the engine observes of a pass: storages once, first and last use, levels, recipes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kilter.app.report.memory import timeline_of
from kilter.core import codec
from kilter.core.label import Label
from kilter.core.trace import IterationTrace
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.engine import PassPlan
from kilter.memory.engine.pass_record import PassRecord, use_code
from kilter.memory.plan.choose import plan
from kilter.memory.plan.problem import Link, problem_of
from kilter.memory.schedule import schedule_of

LINK = Link(to_host_bytes_per_s=1e12, to_device_bytes_per_s=1e12, both_bytes_per_s=2e12)
ROW = 64 * 64 * 4
shows_saved = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"),
    reason="this PyTorch does not show what its nodes saved, so little is recomputed",
)


class Net(nn.Module):
    """h is saved by three operations and seen through a view; the activation is cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = torch.nn.functional.gelu(h) * h + h.t().exp()
        return self.down(h)


@pytest.fixture
def record() -> PassRecord:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    swapper = Swapper(CpuStandIn(), budget_bytes=10**12, link=LINK, min_bytes=1024)
    with swapper:
        for _ in range(8):
            net(torch.randn(64, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (found,) = swapper.records()
    return found


def test_each_storage_is_one_datum_however_often_it_is_saved(record: PassRecord) -> None:
    # Input, the linear layer's output (saved twice), GELU, the exponential, the sum, the result.
    assert [datum.size_bytes for datum in record.data] == [ROW] * 6


def test_uses_lie_in_order_and_backward_runs_backward(record: PassRecord) -> None:
    for datum in record.data:
        assert datum.needed_at is not None
        assert datum.packed_at < record.backward_from <= datum.needed_at
        assert datum.free_at is not None
        assert datum.packed_at < datum.free_at
    needed = [datum.needed_at for datum in record.data]
    assert needed[0] == max(n for n in needed if n is not None)


@shows_saved
def test_recipes_name_what_they_read_and_were_found_equal(record: PassRecord) -> None:
    kinds = {datum.recipe for datum in record.data if datum.recipe}
    assert {"gelu", "matrix product"} <= kinds
    for number, datum in enumerate(record.data):
        assert all(source < number for source in datum.sources)
        if datum.recipe is not None:
            assert datum.recompute_s is not None
            assert datum.recompute_s > 0
    assert record.data[0].recipe is None  # the input of the model is made by nobody


def test_levels_count_what_is_held(record: PassRecord) -> None:
    assert record.peak_bytes == 6 * ROW
    assert len(record.level_bytes) == len(record.operation_s) == len(record.events)
    assert record.passes >= 2


def test_each_datum_is_saved_before_it_is_used(record: PassRecord) -> None:
    numbers = record.numbers()
    for number, datum in enumerate(record.data):
        assert numbers.index(number) == datum.packed_at
        assert record.events[datum.packed_at] == datum.size_bytes
        assert datum.needed_at is not None
        assert record.events[datum.needed_at] == use_code(number)


def test_merging_takes_the_shortest_time_the_highest_level_and_the_latest_use(
    record: PassRecord,
) -> None:
    other = copy.deepcopy(record)
    other.operation_s = [t / 2 for t in record.operation_s]
    other.level_bytes = [level + 1 for level in record.level_bytes]
    assert other.data[0].free_at is not None
    other.data[0].free_at += 1
    other.data[1].free_at = None  # in that pass somebody held it all the time
    expected = other.data[0].free_at
    record.merge(other)
    assert record.operation_s == other.operation_s
    assert record.level_bytes == other.level_bytes
    assert record.data[0].free_at == expected
    assert record.data[1].free_at is None


def test_without_swapping_only_what_has_a_recipe_may_leave(record: PassRecord) -> None:
    budget = record.peak_bytes
    every, numbers = record.problem(link=LINK, budget_bytes=budget, min_bytes=1)
    some, remakable = record.problem(link=LINK, budget_bytes=budget, min_bytes=1, host_room_bytes=0)
    assert set(remakable) < set(numbers)
    assert len(some.intervals) < len(every.intervals)
    assert all(interval.recompute_s is not None for interval in some.intervals)


def test_the_pass_becomes_a_trace_that_plans(record: PassRecord) -> None:
    trace = record.trace(device="cpu", source="test")
    assert trace.label is Label.MEASURED
    again = codec.decode(codec.encode(trace), IterationTrace, where="memory")
    problem = problem_of(again, link=LINK, budget_bytes=4 * ROW, min_bytes=1)
    assert problem == record.problem(link=LINK, budget_bytes=4 * ROW, min_bytes=1)[0]
    found = plan(problem, "mix")
    assert found.feasible
    assert found.swapped + found.recomputed > 0


def test_a_plan_that_moves_nothing_is_written_down(record: PassRecord) -> None:
    """All tensors are smaller than those that may move."""
    problem, numbers = record.problem(link=LINK, budget_bytes=record.peak_bytes, min_bytes=2**30)
    assert not problem.intervals
    written = schedule_of(
        PassPlan(record, plan(problem), problem, numbers, ()), device="cpu", reason=""
    )
    assert written.kept == 0
    drawn = timeline_of(written.trace, written.plan)
    assert drawn is not None
    assert max(drawn.after_bytes) == record.peak_bytes


def test_sparse_tensors_are_left_to_autograd() -> None:
    dense, sparse = torch.randn(64, 64), torch.eye(64).to_sparse()

    def trained() -> torch.Tensor | None:
        weight = dense.clone().requires_grad_()
        for _ in range(3):
            torch.sparse.mm(sparse, weight).square().mean().backward()
        return weight.grad

    with Swapper(CpuStandIn(), budget_bytes=1, link=LINK, min_bytes=1):
        found = trained()
    plain = trained()
    assert found is not None
    assert plain is not None
    assert torch.equal(found, plain)


@shows_saved
def test_a_recipe_reads_nothing_that_an_earlier_pass_has_saved() -> None:
    """A graph that outlives its step goes on into the next pass, whose data have other numbers."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    swapper = Swapper(CpuStandIn(), budget_bytes=8 * ROW, link=LINK, min_bytes=1024)
    with swapper:
        for _ in range(10):
            hidden = torch.nn.functional.gelu(net(torch.randn(64, 64)))
            hidden.square().mean().backward(retain_graph=True)
            optimizer.step()
            later = torch.nn.functional.gelu(hidden).exp()  # begins another pass
            torch.autograd.grad(later.mean(), hidden)
            optimizer.zero_grad()
            del hidden, later
    records = swapper.records()
    assert records
    for record in records:
        for number, datum in enumerate(record.data):
            assert all(source < number for source in (*datum.sources, *datum.closed))
        record.problem(link=LINK, budget_bytes=ROW, min_bytes=1)
