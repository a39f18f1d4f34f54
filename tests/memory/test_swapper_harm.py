"""A training that the engine touches computes, sees and keeps what it would without.

Each program does something that the engine cannot foresee: it writes to tensors behind autograd's
back, looks at saved tensors, switches the collector, counts operations. The link is so slow that
data are recomputed where they can be.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kilter.core.units import show_bytes
from kilter.memory.engine import CpuStandIn, Swapper, SwapReport
from kilter.memory.plan.problem import Link
from kilter.session.fence import Fence

SLOW = Link(to_host_bytes_per_s=1e5, to_device_bytes_per_s=1e5, both_bytes_per_s=2e5)
WIDTH, ROWS, STEPS = 64, 256, 10
FROM = 7
"""Step from which the program does what it did not do while it was watched."""
shows_saved = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"),
    reason="this PyTorch does not show what its nodes saved",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor, held: list[Tensor] | None = None) -> Tensor:
        for layer in self.layers:
            x = self.norm(x)
            if held is not None:
                held.append(x)
            x = F.gelu(layer(x))
        return x


Step = Callable[[Net, Tensor, int], Tensor]
"""Forward and backward; the loss."""


class Outcome:
    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.told: list[tuple[str, str]] = []
        self.report: SwapReport | None = None

    def same(self, other: Outcome) -> bool:
        pairs = zip(self.values, other.values, strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def train(step: Step, share: float | None) -> Outcome:
    torch.manual_seed(0)
    found, net = Outcome(), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    swapper: Any = nullcontext()
    if share is not None:
        swapper = Swapper(
            CpuStandIn(),
            budget_bytes=int(share * (ROWS * WIDTH * 4) * 17),  # of what `Net` saves
            link=SLOW,
            min_bytes=1024,
            fence=Fence(lambda where, error: found.told.append((where, error))),
        )
    with swapper:
        for number in range(STEPS):
            torch.manual_seed(number)
            found.values.append(step(net, torch.randn(ROWS, WIDTH), number).detach().clone())
            found.values += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    found.values += [p.detach().clone() for p in net.parameters()]
    if share is not None:
        found.report = swapper.report()
    return found


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def bias_in_place(net: Net, x: Tensor, number: int) -> Tensor:
    loss = net(x).square().mean()
    if number >= FROM:
        with torch.no_grad():
            net.layers[2].bias.clamp_(-0.01, 0.01)
    return backward(loss)


def bias_through_data(net: Net, x: Tensor, number: int) -> Tensor:
    loss = net(x).square().mean()
    if number >= FROM:
        net.layers[2].bias.data.clamp_(-0.01, 0.01)
        net.norm.weight.data.mul_(1.5)
    return backward(loss)


def bias_after_its_use(net: Net, x: Tensor, number: int) -> Tensor:
    for i, layer in enumerate(net.layers):
        x = layer(net.norm(x))
        if number >= FROM and i == 2:  # what the layer has made is not saved yet
            with torch.no_grad():
                layer.bias.add_(0.5)
        if number >= FROM and i == 3:
            layer.bias.data.add_(0.5)
        x = F.gelu(x)
    return backward(x.square().mean())


def weight_under_autocast(net: Net, x: Tensor, number: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    loss = y.float().square().mean()
    if number >= FROM:
        with torch.no_grad():
            for layer in net.layers:
                layer.weight.clamp_(-0.1, 0.1)
    return backward(loss)


def weight_through_data(net: Net, x: Tensor, number: int) -> Tensor:
    loss = net(x).square().mean()
    if number >= FROM:
        for layer in net.layers:
            layer.weight.data.clamp_(-0.1, 0.1)
    return backward(loss)


def held_activation_through_data(net: Net, x: Tensor, number: int) -> Tensor:
    held: list[Tensor] = []
    loss = net(x, held).square().mean()
    if number >= FROM:
        held[3].data.mul_(1.5)
    return backward(loss)


def dropped_activation_through_data(net: Net, x: Tensor, number: int) -> Tensor:
    held: list[Tensor] = []
    loss = net(x, held).square().mean()
    if number >= FROM:
        held[3].data.mul_(1.5)
    held.clear()
    return backward(loss)


def activation_before_it_is_saved(net: Net, x: Tensor, number: int) -> Tensor:
    for layer in net.layers:
        x = layer(net.norm(x))
        if number >= FROM:
            with torch.no_grad():
                x[0] = 0.0
        x = F.gelu(x)
        if number >= FROM:
            x.data.mul_(0.5)
    return backward(x.square().mean())


def update_in_backward(net: Net, x: Tensor, number: int) -> Tensor:
    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=1e-3)

    handles = [p.register_post_accumulate_grad_hook(update) for p in net.parameters()]
    try:
        return backward(net(x).square().mean())
    finally:
        for handle in handles:
            handle.remove()


BEHIND_THE_BACK = (
    bias_in_place,
    bias_through_data,
    bias_after_its_use,
    weight_under_autocast,
    weight_through_data,
    held_activation_through_data,
    dropped_activation_through_data,
    activation_before_it_is_saved,
    update_in_backward,
)


@pytest.mark.parametrize("step", BEHIND_THE_BACK, ids=lambda step: step.__name__)
def test_writes_that_nobody_announces_change_nothing(step: Step) -> None:
    plain = train(step, None)
    recomputed = 0
    for share in (0.3, 0.7):
        ours = train(step, share)
        assert ours.same(plain)
        assert not ours.told
        assert ours.report is not None
        recomputed += ours.report.recomputed
    assert recomputed or not hasattr(torch._C._autograd.SavedTensor, "data")


@shows_saved
def test_weights_of_a_graph_that_autograd_refused_may_be_read() -> None:
    """The graph lives on, with tensors that could be recomputed from the weights of before only."""
    told: list[tuple[str, str]] = []
    net = nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    swapper = Swapper(
        CpuStandIn(),
        budget_bytes=6 * WIDTH * WIDTH * 4,
        link=SLOW,
        min_bytes=1024,
        fence=Fence(lambda where, error: told.append((where, error))),
    )
    with swapper:
        for number in range(16):
            loss = net(torch.randn(WIDTH, WIDTH)).square().mean()
            if number < 12:
                loss.backward()
                continue
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.99)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            assert all(p.data.isfinite().all() for p in net.parameters())
    assert not told
    assert swapper.report().recomputed > 0


# What the program sees


class Looks(torch.autograd.Function):
    """Sees the objects that it saved: an input, a parameter, a constant, and its output."""

    seen: list[tuple[bool, ...]]
    programs: list[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, constant: Tensor) -> Tensor:
        y = x * weight * constant
        ctx.save_for_backward(x, weight, None, constant, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, nothing, constant, y = ctx.saved_tensors
        same = (x is Looks.programs[0], weight is Looks.programs[1], constant is Looks.programs[2])
        named = (x.name_of_x, weight.main_grad, constant.name_of_c, nothing)
        Looks.seen.append((*same, *named, y.requires_grad, hasattr(y, "name_of_x")))
        return grads[0] * weight * constant, (grads[0] * x * constant).sum(0), None


@shows_saved
@pytest.mark.parametrize("rows", [ROWS, 2])
def test_a_custom_function_gets_its_own_objects_back(rows: int) -> None:
    def step(net: Net, x: Tensor, number: int) -> Tensor:
        h = net(x[:rows])
        h.name_of_x = "x"  # type: ignore[attr-defined]
        weight, constant = net.norm.weight, torch.ones(rows, WIDTH)
        weight.main_grad = number  # type: ignore[attr-defined]
        constant.name_of_c = "c"  # type: ignore[attr-defined]
        Looks.programs = [h, weight, constant]
        y = Looks.apply(h, weight, constant)
        if number % 2:  # only autograd holds them
            Looks.programs = [x, x, x]
            del h, constant
        return backward(y.square().mean())

    seen = []
    for share in (None, 1e9, 0.4):
        Looks.seen = []
        train(step, share)
        seen.append(Looks.seen)
    assert len(seen[0]) == STEPS
    # Where only autograd holds an object, a new one with its attributes will do.
    assert [row[3:] for row in seen[1]] == [row[3:] for row in seen[0]]
    assert seen[1] == seen[2]
    assert seen[1][::2] == seen[0][::2]
    assert all(row[0] and row[1] and row[2] for row in seen[1][::2])


def test_a_tensor_that_was_away_has_not_been_written_to() -> None:
    versions = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = x.exp()
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            x, out = ctx.saved_tensors
            versions.append((x._version, out._version))
            return gradients[0] * out

    link = Link(to_host_bytes_per_s=1e12, to_device_bytes_per_s=1e12, both_bytes_per_s=2e12)
    x = torch.randn(64, 64, requires_grad=True)
    with Swapper(CpuStandIn(), budget_bytes=40_000, link=link, min_bytes=1024) as swapper:
        for _ in range(3):
            y = (x * 2).sin_()
            for _ in range(6):
                y = Looks.apply(y).tanh()
            y.sum().backward()
    assert swapper.report().in_bytes > 0
    assert set(versions) == {(0, 0), (1, 0)}  # the first of a pass was written to in place, once


def test_the_programs_classes_are_the_frameworks_again_afterwards() -> None:
    with Swapper(CpuStandIn(), budget_bytes=1, link=SLOW):
        assert "data" in vars(torch.Tensor)
    assert "data" not in vars(torch.Tensor)
    assert "saved_tensors" not in vars(torch.autograd.function.BackwardCFunction)


def test_the_programs_counters_do_not_count_our_operations() -> None:
    counts: list[int] = []

    def step(net: Net, x: Tensor, number: int) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            loss = backward(net(x).square().mean())
        counts.append(counter.get_total_flops())
        return loss

    plain = train(step, None)
    ours = train(step, 0.3)
    assert ours.same(plain)
    assert ours.report is not None
    assert ours.report.planned > 0
    assert counts[:STEPS] == counts[STEPS:]


@pytest.mark.parametrize("switch", [gc.disable, gc.enable])
def test_what_the_program_does_to_the_collector_stands(switch: Callable[[], None]) -> None:
    seen: list[bool] = []

    def step(net: Net, x: Tensor, number: int) -> Tensor:
        seen.append(gc.isenabled())
        y = net(x)
        if number == FROM:
            switch()
        seen.append(gc.isenabled())
        return backward(y.square().mean())

    try:
        train(step, None)
        gc.enable()
        train(step, 0.5)
        assert gc.isenabled() is (switch is gc.enable)
    finally:
        gc.enable()
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_thresholds_that_the_program_sets_in_forward_stand() -> None:
    before = gc.get_threshold()

    def step(net: Net, x: Tensor, number: int) -> Tensor:
        y = net(x)
        if number == FROM:
            gc.set_threshold(123, 7, 7)
        return backward(y.square().mean())

    try:
        train(step, 0.5)
        assert gc.get_threshold()[0] == 123
    finally:
        gc.set_threshold(*before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_is_left_alone_and_the_rest_is_not() -> None:
    def step(net: Net, x: Tensor, number: int) -> Tensor:
        parts = torch.nested.nested_tensor([x[:100], x[100:]], requires_grad=True)
        y = torch.nested.to_padded_tensor(net.layers[0](parts).relu(), 0.0)
        return backward(net(x).square().mean() + y.square().mean())

    plain = train(step, None)
    ours = train(step, 0.5)
    assert ours.same(plain)
    assert not ours.told
    assert ours.report is not None
    assert ours.report.planned > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_view_of_a_tensor_subclass_is_left_alone() -> None:
    def step(net: Net, x: Tensor, number: int) -> Tensor:
        parts = torch.nested.nested_tensor([x[:100], x[100:]], layout=torch.jagged)
        return backward(net.layers[0](parts).sin().values().square().mean() + net(x).mean())

    plain = train(step, None)
    ours = train(step, 0.5)
    assert ours.same(plain)
    assert not ours.told


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by the framework itself
def test_under_forward_mode_tangents_stay_and_are_told() -> None:
    def step(net: Net, x: Tensor, number: int) -> Tensor:
        with forward_ad.dual_level():
            y = net(forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = forward_ad.unpack_dual(y).tangent
            return backward(y.square().mean() + tangent.square().mean())

    tangents: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        tangent = forward_ad.unpack_dual(tensor).tangent
        if tangent is not None and not tangent._is_zerotensor():
            tangents[tangent.data_ptr()] = tangent.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        step(Net(), torch.randn(ROWS, WIDTH), 0)
    plain = train(step, None)
    ours = train(step, 0.5)
    assert ours.same(plain)
    assert not ours.told
    assert ours.report is not None
    assert ours.report.out_bytes > 0
    (told,) = [reason for reason in ours.report.refused if reason.code == "forward_mode"]
    assert told.text.startswith(f"{show_bytes(sum(tangents.values()))} of a pass are tangents")


@pytest.mark.filterwarnings("ignore:Sparse")  # they are in beta, says the framework
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("trained", [False, True])
def test_products_with_sparse_matrices(layout: torch.layout, trained: bool) -> None:
    torch.manual_seed(3)
    matrix = (torch.rand(ROWS, ROWS) < 0.05).float().to_sparse(layout=layout)
    matrix.requires_grad_(trained)

    def step(net: Net, x: Tensor, number: int) -> Tensor:
        for layer in net.layers:
            x = (matrix @ layer(x)).tanh()
        return backward(x.square().mean())

    plain = train(step, None)
    ours = train(step, 0.5)
    assert ours.same(plain)
    assert not ours.told
    assert ours.report is not None
    assert ours.report.planned > 0


class Sine(torch.autograd.Function):
    """Has a derivative of either mode, each of what it has saved."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0] * ctx.saved_tensors[0].cos()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by the framework itself
