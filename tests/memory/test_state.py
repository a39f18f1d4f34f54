"""Gradients consumed in backward and optimizer state that streams give the plain run's numbers.

The device is the CPU stand-in: copies come as late as they may, and what is evicted is poisoned.
"""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kilter.core.errors import UsageError
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.governed_optimizer import StepSeen
from kilter.memory.engine.gradients import GradientConsumed
from kilter.memory.engine.state import StateMover, StateReport
from kilter.memory.host_memory import HostLimit
from kilter.memory.plan.problem import Link
from kilter.session.fence import Fence

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
STEPS = 8
WIDTH = 24
LAYERS = 5

Make = Callable[[nn.Module], torch.optim.Optimizer]


def network() -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(*layers)


def mover(**options: Any) -> StateMover:
    options = {"gradients": "consume", "bucket_bytes": 2000, "min_bytes": 512, **options}
    return StateMover(CpuStandIn(lag=options.pop("lag", 8)), link=LINK, **options)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    net(torch.randn(6, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [p.detach().clone() for p in net.parameters()]
    for p in net.parameters():
        for _, value in sorted(optimizer.state[p].items()):
            if isinstance(value, torch.Tensor):
                found.append(value.clone())
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def trained(
    make: Make, governed: StateMover | None = None, steps: int = STEPS
) -> tuple[list[torch.Tensor], StateReport | None]:
    net = network()
    optimizer = make(net)
    report = None
    with governed or nullcontext():
        for number in range(steps):
            step(net, optimizer, number)
        if governed is not None:
            report = governed.report()
    return values(net, optimizer), report


def adamw(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, **options)


def two_groups(net: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


OPTIMIZERS: dict[str, Make] = {
    "adamw for-loop": lambda net: adamw(net, foreach=False),
    "adamw foreach": lambda net: adamw(net, foreach=True),
    "adamw fused": lambda net: adamw(net, fused=True),
    "adamw amsgrad": lambda net: adamw(net, amsgrad=True, maximize=True),
    "adamw two groups": two_groups,
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(1e-2), fused=True),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=1e-2),
    "sgd momentum": lambda net: torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9),
    "sgd foreach": lambda net: torch.optim.SGD(
        net.parameters(), lr=1e-2, momentum=0.9, nesterov=True, foreach=True
    ),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.5),
    "adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=1e-2),
    "adadelta": lambda net: torch.optim.Adadelta(net.parameters()),
    "adamax": lambda net: torch.optim.Adamax(net.parameters()),
    "nadam": lambda net: torch.optim.NAdam(net.parameters(), foreach=True),
    "radam": lambda net: torch.optim.RAdam(net.parameters()),
}
MODES: dict[str, dict[str, Any]] = {
    "consumed": {},
    "consumed and streamed": {"room_bytes": 16_000},
    "streamed in the step": {"room_bytes": 16_000, "gradients": "keep"},
    "everything streamed": {"room_bytes": 7_700, "lag": 2},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *itertools.product(OPTIMIZERS, ("streamed in the step", "everything streamed")),
        *itertools.product(list(OPTIMIZERS)[:5], ("consumed", "consumed and streamed")),
    ],
)
def test_same_numbers(name: str, mode: str) -> None:
    plain, _ = trained(OPTIMIZERS[name])
    ours, report = trained(OPTIMIZERS[name], mover(**MODES[mode]))
    assert same(plain, ours)
    assert report is not None
    assert report.consuming == (MODES[mode].get("gradients") != "keep")
    assert (report.visits > 0) == report.consuming
    if "room_bytes" in MODES[mode] and name not in ("sgd",):
        moves = [plan.moved_bytes for plan in report.plans]
        assert (report.out_bytes > 0) == (sum(moves) > 0)
        assert report.state_bytes <= MODES[mode]["room_bytes"]
        assert not any("stays" in text for text in map(str, report.refused))


def test_a_room_below_one_bucket() -> None:
    """One bucket at a time then, and it is said."""
    plain, _ = trained(adamw)
    ours, report = trained(adamw, mover(room_bytes=1_000))
    assert same(plain, ours)
    assert report is not None
    assert report.plans[0].peak_bytes == 5 * 1024
    assert report.late == 0
    assert report.state_bytes == 0
    assert any("no less than" in text for text in map(str, report.refused))


