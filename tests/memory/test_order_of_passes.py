"""Passes that begin alike and end otherwise, in an order that repeats: each runs under its plan."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.memory.steady_stand_in import SteadyStandIn
from torch import Tensor, nn

from kilter.memory.engine import Swapper
from kilter.memory.engine.next_pass import HOPELESS_EVERY, TRUSTED, PassOrder
from kilter.memory.engine.segments import ModuleCall
from kilter.memory.plan.problem import Link

WIDTH, ROWS = 32, 128
DATUM_BYTES = 4 * WIDTH * ROWS


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


def iteration(
    critic: nn.Module, generator: nn.Module, optimizers: list[Any], penalty: bool
) -> list[Tensor]:
    """A critic twice, the second time perhaps with the penalty on its gradient; its generator."""
    found = []
    for last in (False, True):
        real = torch.randn(ROWS, WIDTH)
        loss = critic(real).square().mean()
        if last and penalty:
            x = real.requires_grad_()
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            loss = loss + slope.square().mean()
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        found.append(loss.detach())
    loss = -critic(generator(torch.randn(ROWS, WIDTH))).mean()
    loss.backward()
    optimizers[1].step()
    optimizers[1].zero_grad()
    optimizers[0].zero_grad()
    return [*found, loss.detach()]


def trained(iterations: int, penalty: bool, swapper: Swapper | None) -> tuple[list[Tensor], int]:
    """Losses and parameters; the passes under a plan in the second half, less those departing."""
    critic, generator = network(), network()
    models = (critic, generator)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    found, before, after = [], (0, 0), (0, 0)
    for number in range(iterations):
        found += iteration(critic, generator, optimizers, penalty)
        if swapper is not None:
            report = swapper.report()
            after = report.planned, report.deviations
            before = after if number < iterations // 2 else before
    found += [p.detach() for model in models for p in model.parameters()]
    planned, departed = (b - a for a, b in zip(before, after, strict=True))
    return found, planned - 100 * departed


@pytest.mark.parametrize("penalty", [False, True], ids=["without", "with a second derivative"])
def test_a_critic_and_its_generator_are_planned(penalty: bool) -> None:
    plain, _ = trained(24, penalty, None)
    link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    with Swapper(
        SteadyStandIn(), budget_bytes=9 * DATUM_BYTES, link=link, min_bytes=DATUM_BYTES
    ) as swapper:
        governed, planned = trained(24, penalty, swapper)
    assert all(map(torch.equal, plain, governed))
    assert planned >= 3 * 11


def plan(*events: int) -> Any:
    return SimpleNamespace(events=events)


def test_a_plan_that_has_fitted_is_begun_with_again() -> None:
    """Also after a pass in between that comes once in a while."""
    order, usual, rare = PassOrder(), plan(1, 2), plan(1, 3)
    for number in range(40):
        begun = order.plan((rare, usual))
        now = rare if number % 16 == 15 else usual
        assert begun is usual or number < 12 or number % 16 < 4
        order.pass_ended(begun, now.events if now is begun else None, 1)


def test_passes_that_depart_at_random_do_not_cost_others_their_plan() -> None:
    order, usual, chance = PassOrder(), plan(1, 2), random.Random(0)
    without = 0
    for _ in range(1000):
        begun = order.plan((usual,))
        without += begun is None
        departs = chance.random() < 0.1
        order.pass_ended(begun, None if departs else usual.events, 1)
    assert without < 50


def test_where_every_plan_has_failed_none_is_begun_with() -> None:
    order = PassOrder()
    for _ in range(4):
        order.pass_ended(plan(1, 2), None, 1)
    assert order.plan([plan(1, 2)]) is None
    for _ in range(TRUSTED):
        order.pass_ended(None, (1, 2), 0)
    assert order.plan([]) is None


def test_a_pass_that_nobody_saw_is_taken_for_the_one_that_came_there_before() -> None:
    order, training = PassOrder(), plan(1, 2, 3)
    for _ in range(4):  # an evaluation after each training, and no plan for it
        order.pass_ended(training, training.events, 3)
        order.pass_ended(training, (1, 2), 2)
    for _ in range(4):
        assert order.plan([training]) is training
        order.pass_ended(training, training.events, 3)
        assert order.plan([training]) is None
        order.pass_unseen()


def test_passes_that_cannot_be_planned_are_seldom_watched_beside_others_that_can() -> None:
    """Both begin alike. In one of them the program holds all that it saves. (Watching a pass makes
    the device pause at each event.)"""
    net, held = network(), list[Tensor]()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    watched = []
    with Swapper(
        SteadyStandIn(), budget_bytes=6 * DATUM_BYTES, link=link, min_bytes=DATUM_BYTES
    ) as swapper:
        for number in range(80):
            x = torch.randn(ROWS, WIDTH)
            for layer in net:
                x = layer(x)
                if number % 2:
                    held.append(x)
            loss = (x.exp().exp() if number % 2 else x).square().mean()
            loss.backward()
            held.clear()
            optimizer.step()
            optimizer.zero_grad()
            watched.append(swapper.report().watched)
        report = swapper.report()
    assert len(report.plans) == 1
    assert report.planned > 30
    assert watched[-1] - watched[39] <= 40 // HOPELESS_EVERY


def test_a_trial_holds_nothing_in_the_next_pass() -> None:
    """The generator's tensors outlive the critic's pass, in which calls of modules were tried."""
    critic, generator = (
        nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in "1234")
        )
        for _ in range(2)
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (critic, generator)]
    link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    tried = 0
    with Swapper(
        SteadyStandIn(), budget_bytes=2**40, link=link, min_bytes=DATUM_BYTES, segments=True
    ):
        for _ in range(24):
            made = generator(torch.randn(ROWS, WIDTH))
            critic(made.detach()).square().mean().backward()
            calls = [weakref.ref(one) for one in gc.get_objects() if type(one) is ModuleCall]
            tried += len(calls)
            optimizers[0].step()
            loss = critic(made).mean()
            assert not any(one() for one in calls)
            loss.backward()
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert tried


def test_a_step_of_another_training_does_not_cut_a_pass_in_two() -> None:
    """It trains in a thread of its own, and steps at any moment."""
    net, others = network(), network()
    mine, theirs = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in (net, others))
    for parameter in others.parameters():
        parameter.grad = torch.zeros_like(parameter)
    link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    with Swapper(
        SteadyStandIn(), budget_bytes=5 * DATUM_BYTES, link=link, min_bytes=DATUM_BYTES
    ) as swapper:
        for number in range(24):
            x = torch.randn(ROWS, WIDTH)
            for place, layer in enumerate(net):
                x = layer(x)
                if place == number % 5:
                    thread = threading.Thread(target=theirs.step)
                    thread.start()
                    thread.join()
            x.square().mean().backward()
            mine.step()
            mine.zero_grad()
        report = swapper.report()
        assert len(swapper.records()) == 1
    assert report.planned > 15
    assert report.deviations == 0


def lazily_regularized(iterations: int, every: int, swapper: Swapper | None) -> list[Tensor]:
    """Losses and parameters; one iteration of `every` has another loss as well, in the same
    pass."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    found = []
    for number in range(iterations):
        loss = net(torch.randn(ROWS, WIDTH)).square().mean()
        if number % every == every - 1:
            loss = loss + net(torch.randn(ROWS, WIDTH)).exp().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(parameter.detach() for parameter in net.parameters())]