@pytest.mark.parametrize("functional", [False, True])
def test_a_function_of_the_programs_with_a_forward_derivative(functional: bool) -> None:
    def step(net: Net, x: Tensor, number: int) -> Tensor:
        y, ones = net(x), torch.ones(ROWS, WIDTH)
        if functional:
            y, tangent = torch.func.jvp(Sine.apply, (y,), (ones,))
        else:
            with forward_ad.dual_level():
                y, tangent = forward_ad.unpack_dual(Sine.apply(forward_ad.make_dual(y, ones)))
        return backward(y.square().mean() + tangent.square().mean())

    plain = train(step, None)
    ours = train(step, 0.5)
    assert ours.same(plain)
    assert not ours.told
    assert ours.report is not None
    assert ours.report.planned > 0


def test_a_batched_backward_gives_the_same_numbers() -> None:
    def step(net: Net, x: Tensor, number: int) -> Tensor:
        y = net(x)
        vectors = torch.randn(3, *y.shape)
        found = torch.autograd.grad(y, list(net.parameters()), vectors, is_grads_batched=True)
        for parameter, gradients in zip(net.parameters(), found, strict=True):
            parameter.grad = gradients.sum(0)
        return y

    plain = train(step, None)
    ours = train(step, 0.5)
    assert ours.same(plain)
    assert not ours.told
    assert ours.report is not None
    assert ours.report.planned > 0
    assert ours.report.held_peak_bytes <= 0.5 * (ROWS * WIDTH * 4) * 17