def checkpointed(net: nn.Sequential, reentrant: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        for first in range(0, len(net), 3):
            x = checkpoint(net[first : first + 3], x, use_reentrant=reentrant)
        return x

    return forward


WAYS: dict[str, Callable[[nn.Sequential], Any]] = {
    "checkpointing": lambda net: checkpointed(net, False),
    "reentrant checkpointing": lambda net: checkpointed(net, True),
    "compiled": lambda net: torch.compile(net, backend="aot_eager"),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_run_a_model(way: str) -> None:
    found = []
    for governed in (None, mover(room_bytes=7_700)):
        torch._dynamo.reset()
        net = network()
        optimizer = adamw(net)
        model = WAYS[way](net)  # type: ignore[arg-type]
        with governed or nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the framework, about hooks on modules
            for number in range(STEPS):
                torch.manual_seed(number)
                model(torch.randn(6, WIDTH, requires_grad=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if governed is not None:
                assert governed.report().visits > 0
                assert governed.report().offloaded_bytes > 0
        found.append(values(net, optimizer))
    assert same(*found)


def test_state_leaves() -> None:
    """AdamW of this net has 25 kB of state that can leave, in five buckets."""
    _, report = trained(adamw, mover(room_bytes=10_000))
    assert report is not None
    assert report.offloaded_bytes > report.state_bytes
    assert report.out_bytes >= (STEPS - 1) * report.plans[0].moved_bytes
    assert report.late == 0
    assert report.gradient_bytes < sum(p.nbytes for p in network().parameters()) / 3


def capturable(net: nn.Module) -> torch.optim.Optimizer:
    """The optimizers of the framework that may be captured refuse to step on a CPU. This one reads
    the option as little as the engine's own copy of the groups would."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    for group in optimizer.param_groups:
        group["capturable"] = True
    return optimizer


def not_capturable(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)


def test_an_optimizer_that_may_be_captured_keeps_gradients_and_state() -> None:
    """A CUDA graph of its step keeps the addresses of both."""
    plain, _ = trained(capturable)
    found, report = trained(capturable, mover(room_bytes=0))
    assert same(plain, found)
    assert report is not None
    assert not report.consuming
    assert report.offloaded_bytes == report.visits == 0
    why = "its step may be captured in a CUDA graph, which keeps addresses"
    texts = [refusal.text for refusal in report.refused]
    assert f"gradients are kept: {why}" in texts
    assert f"optimizer state stays: {why}" in texts
    _, other = trained(not_capturable, mover(room_bytes=0))
    assert other is not None
    assert other.offloaded_bytes > 0


# What forbids it: seen while it is watched


def scaled(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(STEPS):
        torch.manual_seed(number)
        scaler.scale(net(torch.randn(6, WIDTH)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield


def accumulated(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for number in range(STEPS):
        torch.manual_seed(number)
        for _ in range(2):
            net(torch.randn(6, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def clipped(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for number in range(STEPS):
        torch.manual_seed(number)
        net(torch.randn(6, WIDTH)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        yield


def in_place(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        torch.manual_seed(number)
        net(torch.randn(6, WIDTH)).square().mean().backward()
        optimizer.step()
        yield


def never_zeroed(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for number in range(STEPS):
        torch.manual_seed(number)
        net(torch.randn(6, WIDTH)).square().mean().backward()
        optimizer.step()
        yield


def closure(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for number in range(STEPS):
        torch.manual_seed(number)

        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.randn(6, WIDTH)).square().mean()
            loss.backward()
            return loss

        optimizer.step(evaluate)  # type: ignore[arg-type]
        yield


def warmed_up(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The learning rate is set after backward."""
    for number in range(STEPS):
        torch.manual_seed(number)
        net(torch.randn(6, WIDTH)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = 1e-3 * (number + 1)
        optimizer.step()
        optimizer.zero_grad()
        yield


def skipped(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for number in range(STEPS):
        torch.manual_seed(number)
        net(torch.randn(6, WIDTH)).square().mean().backward()
        if number % 2:
            optimizer.step()
        optimizer.zero_grad()
        yield


def own_hooks(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    def halve(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            torch._foreach_mul_([parameter.grad], 0.5)  # type: ignore[list-item]

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(halve)
    for number in range(STEPS):
        step(net, optimizer, number)
        yield


def graph_of_gradients(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for number in range(STEPS):
        torch.manual_seed(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net(torch.randn(6, WIDTH)).square().mean().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        yield


def stepped_twice(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for number in range(STEPS):
        torch.manual_seed(number)
        net(torch.randn(6, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        yield


def clamped(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for number in range(STEPS):
        torch.manual_seed(number)
        net(torch.randn(6, WIDTH)).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p.clamp_(-0.1, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        yield


def looked_again(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The loss is evaluated between backward and step."""
    for number in range(STEPS):
        torch.manual_seed(number)
        net(torch.randn(6, WIDTH)).square().mean().backward()
        with torch.no_grad():
            scale = float(net(torch.ones(6, WIDTH)).square().mean())
        optimizer.step()
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1 - 1e-3 * min(1.0, scale))
        optimizer.zero_grad()
        yield


LOOPS: dict[str, tuple[Callable[..., Iterator[None]], str]] = {
    "scaler": (scaled, "is read"),
    "accumulation": (accumulated, "accumulate"),
    "clipping": (clipped, "is read"),
    "zeroed in place": (in_place, "accumulate"),
    "never zeroed": (never_zeroed, "accumulate"),
    "closure": (closure, "closure"),
    "options after backward": (warmed_up, "options change"),
    "skipped steps": (skipped, "zeroed before the step"),
    "hooks on gradients": (own_hooks, "hooks of the program"),
    "two steps": (stepped_twice, "two steps"),
    "weights changed": (clamped, "parameters are changed"),
    "weights read": (looked_again, "modules run"),
    "graph of gradients": (graph_of_gradients, "graph"),
}


def test_state_made_before_keeps_its_order() -> None:
    """`state_dict()` lists it in that order, and a file that holds it differs with it."""
    net = network()
    optimizer = adamw(net)
    *_, last = net.parameters()
    last.grad = torch.ones_like(last)
    optimizer.step()
    step(net, optimizer, 0)
    order = [id(p) for p in optimizer.state]
    with mover(gradients="keep"):
        for number in range(1, STEPS):
            step(net, optimizer, number)
    assert order[0] == id(last)
    assert [id(p) for p in optimizer.state] == order


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("room_bytes", [None, 16_000])
def test_gradients_are_kept(name: str, room_bytes: int | None) -> None:
    loop, reason = LOOPS[name]
    found = []
    for governed in (None, mover(room_bytes=room_bytes)):
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with governed or nullcontext():
            for _ in loop(net, optimizer):
                pass
            if governed is not None:
                report = governed.report()
                assert report.visits == 0
                assert any(reason in text for text in map(str, report.refused)), report.refused
        found.append(values(net, optimizer))
    assert same(*found)
    assert "grad" not in vars(nn.Parameter)


# Departures that nobody could have known of, first made in iteration 10


def late_rate(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(net)
    if number >= 10:
        optimizer.param_groups[0]["lr"] = 0.1 / number
    optimizer.step()
    optimizer.zero_grad()


def bad_loss(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(net)
    if number < 10 or number % 2:
        optimizer.step()
    optimizer.zero_grad()


def late_clipping(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(net)
    if number >= 10:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()


def late_accumulation(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for _ in range(1 if number < 10 else 2):
        backward(net)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("room_bytes", [None, 7_700])
@pytest.mark.parametrize("gradients", ["auto", "keep"])
@pytest.mark.parametrize("late", [late_rate, bad_loss, late_clipping, late_accumulation])
def test_only_who_asks_for_it_has_gradients_consumed(
    late: Callable[..., None], gradients: str, room_bytes: int | None
) -> None:
    found = []
    for governed in (None, mover(gradients=gradients, room_bytes=room_bytes)):
        net = network()
        optimizer = adamw(net)
        with governed or nullcontext():
            for number in range(14):
                late(net, optimizer, number)
            if governed is not None:
                report = governed.report()
                advice = [
                    text for text in map(str, report.refused) if "--gradients consume" in text
                ]
                assert len(advice) == (gradients == "auto")
                assert not report.consuming
                assert (report.offloaded_bytes > 0) == (room_bytes is not None)
                assert "grad" not in vars(nn.Parameter)
        found.append(values(net, optimizer))
    assert same(*found)


# What is seen too late is refused, never computed wrongly


def consuming(**options: Any) -> tuple[StateMover, nn.Module, torch.optim.Optimizer]:
    net = network()
    return mover(**options), net, adamw(net)


def backward(net: nn.Module) -> None:
    net(torch.ones(6, WIDTH)).square().mean().backward()


def reads(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def reads_after_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    optimizer.step()
    _ = [p.grad for p in net.parameters()]


def backward_twice(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    backward(net)


def step_left_out(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    optimizer.zero_grad()


def zero_left_out(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    optimizer.step()
    backward(net)


def late_option(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def late_closure(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    optimizer.step(lambda: 0.0)  # type: ignore[arg-type]


def sets(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    next(net.parameters()).grad = None


def steps_twice(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    optimizer.step()
    optimizer.step()


def changes(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    with torch.no_grad():
        next(net.parameters()).mul_(0.5)
    optimizer.step()


def looks(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    net(torch.ones(6, WIDTH))


def checkpoints(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(net)
    optimizer.state_dict()


@pytest.mark.parametrize(
    "departure",
    [
        reads,
        reads_after_step,
        backward_twice,
        step_left_out,
        zero_left_out,
        late_option,
        late_closure,
        sets,
        checkpoints,
        steps_twice,
        changes,
        looks,
    ],
)
def test_refusal(departure: Callable[..., None]) -> None:
    governed, net, optimizer = consuming()
    with governed:
        for number in range(4):
            step(net, optimizer, number)
        assert governed.report().consuming
        with pytest.raises(GradientConsumed, match="--gradients consume"):
            departure(net, optimizer)


def test_error_in_backward_then_zero_grad_is_refused() -> None:
    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("broken")

    governed, net, optimizer = consuming()
    with governed:
        for number in range(4):
            step(net, optimizer, number)
        half = len(net) // 2  # type: ignore[arg-type]
        middle = net[:half](torch.ones(6, WIDTH))  # type: ignore[index]
        loss = net[half:](Break.apply(middle)).square().mean()  # type: ignore[index]
        with pytest.raises(ArithmeticError):
            loss.backward()
        with pytest.raises(GradientConsumed, match="zeroed before the step"):
            optimizer.zero_grad()
    assert any("no step followed" in text for text in map(str, governed.report().refused))


# Deviations with a right answer


def partly(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Every third step only the last layers have gradients."""
    torch.manual_seed(number)
    x = torch.randn(6, WIDTH)
    half = len(net) // 2  # type: ignore[arg-type]
    with torch.set_grad_enabled(number % 3 != 2):
        x = net[:half](x)  # type: ignore[index]
    net[half:](x).square().mean().backward()  # type: ignore[index]
    optimizer.step()
    optimizer.zero_grad()


def late_group(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Fine-tuning that thaws a layer: it joins the optimizer after five steps."""
    if number == 0:
        del optimizer.param_groups[0]["params"][:2]
        for p in list(net.parameters())[:2]:
            p.requires_grad_(False)
    if number == 5:
        thawed = list(net.parameters())[:2]
        for p in thawed:
            p.requires_grad_(True)
        optimizer.add_param_group({"params": thawed, "lr": 1e-3})
    step(net, optimizer, number)


def evaluated(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    step(net, optimizer, number)
    with torch.no_grad():
        net(torch.ones(3, WIDTH))


def saved_and_loaded(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    step(net, optimizer, number)
    if number in (1, 5):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        for p in net.parameters():  # what is loaded matters, not what is there
            for value in optimizer.state[p].values():
                value.zero_()
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))


def scheduled(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    if number == 0:
        optimizer.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # type: ignore[attr-defined]
    step(net, optimizer, number)
    optimizer.schedule.step()  # type: ignore[attr-defined]


def zeroed_in_place_late(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    backward(net)
    optimizer.step()
    optimizer.zero_grad(set_to_none=number < 5)
    if number >= 5:
        assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


def closure_late(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    if number < 5:
        step(net, optimizer, number)
        return

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        return net(torch.ones(6, WIDTH)).square().mean()  # type: ignore[no-any-return]

    optimizer.step(evaluate)  # type: ignore[arg-type]


DEVIATIONS = [partly, late_group, evaluated, saved_and_loaded, scheduled, zeroed_in_place_late,
              closure_late]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_right_answer(deviation: Callable[..., None], mode: str) -> None:
    found = []
    for governed in (None, mover(**MODES[mode])):
        net = network()
        optimizer = adamw(net)
        with governed or nullcontext():
            for number in range(STEPS + 2):
                deviation(net, optimizer, number)
        found.append(values(net, optimizer))
    assert same(*found)


@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers(mode: str) -> None:
    found = []
    for governed in (None, mover(**MODES[mode])):
        nets = [network(), network()]
        optimizers = [adamw(net) for net in nets]
        with governed or nullcontext():
            for number in range(STEPS):
                for net, optimizer in zip(nets, optimizers, strict=True):
                    step(net, optimizer, number)
        found.append([v for pair in zip(nets, optimizers, strict=True) for v in values(*pair)])
    assert same(*found)


def test_parameter_of_two_optimizers_is_kept() -> None:
    net = network()
    one, two = adamw(net), torch.optim.SGD(net.parameters(), lr=1e-2)
    with mover(room_bytes=16_000) as governed:
        for number in range(STEPS):
            step(net, one, number)
            step(net, two, number)
        report = governed.report()
    assert not report.consuming
    assert any("two optimizers" in text for text in map(str, report.refused))


def test_tied_weights_and_frozen_ones() -> None:
    found = []
    for governed in (None, mover(room_bytes=16_000)):
        net = network()
        net[3].weight = net[0].weight  # type: ignore[index, union-attr]
        for p in net[6].parameters():  # type: ignore[index]
            p.requires_grad_(False)
        optimizer = adamw(net)
        with governed or nullcontext():
            for number in range(STEPS):
                step(net, optimizer, number)
            if governed is not None:
                assert governed.report().visits > 0
        found.append(values(net, optimizer))
    assert same(*found)


def test_user_hooks_of_the_step_and_scheduler_see_one_step() -> None:
    net = network()
    optimizer = adamw(net)
    before, after = [], []
    optimizer.register_step_pre_hook(lambda *_: before.append(1))
    optimizer.register_step_post_hook(lambda *_: after.append(1))
    with mover(room_bytes=7_700):
        for number in range(STEPS):
            step(net, optimizer, number)
    assert len(before) == len(after) == STEPS


def test_hook_of_the_step_that_changes_gradients() -> None:
    found = []
    for governed in (None, mover(room_bytes=16_000)):
        net = network()
        optimizer = adamw(net)

        def halve(*_: Any, net: nn.Module = net) -> None:
            for p in net.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)

        with governed or nullcontext():
            for number in range(STEPS):
                if number == 1:
                    optimizer.register_step_pre_hook(halve)
                step(net, optimizer, number)
        found.append(values(net, optimizer))
    assert same(*found)


def test_gradients_stay_after_a_streamed_step() -> None:
    net = network()
    optimizer = adamw(net)
    with mover(room_bytes=7_700, gradients="keep"):
        for _ in range(4):
            backward(net)
            gradients = [p.grad for p in net.parameters()]
            optimizer.step()
            assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
            optimizer.zero_grad()


class Filled(CpuStandIn):
    """A device on which so much is in use beside the state."""

    def __init__(self, beside_bytes: int) -> None:
        super().__init__(lag=8)
        self.beside_bytes = beside_bytes
        self.mover: StateMover | None = None
        self.most_bytes = 0

    def used_bytes(self) -> int:
        assert self.mover is not None
        return self.beside_bytes + self.mover._stream.held_bytes

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> Any:
        self.most_bytes = max(self.most_bytes, self.used_bytes() + device.numel())
        return super().copy_in(device, host)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("later_bytes", [100_000, 125_000])
def test_state_has_the_room_that_a_step_leaves(fused: bool, later_bytes: int) -> None:
    """All that streams comes back at once, beside the update of what stays, if there is room for it
    in a fused step. Later steps may have less: they are planned anew."""
    plain, _ = trained(lambda net: adamw(net, fused=fused))
    net = network()
    optimizer = adamw(net, fused=fused)
    device = Filled(100_000)
    device.mover = StateMover(
        device, link=LINK, gradients="keep", room_bytes=16_000, bucket_bytes=2048, min_bytes=256
    )
    budget_bytes = 145_000
    device.mover.keep_within(budget_bytes)
    with device.mover:
        for number in range(STEPS):
            if number == 4:
                device.beside_bytes = later_bytes
            step(net, optimizer, number)
            if number == 4:  # planned anew since
                device.most_bytes = 0
        report, most_bytes = device.mover.report(), device.most_bytes
    (plan,) = report.plans
    assert report.state_bytes <= 16_000
    if later_bytes == 100_000:
        assert (plan.peak_bytes > 16_000) == fused
        assert set(plan.begin) == plan.streamed or not fused
        assert report.late == 0
    assert most_bytes <= budget_bytes
    assert same(plain, values(net, optimizer))


@pytest.mark.parametrize(("gradients", "buckets"), [("keep", 100), ("consume", 40)])
def test_state_is_cut_finer_where_gradients_are_kept(gradients: str, buckets: int) -> None:
    """Less of it is in flight then, and only what streams costs a call of the optimizer."""

    def steps() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(200)))
        optimizer = adamw(net)
        for number in range(STEPS):
            step(net, optimizer, number)
        return net, optimizer

    plain = values(*steps())
    half_bytes = 200 * WIDTH * WIDTH * 4
    options = {"gradients": gradients, "bucket_bytes": None, "min_bytes": 256}
    with mover(room_bytes=half_bytes, **options) as engine:
        trained_now = steps()  # held, since its plan goes with it
        (plan,) = engine.report().plans
    assert len(plan.load) == buckets
    assert plan.streamed
    assert same(plain, values(*trained_now))


def test_between_steps_state_may_have_no_room_at_all() -> None:
    """One bucket at a time has to be there in a step, and has room there."""
    net = network()
    optimizer = adamw(net, fused=True)
    device = Filled(100_000)
    device.mover = StateMover(
        device, link=LINK, gradients="keep", room_bytes=0, bucket_bytes=2048, min_bytes=256
    )
    device.mover.keep_within(110_000)
    with device.mover:
        for number in range(STEPS):
            step(net, optimizer, number)
        report, most_bytes = device.mover.report(), device.most_bytes
    assert report.state_bytes == 0
    assert most_bytes <= 110_000
    assert not any(reason.code == "little_room" for reason in report.refused)
    assert same(trained(lambda net: adamw(net, fused=True))[0], values(net, optimizer))


def test_a_step_that_raises_is_done_again() -> None:
    """What streams was updated when the program's own part raised; the next step does the rest."""
    plain, _ = trained(adamw)
    net = network()
    optimizer = adamw(net)
    with mover(room_bytes=16_000, gradients="keep") as engine:
        for number in range(STEPS):
            if number == 4:
                torch.manual_seed(number)
                net(torch.randn(6, WIDTH)).square().mean().backward()
                engine._before_step(optimizer, (), {})  # and no `_after_step`
                assert any(p.grad is None for p in net.parameters())
                optimizer.step()
                assert all(p.grad is not None for p in net.parameters())
                optimizer.zero_grad()
            else:
                step(net, optimizer, number)
        assert engine.report().state_bytes <= 16_000
    assert same(plain, values(net, optimizer))


def test_no_host_memory() -> None:
    plain, _ = trained(adamw)
    net = network()
    optimizer = adamw(net)
    governed = StateMover(
        CpuStandIn(host=HostLimit(100)),
        link=LINK,
        gradients="consume",
        room_bytes=7_700,
        bucket_bytes=2000,
        min_bytes=512,
    )
    with governed:
        for number in range(STEPS):
            step(net, optimizer, number)
        report = governed.report()
    assert same(plain, values(net, optimizer))
    assert any("host memory" in text for text in map(str, report.refused))
    assert report.offloaded_bytes == 0


def test_state_that_does_not_come_home(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = trained(adamw)
    net = network()
    optimizer = adamw(net)
    governed = mover(room_bytes=7_700)
    with governed:
        for number in range(STEPS):
            step(net, optimizer, number)

        def full(bucket: Any) -> None:
            raise torch.OutOfMemoryError("full")

        monkeypatch.setattr(governed._stream, "settle", full)
    assert same(plain, values(net, optimizer))
    assert any("is on the host" in text for text in map(str, governed.report().refused))


def test_own_error_ends_at_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = trained(adamw)
    told: list[str] = []
    net = network()
    optimizer = adamw(net)
    governed = mover(room_bytes=7_700, gradients="keep", fence=Fence(lambda *e: told.append(e[1])))
    with governed:
        for number in range(STEPS):
            if number == 5:
                monkeypatch.setattr(governed._rounds, "begin", None)
            step(net, optimizer, number)
    assert same(plain, values(net, optimizer))
    assert len(told) == 1


def test_changed_is_told_when_consuming_begins_and_ends() -> None:
    told: list[bool] = []
    net = network()
    optimizer = adamw(net)
    governed = mover(changed=lambda: told.append(governed.report().consuming))
    with governed:
        for number in range(6):
            step(net, optimizer, number)
        optimizer.step(lambda: 0.0)  # type: ignore[arg-type]
    assert told == [True, False]


def test_updates_are_announced() -> None:
    seen: list[int] = []
    net = network()
    optimizer = adamw(net)
    with mover(before_update=lambda parameters: seen.extend(id(p) for p in parameters)):
        for number in range(4):
            step(net, optimizer, number)
    assert set(seen) == {id(p) for p in net.parameters()}


def test_optimizers_may_die() -> None:
    import gc
    import weakref

    with mover(room_bytes=7_700) as governed:
        net = network()
        optimizer = adamw(net)
        for number in range(STEPS):
            step(net, optimizer, number)
        gone = weakref.ref(optimizer)
        del net, optimizer
        gc.collect()
        assert gone() is None
        assert governed.report().state_bytes == governed.report().offloaded_bytes == 0


def test_unknown_optimizer_is_left_alone() -> None:
    """Rprop is not among those that were tested bucket by bucket."""
    found = []
    for governed in (None, mover(room_bytes=7_700)):
        net = network()
        optimizer = torch.optim.Rprop(net.parameters())
        with governed or nullcontext():
            for number in range(STEPS):
                step(net, optimizer, number)
            if governed is not None:
                assert any("Rprop" in text for text in map(str, governed.report().refused))
                assert "grad" not in vars(nn.Parameter)
        found.append(values(net, optimizer))
    assert same(*found)


def test_one_engine_at_a_time() -> None:
    with mover(), pytest.raises(UsageError, match="one memory engine"), mover():
        pass


def test_deep_copies_and_moves_of_the_module_still_work() -> None:
    net = network()
    optimizer = adamw(net)
    with mover():
        for number in range(4):
            step(net, optimizer, number)
        twin = copy.deepcopy(net)
        net.to(torch.float32)
        step(net, optimizer, 5)
    assert all(p.grad is None for p in twin.parameters())


def test_the_room_may_change() -> None:
    plain, _ = trained(adamw, steps=12)
    net = network()
    optimizer = adamw(net)
    away = []
    with mover() as governed:
        for number in range(12):
            if number == 4:
                assert governed.report().state_bytes == 5 * 5 * 1024
                governed.make_room(5 * 1024)
            if number == 8:
                governed.room_bytes = 16_000
            if number == 10:
                governed.room_bytes = None
            step(net, optimizer, number)
            away.append(governed.report().offloaded_bytes)
        assert governed.report().late == 0
    assert same(plain, values(net, optimizer))
    assert away[3] == 0 < away[8] < away[4] == 5 * 5 * 1024
    assert away[-1] == 0


def test_a_parameter_that_nobody_uses() -> None:
    """The gradients of its neighbours are consumed nevertheless."""
    found = []
    for governed in (None, mover(room_bytes=7_700)):
        net = network()
        net.extra = nn.Linear(WIDTH, WIDTH)
        optimizer = adamw(net)
        with governed or nullcontext():
            for number in range(STEPS):
                torch.manual_seed(number)
                net[0](torch.randn(6, WIDTH))  # type: ignore[index, operator]
                x = torch.randn(6, WIDTH)
                for layer in net[: 3 * LAYERS]:  # type: ignore[index]
                    x = layer(x)
                x.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if governed is not None:
                assert governed.report().visits == (STEPS - 3) * LAYERS
        found.append(values(net, optimizer))
    assert same(*found)


def test_hooks_after_the_step_see_gradients() -> None:
    net = network()
    optimizer = adamw(net)
    seen = []
    optimizer.register_step_post_hook(
        lambda *_: seen.append(all(p.grad is not None for p in net.parameters()))
    )
    with mover(room_bytes=7_700, gradients="keep"):
        for number in range(4):
            step(net, optimizer, number)
    assert seen == [True] * 4


def test_state_loaded_into_a_small_room() -> None:
    """What was loaded leaves before the next forward."""
    net = network()
    optimizer = adamw(net)
    with mover(room_bytes=7_700) as governed:
        for number in range(4):
            step(net, optimizer, number)
        optimizer.load_state_dict(optimizer.state_dict())
        assert governed.report().state_bytes <= 7_700


def test_processes_that_share_gradients(tmp_path: Any) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    found = []
    try:
        for governed in (None, mover(room_bytes=7_700)):
            net = network()
            whole = nn.parallel.DistributedDataParallel(net)
            optimizer = adamw(net)
            with governed or nullcontext():
                for number in range(STEPS):
                    step(whole, optimizer, number)
                if governed is not None:
                    assert any("processes" in text for text in map(str, governed.report().refused))
                    assert governed.report().offloaded_bytes > 0
            found.append(values(net, optimizer))
    finally:
        torch.distributed.destroy_process_group()
    assert same(*found)


def test_sharded_parameters(tmp_path: Any) -> None:
    """Their gradients are kept; their state streams, each process its own part."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    found = []
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        for governed in (None, mover(room_bytes=7_700)):
            net = network()
            for layer in net:  # type: ignore[attr-defined]
                torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
            torch.distributed.fsdp.fully_shard(net, mesh=mesh)
            optimizer = adamw(net)
            with governed or nullcontext():
                for number in range(STEPS):
                    step(net, optimizer, number)
                    if number == 5:
                        saved = optimizer.state_dict()["state"]
                        found += [s["exp_avg"].to_local().clone() for s in saved.values()]
                        del saved
                if governed is not None:
                    report = governed.report()
                    assert any("sharded" in text for text in map(str, report.refused))
                    assert report.offloaded_bytes > 0
                    assert report.state_bytes <= 7_700
            for p in net.parameters():
                found.append(p.detach().to_local())  # type: ignore[attr-defined]
                found += [
                    optimizer.state[p][key].to_local().clone() for key in ("exp_avg", "exp_avg_sq")
                ]
    finally:
        torch.distributed.destroy_process_group()
    half = len(found) // 2
    assert same(found[:half], found[half:])


# Beside the engine for saved tensors


@pytest.mark.parametrize("mode", MODES)
def test_beside_the_swapper(mode: str) -> None:
    found = []
    for governed in (False, True):
        net = network()
        optimizer = adamw(net)
        with (
            nullcontext()
            if not governed
            else Swapper(CpuStandIn(), budget_bytes=3_000, link=LINK, min_bytes=256) as swapper
        ):
            options = (
                MODES[mode]
                if swapper is None
                else {
                    **MODES[mode],
                    "before_update": swapper.before_update,
                    "changed": swapper.forget,
                }
            )
            with nullcontext() if swapper is None else mover(**options) as state:
                for number in range(16):
                    step(net, optimizer, number)
                if swapper is not None and state is not None:
                    assert swapper.report().planned > 2
                    assert state.report().late == 0
        found.append(values(net, optimizer))
    assert same(*found)


def test_updates_are_timed_wherever_they_are_done() -> None:
    """By the program's own step, by ours, or partly by each."""
    for ours, own in ((6, 2), (0, 8), (8, 0)):
        seen = StepSeen()
        for begun_s in range(ours):
            seen.updated(begun_s, begun_s + 0.5, 100)
        seen.own_step_begins(10.0, 100 * own)
        seen.ended(10.0 + 0.5 * own, lambda begin, end: end - begin)
        assert seen.update_s_per_byte == pytest.approx(0.005)
    seen.own_step_begins(20.0, 0)
    seen.ended(20.0, lambda begin, end: end - begin)
    assert seen.update_s_per_byte == pytest.approx(0.005)  # nothing new is known