@pytest.mark.parametrize("every", [2, 8, 16])
def test_a_pass_that_comes_once_in_so_many_gets_a_plan_of_its_own(every: int) -> None:
    """It begins like the usual one."""
    plain = lazily_regularized(16 * every, every, None)
    link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    with Swapper(
        SteadyStandIn(), budget_bytes=5 * DATUM_BYTES, link=link, min_bytes=DATUM_BYTES
    ) as swapper:
        governed = lazily_regularized(16 * every, every, swapper)
        before = swapper.report()
        lazily_regularized(4 * every, every, swapper)
        after = swapper.report()
    assert all(map(torch.equal, plain, governed))
    assert len(before.plans) == 2
    assert after.planned - before.planned >= 4 * every - 1


def test_a_pass_that_has_no_plan_does_not_begin_with_that_of_another_each_time() -> None:
    """It comes once in eight times, and the budget cannot hold it."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    with Swapper(
        SteadyStandIn(), budget_bytes=4 * DATUM_BYTES, link=link, min_bytes=DATUM_BYTES
    ) as swapper:
        for number in range(160):
            x = torch.randn(ROWS, WIDTH).requires_grad_()
            loss = net(x).square().mean()
            if number % 8 == 7:
                (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
                loss = loss + slope.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        report = swapper.report()
    assert len(report.plans) == 1
    assert report.deviations <= 3
    assert report.planned >= 160 * 7 // 8 - 16


@pytest.mark.parametrize("every", [2, 3, 4, 5, 7, 8])
def test_a_pass_that_comes_after_several_others_is_known_by_its_place(every: int) -> None:
    """It begins like them. Where it would depart from their plan it is watched, and begins with its
    own as soon as it has one; they are not watched for its sake."""
    order, usual, rare = PassOrder(), plan(1, 2), plan(1, 3)
    plans = [usual]
    for number in range(30 * every):
        begun = order.plan(plans)
        now = usual if number % every else rare
        if begun is None and now is rare:
            plans = [usual, rare]  # it was watched, and planned at once
        assert begun is now or number < 20 * every
        order.pass_ended(begun, now.events if begun in (now, None) else None, 1)


@pytest.mark.parametrize("every", [4, 6])
def test_a_longer_pass_after_several_ordinary_ones_gets_a_plan(every: int) -> None:
    """All begin alike (a flow that is now and then run backwards as well)."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    reports = []
    with Swapper(
        SteadyStandIn(), budget_bytes=8 * DATUM_BYTES, link=link, min_bytes=DATUM_BYTES
    ) as swapper:
        for number in range(40 * every):
            y = net(torch.randn(ROWS, WIDTH))
            (y if (number + 1) % every else net(y)).square().mean().backward()
            del y
            optimizer.step()
            optimizer.zero_grad()
            reports.append(swapper.report())
    last, earlier = reports[-1], reports[-10 * every - 1]
    assert len(last.plans) == 2
    assert last.planned - earlier.planned == 10 * every
    assert last.deviations == earlier.deviations
    assert last.watched == earlier.watched


def test_one_departure_does_not_make_a_usual_pass_a_rare_one() -> None:
    """An evaluation after each training, which has no plan and is not watched any more."""
    order, training = PassOrder(), plan(1, 2, 3)

    def watched() -> None:
        order.pass_ended(None, training.events, 3)
        order.pass_ended(None, (1, 2), 2)

    for _ in range(3):
        watched()
    order.pass_ended(None, training.events, 3)
    order.pass_ended(training, None, 2)
    watched()
    for _ in range(20):
        assert order.plan([training]) is training
        order.pass_ended(training, training.events, 3)
        assert order.plan([training]) is None
        order.pass_unseen()
