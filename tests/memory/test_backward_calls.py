"""Our hooks on saved tensors are away while a backward runs that saves nothing, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.saved_hooks import innermost_are_ours
from kilter.memory.plan.problem import H200_PCIE5
from kilter.observe import torch_internals

WIDTH, ROWS = 16, 64
Backward = Callable[[Tensor, "Training"], None]


class Training:
    """Notes in each backward whether our hooks were there."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-2)
        self.there: list[bool] = []
        self.losses: list[float] = []

    def note(self, gradient: Tensor) -> None:
        self.there.append(innermost_are_ours())

    def step(self, backward: Backward = lambda loss, training: loss.backward()) -> None:
        hidden = self.net[:2](torch.randn(ROWS, WIDTH))
        hidden.register_hook(self.note)
        loss = self.net[2:](hidden).square().mean()
        del hidden
        backward(loss, self)
        self.losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def swapper() -> Swapper:
    return Swapper(CpuStandIn(), budget_bytes=2**40, link=H200_PCIE5, min_bytes=1024)


@pytest.fixture
def under_a_plan(swapper: Swapper) -> Iterator[Training]:
    with swapper:
        training = Training()
        for _ in range(6):
            training.step()
        assert training.there[0]
        assert not training.there[-1]
        training.there.clear()
        yield training
        assert innermost_are_ours() or not swapper.hooks.in_thread
    assert torch_internals.top_saved_hooks(True) is None


def test_they_are_there_again_after_each_backward(under_a_plan: Training) -> None:
    assert innermost_are_ours()
    under_a_plan.step()
    assert under_a_plan.there == [False]
    assert innermost_are_ours()


def test_watched_passes_have_them(swapper: Swapper) -> None:
    training = Training()
    with swapper:
        while not swapper.planned:
            training.step()
    assert all(training.there[:-1])


def test_a_graph_of_backward_is_saved_with_them(under_a_plan: Training) -> None:
    def penalised(loss: Tensor, training: Training) -> None:
        (gradient,) = torch.autograd.grad(loss, training.net[0].weight, create_graph=True)
        (loss + gradient.square().sum()).backward()

    under_a_plan.step(penalised)
    assert under_a_plan.there[0]


def test_hooks_of_the_program_stay_above_them(under_a_plan: Training) -> None:
    def own(loss: Tensor, training: Training) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) as _:
            loss.backward()
            assert torch_internals.top_saved_hooks(True) is not None
            assert not innermost_are_ours()

    under_a_plan.step(own)
    under_a_plan.step()
    assert under_a_plan.there == [False, False]


class Error(Exception):
    pass


def fail(*_: Any) -> None:
    raise Error


def test_they_come_back_after_an_error_of_the_program(under_a_plan: Training) -> None:
    def failing(loss: Tensor, training: Training) -> None:
        loss.register_hook(fail)
        loss.backward()

    with pytest.raises(Error):
        under_a_plan.step(failing)
    assert innermost_are_ours()
    under_a_plan.step()


@pytest.mark.parametrize("call", ["stand_aside", "come_back"])
def test_an_alarm_in_between_leaves_no_hooks_too_few_or_too_many(
    under_a_plan: Training, swapper: Swapper, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the call has done its work."""
    done = getattr(swapper.hooks, call)

    def rings() -> None:
        done()
        monkeypatch.undo()
        raise Error

    monkeypatch.setattr(swapper.hooks, call, rings)
    with pytest.raises(Error):
        under_a_plan.step()
    assert innermost_are_ours()
    under_a_plan.step()
    assert innermost_are_ours()


def test_what_is_saved_in_it_nonetheless_is_right() -> None:
    """In one backward of many a forward of the program's runs, and a backward within."""

    def nested(loss: Tensor, training: Training) -> None:
        def again(gradient: Tensor) -> Tensor:
            with torch.enable_grad():
                x = torch.ones(ROWS, WIDTH, requires_grad=True)
                (of_x,) = torch.autograd.grad(x.sin().cos().sum(), x)
            return gradient * (1 + of_x.mean())

        loss.register_hook(again)
        loss.backward()

    def run(swapper: Swapper | None) -> tuple[list[float], list[Tensor]]:
        training = Training()
        for number in range(12):
            training.step(nested) if number == 9 else training.step()
        return training.losses, list(training.net.parameters())

    plain = run(None)
    swapper = Swapper(CpuStandIn(), budget_bytes=2**40, link=H200_PCIE5, min_bytes=1024)
    with swapper:
        governed = run(swapper)
        assert innermost_are_ours()
    assert governed[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(governed[1], plain[1], strict=True))


def test_an_end_within_a_backward_takes_them_away(swapper: Swapper) -> None:
    training = Training()

    def ends(loss: Tensor, training: Training) -> None:
        loss.register_hook(lambda _: swapper.__exit__(None, None, None))
        loss.backward()

    swapper.__enter__()
    for _ in range(6):
        training.step()
    assert not training.there[-1]
    training.step(ends)
    assert torch_internals.top_saved_hooks(True) is None
    training.step()


def test_an_error_of_ours_is_none_of_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    from kilter.session.fence import Fence

    told: list[str] = []
    fence = Fence(lambda where, error: told.append(where))
    swapper = Swapper(
        CpuStandIn(), budget_bytes=2**40, link=H200_PCIE5, min_bytes=1024, fence=fence
    )
    training = Training()
    with swapper:
        for _ in range(6):
            training.step()
        monkeypatch.setattr(swapper.hooks, "stand_aside", fail)
        training.step()
        training.step()
    assert len(told) == 1
    assert fence.down
