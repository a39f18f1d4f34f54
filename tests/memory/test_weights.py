"""Weights that come and go give the plain run's numbers, whoever reads them and when.

The device is the CPU stand-in: copies come as late as they may, and what is evicted is poisoned.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from kilter.core.errors import UsageError
from kilter.memory.engine import CpuStandIn
from kilter.memory.engine import weights as weights_module
from kilter.memory.engine.offloaded_parameter import WeightsMoved
from kilter.memory.engine.state import StateMover
from kilter.memory.engine.weights import WeightMover, WeightReport, graphs_may_exist
from kilter.memory.host_memory import HostLimit
from kilter.memory.messages import READ_LATER, RESIZED
from kilter.memory.plan.problem import Link
from kilter.session.fence import Fence

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
WIDTH = 24
LAYERS = 6
STEPS = 8

Net = nn.Module
Optimizer = torch.optim.Optimizer
Step = Callable[[Net, Optimizer, int], float]


def texts(report: WeightReport) -> tuple[str, ...]:
    return tuple(str(reason) for reason in report.refused)


def network() -> Net:
    layers: list[Net] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(*layers)


def mover(**options: Any) -> WeightMover:
    backend = CpuStandIn(
        lag=options.pop("lag", 8), host=HostLimit(options.pop("host_limit_bytes", None))
    )
    return WeightMover(backend, link=LINK, **{"min_bytes": 1024, **options})


def batch() -> torch.Tensor:
    return torch.randn(6, WIDTH)


def step(net: Net, optimizer: Optimizer, number: int) -> float:
    loss = net(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def adamw(net: Net) -> Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def trained(
    governed: WeightMover | None = None,
    *,
    make: Callable[[], Net] = network,
    optimizes: Callable[[Net], Optimizer] = adamw,
    stepping: Step = step,
    steps: int = STEPS,
) -> tuple[list[Any], WeightReport | None]:
    """Losses and all that was learned."""
    torch.manual_seed(3)
    net = make()
    optimizer = optimizes(net)
    found: list[Any] = []
    report = None
    with governed or contextlib.nullcontext():
        for number in range(steps):
            torch.manual_seed(number)
            found.append(stepping(net, optimizer, number))
        if governed is not None:
            report = governed.report()
    found += [value.clone() for value in net.state_dict().values()]
    for p in net.parameters():
        assert type(p) is nn.Parameter
        found += [v.clone() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return found, report


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def check(moves: bool = True, options: dict[str, Any] | None = None, **job: Any) -> WeightReport:
    """The same with weights moving as without."""
    plain, _ = trained(**job)
    moved, report = trained(mover(**options or {}), **job)
    assert same(plain, moved)
    assert report is not None
    assert report.moving == moves, report.refused
    assert (report.in_bytes > 0) == moves
    return report


def away(net: Net) -> list[nn.Parameter]:
    return [p for p in net.parameters() if type(p) is not nn.Parameter]


# Identity


@pytest.mark.parametrize(
    "optimizes",
    [
        adamw,
        lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True),
        lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
        lambda net: torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, foreach=True),
        lambda net: torch.optim.Adafactor(net.parameters(), lr=1e-2),
    ],
)
def test_optimizers(optimizes: Callable[[Net], Optimizer]) -> None:
    report = check(optimizes=optimizes)
    assert report.late == 0
    assert report.stayed == 0
    assert (
        report.offloaded_bytes == 5 * WIDTH * WIDTH * 4
    )  # all but the last, which is needed at once


def test_copies_may_be_late_or_early() -> None:
    for lag in (0, 1, 100):
        check(options={"lag": lag})


def test_so_much_leaves_as_is_asked_for() -> None:
    report = check(options={"offloaded_bytes": 3 * WIDTH * WIDTH * 4})
    assert report.weights == 3
    assert report.most_offloaded_bytes == report.offloaded_bytes == 3 * WIDTH * WIDTH * 4


def test_bytes_are_really_away_and_come_back() -> None:
    torch.manual_seed(3)
    net = network()
    optimizer = adamw(net)
    with mover() as governed:
        for number in range(5):
            step(net, optimizer, number)
        loss = net(batch()).square().mean()
        gone = away(net)
        assert len(gone) == 5
        known = governed._store.weights
        with torch._C.DisableTorchFunctionSubclass():
            assert all(p.data_ptr() == known[id(p)].copy.host.data_ptr() for p in gone)
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in gone)
        loss.backward()
        optimizer.step()
        assert not away(net)
        net(batch())
        assert len(away(net)) == 5
    assert not away(net)
    assert "data" not in vars(nn.Parameter)


def test_under_autocast_casts_are_saved_and_weights_are_not_needed() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(batch()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    report = check(stepping=stepping)
    assert report.late == 0


def test_scaler_and_clipping() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        loss = net(batch()).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)  # some are skipped
        scaler.update()
        optimizer.zero_grad()
        return float(norm)

    plain, _ = trained(stepping=stepping)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    moved, report = trained(mover(), stepping=stepping)
    assert repr(plain[:STEPS]) == repr(moved[:STEPS])  # nan where a step is skipped
    assert same(plain[STEPS:], moved[STEPS:])
    assert report is not None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("room_bytes", [None, 8000])
def test_beside_gradients_that_are_consumed(fused: bool, room_bytes: int | None) -> None:
    """Parameters are updated in backward; fused, their versions do not move on."""

    def optimizes(net: Net) -> Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)

    plain, _ = trained(optimizes=optimizes, steps=12)
    weights = mover()
    state = StateMover(
        CpuStandIn(),
        link=LINK,
        gradients="consume",
        room_bytes=room_bytes,
        bucket_bytes=4000,
        min_bytes=512,
        before_update=weights.before_update,
    )
    with state:
        moved, report = trained(weights, optimizes=optimizes, steps=12)
        assert state.report().visits > 20  # its optimizer is gone already
        assert state.report().late == 0
    assert same(plain, moved)
    assert report is not None
    assert report.late == report.stayed == 0
    assert report.weights == 5
    assert report.out_bytes == 10 * report.offloaded_bytes  # one copy after each update, no more


def test_a_weight_that_only_longer_passes_have_updated() -> None:
    """As those of experts to which later batches are not routed."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.side, self.rest = nn.Linear(WIDTH, WIDTH), network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            side, rest = self.side(x), self.rest(x)
            return side + rest if x[0, 0] > 0 else rest

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        x = batch()
        x[0, 0] = 1.0 if number < 9 and number % 2 == 0 else -1.0
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    plain, _ = trained(make=Routed, stepping=stepping, steps=16)
    weights = mover()
    consuming = StateMover(
        CpuStandIn(),
        link=LINK,
        gradients="consume",
        bucket_bytes=4000,
        min_bytes=512,
        before_update=weights.before_update,
    )
    with consuming:
        moved, report = trained(weights, make=Routed, stepping=stepping, steps=16)
    assert same(plain, moved)
    assert report is not None
    assert report.moving


def test_accumulation_leaves_in_each_pass() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        total = 0.0
        for _ in range(3):
            loss = net(batch()).square().mean()
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    report = check(stepping=stepping)
    assert report.late == 0
    assert report.in_bytes >= 3 * report.out_bytes - 5 * report.offloaded_bytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(network() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.requires_grad_(True)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    check(moves=not reentrant, make=Net)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.body = network()
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.abs().mul(20).long().clamp(max=63)
        result: torch.Tensor = self.head(self.body(self.table(tokens)))
        return result


def test_tied_weights() -> None:
    assert check(make=Tied).late == 0


def test_weights_used_outside_of_their_module() -> None:
    class Net(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = x.abs().mul(20).long().clamp(max=63)
            return nn.functional.linear(self.body(self.table(tokens)), self.table.weight)

    report = check(make=Net)
    assert report.late == 2  # then it stays
    assert "after their module" in report.refused[0].text


def test_frozen_weights() -> None:
    def make() -> Net:
        net = network()
        for module in list(net)[3:-3]:
            module.requires_grad_(False)
        return net

    check(make=make)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_and_its_fast_path(batch_first: bool) -> None:
    """In evaluation modules look at the class of their children's weights."""

    def make() -> Net:
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 48, dropout=0.1, batch_first=batch_first, norm_first=False
        )
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.TransformerEncoder(layer, 3, enable_nested_tensor=batch_first),
            network(),
        )

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        x = torch.randn(3, 4, WIDTH)
        loss = net(x).square().mean()
        net.eval()
        with torch.no_grad():
            value = net(x).sum().item()
        net.train()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() + value

    check(make=make, stepping=stepping)


def test_recurrent_layers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = network()
            self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
            self.last = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.last(self.lstm(self.first(x).unsqueeze(0))[0])
            return result

    check(make=Net)


def test_convolutions_and_channels_last() -> None:
    def make() -> Net:
        net = nn.Sequential(
            *(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)), nn.BatchNorm2d(8), nn.Flatten()
        )
        return net.to(memory_format=torch.channels_last)

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        loss = net(torch.randn(2, 8, 6, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    check(make=make, stepping=stepping)


def test_parametrization() -> None:
    def make() -> Net:
        net = network()
        for number in (3, 6):
            nn.utils.parametrizations.weight_norm(net[number])
        return net

    check(make=make)


# Reads


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


def saved(p: Any) -> Any:
    file = io.BytesIO()
    torch.save({"p": p}, file)
    file.seek(0)
    return torch.load(file)["p"].detach()


def shared(p: Any) -> Any:
    from multiprocessing.reduction import ForkingPickler

    return pickle.loads(ForkingPickler.dumps(p)).detach()


def own(p: Any) -> Any:
    x = p.detach().clone().requires_grad_()
    return torch.autograd.grad((x * p).sum(), x)[0]


def doubled(p: torch.Tensor) -> torch.Tensor:
    return p * 2


def scripted(p: Any) -> Any:
    """TorchScript reads past `__torch_function__`."""
    return torch.jit.script(doubled)(p).detach()


READS: dict[str, Callable[[Any], Any]] = {
    "TorchScript": scripted,
    "sum": lambda p: p.sum(),
    "operator": lambda p: 2 * p,
    "matmul": lambda p: torch.eye(WIDTH) @ p,
    "foreach": lambda p: torch._foreach_mul([p, p], 2.0)[1],
    "list": lambda p: torch.stack([p, p]),
    "keyword": lambda p: torch.add(input=p, other=p),
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "data": lambda p: p.data.clone(),
    "detach": lambda p: p.detach().clone(),
    "view": lambda p: p.view(-1)[3:9].clone(),
    "transpose": lambda p: p.t().clone(),
    "index": lambda p: p[0, 1].item(),
    "tolist": lambda p: p.tolist(),
    "iterate": lambda p: [row.sum().item() for row in p],
    "numpy": lambda p: p.detach().numpy().sum().item(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).clone(),
    "print": lambda p: repr(p),
    "shape": lambda p: (p.shape, p.size(), p.stride(), p.numel(), len(p), p.dim()),
    "pointer": lambda p: p.data_ptr() != 0,
    "storage": lambda p: p.untyped_storage().nbytes(),
    "deepcopy": lambda p: copy.deepcopy(p).detach(),
    "copy": lambda p: copy.copy(p).detach().clone(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)).detach(),
    "save": saved,
    "sharing": shared,
    "norm": lambda p: nn.utils.parameters_to_vector([p]).norm(),
    "convert": lambda p: p.to(torch.float64),
    "bool": lambda p: (p > 0).any().item(),
    "graph": own,
    "function": lambda p: Identity.apply(p).detach(),
    "vmap": lambda p: torch.vmap(lambda row: row * 2)(p).detach(),
    "vmap inside": lambda p: torch.vmap(lambda row: row * p[0])(torch.ones(3, WIDTH)).detach(),
    "func.grad": lambda p: torch.func.grad(lambda a: (a * a).sum())(p).detach(),
    "func.grad inside": lambda p: torch.func.grad(lambda a: (a * p).sum())(torch.ones(WIDTH)),
    "func.jvp": lambda p: torch.func.jvp(torch.sin, (p,), (torch.ones(WIDTH, WIDTH),))[0].detach(),
    "functional_call": lambda p: torch.func.functional_call(
        nn.Linear(WIDTH, WIDTH, bias=False), {"weight": p}, (torch.ones(2, WIDTH),)
    ).detach(),
    "parameter": lambda p: nn.Parameter(p).detach().clone(),
    "inference": lambda p: p.new_ones(1) * p.sum().detach(),
    "equal": lambda p: torch.equal(p, p.clone()),
    "linear": lambda p: nn.functional.linear(torch.ones(2, WIDTH), p).detach(),
    "swap": lambda p: nn.Linear(WIDTH, WIDTH).requires_grad_(False).weight.copy_(p),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", READS)
def test_reading_a_weight_that_is_away(name: str) -> None:
    read = READS[name]

    def stepping(net: Net, optimizer: Optimizer, number: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(batch()).float().square().mean()
        found = None
        if number in (4, 6):  # before backward, some weights are away
            weight = net[6].weight
            assert weights is None or number == 6 or type(weight) is not nn.Parameter
            torch.manual_seed(0)
            found = read(weight)
            if isinstance(found, torch.Tensor):
                found = found.clone()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found if found is not None else loss.item()

    weights: WeightMover | None = None
    plain, _ = trained(stepping=stepping)
    weights = mover(own_hooks="func" not in name)  # which torch.func does not allow
    moved, _ = trained(weights, stepping=stepping)
    assert same(plain, moved)


def test_state_dict_in_between() -> None:
    held: list[Any] = []

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        loss = net(batch()).square().mean()
        if number == 4:
            held.append(net.state_dict())  # aliases: what is held does not leave
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    report = check(stepping=stepping)
    assert report.stayed > 0
    assert same(list(held[0].values()), list(held[1].values()))


def test_a_penalty_on_weights_in_the_loss() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        loss = net(batch()).square().mean() + sum(p.square().sum() for p in net.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    plain, _ = trained(stepping=stepping)
    moved, report = trained(mover(), stepping=stepping)
    assert same(plain, moved)
    assert report is not None
    assert READ_LATER in report.refused


def test_gradients_of_weights_asked_for() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        loss = net(batch()).square().mean()
        parameters = list(net.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    check(moves=False, stepping=stepping)  # no gradient arrives


def test_double_backward_and_retained_graphs() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        x = batch().requires_grad_()
        loss = net(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        total = loss + slope.square().sum()
        total.backward(retain_graph=True)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    check(stepping=stepping)


def test_two_graphs_at_once() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        one, other = net(batch()).square().mean(), net(batch()).square().mean()
        one.backward()
        other.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (one + other).item()

    check(stepping=stepping)


def test_two_models_with_an_optimizer_each() -> None:
    def make() -> Net:
        return nn.ModuleList([network(), network()])

    second: list[Optimizer] = []

    def optimizes(net: Net) -> Optimizer:
        second[:] = [adamw(net[1])]
        return adamw(net[0])

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        one, other = net
        made = one(batch())
        judged = other(made.detach()).square().mean()
        judged.backward()
        second[0].step()
        second[0].zero_grad()
        loss = other(made).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss + judged).item()

    plain, _ = trained(make=make, optimizes=optimizes, stepping=stepping)
    moved, _ = trained(mover(), make=make, optimizes=optimizes, stepping=stepping)
    assert same(plain, moved)


# Writes


def written(write: Callable[[Net], None], between: bool = False) -> Step:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        if number % 2 and not between:
            write(net)
        with torch.autocast("cpu", torch.bfloat16):  # weights are not saved
            loss = net(batch()).float().square().mean()
        if number % 2 and between:
            write(net)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return stepping


def large(net: Net) -> list[nn.Parameter]:
    """Others are saved for backward also under autocast."""
    return [p for p in net.parameters() if p.dim() > 1]


def in_place(net: Net) -> None:
    with torch.no_grad():
        for p in large(net):
            p.mul_(0.5)


def by_data(net: Net) -> None:
    for p in large(net):
        p.data.mul_(0.5)


def by_new_data(net: Net) -> None:
    for p in large(net):
        p.data = p.data * 0.5


def by_loading(net: Net) -> None:
    halves = {key: v * 0.5 for key, v in net.state_dict().items() if v.dim() > 1}
    net.load_state_dict(halves, strict=False)


def by_detach(net: Net) -> None:
    for p in large(net):
        p.detach().mul_(0.5)


def by_foreach(net: Net) -> None:
    with torch.no_grad():
        torch._foreach_mul_(large(net), 0.5)


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize(
    "write", [in_place, by_data, by_new_data, by_loading, by_detach, by_foreach]
)
def test_writing(write: Callable[[Net], None], between: bool) -> None:
    check(stepping=written(write, between))


def test_a_weight_changed_between_forward_and_backward_is_an_error_as_in_plain() -> None:
    torch.manual_seed(3)
    net = network()
    optimizer = adamw(net)
    with mover():
        for number in range(5):
            step(net, optimizer, number)
        loss = net(batch()).square().mean()
        in_place(net)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_model_that_is_converted() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(batch().to(net[0].weight.dtype)).float().square().mean()
        loss.backward()
        if number == 5:
            optimizer.zero_grad()
            net.double()
            return loss.item()
        if number < 5:
            optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    report = check(stepping=stepping)
    assert report.refused == (RESIZED,)


def test_modes_of_the_program_do_not_meet_our_copies() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            loss = net(torch.randn(6, WIDTH, device="cpu")).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() + counter.get_total_flops()

    check(stepping=stepping)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_a_model_is_traced_while_weights_move() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        loss = step(net, optimizer, number)
        if number < STEPS - 1:
            return loss
        x = batch()
        traced: Any = torch.jit.trace(net, x, check_trace=False)  # type: ignore[no-untyped-call]
        nodes = len(list(traced.inlined_graph.nodes()))
        return loss + nodes + traced(x).sum().item() + make_fx(net)(x)(x).sum().item()

    check(stepping=stepping)


def test_averaged_weights_for_evaluation() -> None:
    """Weights are exchanged through `.data` for an evaluation, and put back."""

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        loss = step(net, optimizer, number)
        kept = [p.data.clone() for p in net.parameters()]
        for p in net.parameters():
            p.data.copy_(p.data * 0.9)
        with torch.no_grad():
            value = net(batch()).sum().item()
        for p, before in zip(net.parameters(), kept, strict=True):
            p.data.copy_(before)
        return loss + value

    check(stepping=stepping)


def test_a_write_by_address_is_told_and_not_lost() -> None:
    torch.manual_seed(3)
    net = network()
    optimizer = adamw(net)

    def train() -> None:
        with mover():
            for number in range(7):
                step(net, optimizer, number)
                if number == 4:
                    addressed(net[6].weight)[3, 4] = 7.0

    with pytest.raises(WeightsMoved, match="past the framework"):
        train()


def addressed(p: torch.Tensor) -> torch.Tensor:
    """Its bytes, and nothing of the framework knows."""
    pointer = ctypes.cast(p.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return torch.from_numpy(np.ctypeslib.as_array(pointer, tuple(p.shape)))


def test_an_optimizer_that_hides_its_writes() -> None:
    class Hidden(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        addressed(p).sub_(group["lr"] * p.grad)

    check(optimizes=lambda net: Hidden(net.parameters(), lr=0.1))


# Who else holds it


def test_held_views_keep_their_weight_here() -> None:
    torch.manual_seed(3)
    net = network()
    optimizer = adamw(net)
    with mover() as governed:
        for number in range(5):
            step(net, optimizer, number)
        view = net[6].weight.detach()[1:]
        before = view.clone()
        loss = net(batch()).square().mean()
        assert len(away(net)) == 4
        assert torch.equal(view, before)
        loss.backward()
        assert governed.report().stayed == 1


def test_a_graph_that_saved_weights_without_our_hooks() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            penalty = net[6].weight @ torch.ones(WIDTH)
        loss = net(batch()).square().mean() + penalty.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    check(stepping=stepping)


@pytest.mark.filterwarnings("ignore")
def test_a_holder_in_cpp_keeps_its_weight_here() -> None:
    torch.manual_seed(3)
    net = network()
    optimizer = adamw(net)
    with mover():
        for number in range(5):
            step(net, optimizer, number)
        scripted = torch.jit.script(net[6])
        loss = net(batch()).square().mean()
        assert type(net[6].weight) is nn.Parameter
        assert away(net)
        scripted(batch())
        loss.backward()


def test_hooks_of_the_program_that_hand_out_weights() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                result: torch.Tensor = x @ self.linear.weight
            return self.linear(result)

    def make() -> Net:
        return nn.Sequential(*(Around() for _ in range(5)))

    check(make=make)


def test_a_model_that_dies_while_its_weights_are_away() -> None:
    torch.manual_seed(3)
    net = network()
    optimizer = adamw(net)
    with mover() as governed:
        for number in range(5):
            step(net, optimizer, number)
        loss = net(batch())
        del net, optimizer, loss
        net = network()
        optimizer = adamw(net)
        for number in range(5):
            step(net, optimizer, number)
        assert governed.report().late == 0


# What ends it


def test_everything_is_home_after_an_error_in_forward() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        if number in (4, 6):

            def fails(*_: Any) -> None:
                raise ValueError("half way")

            hook = net[9].register_forward_hook(fails)
            with pytest.raises(ValueError, match="half way"):
                net(batch())
            hook.remove()
            return sum(p.sum().item() for p in net.parameters())
        return step(net, optimizer, number)

    check(stepping=stepping)


def test_evaluation_in_between() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        loss = step(net, optimizer, number)
        net.eval()
        with torch.inference_mode() if number % 2 else torch.no_grad():
            value = net(batch()).sum().item()
        net.train()
        return loss + value

    assert check(stepping=stepping).late == 0


def test_inference_mode_between_forward_and_backward() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        loss = net(batch()).square().mean()
        with torch.inference_mode():
            value = net(batch()).sum().item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() + value

    check(stepping=stepping)


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # older LBFGS does
def test_closures() -> None:
    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.ones(2, WIDTH)).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    plain, _ = trained(stepping=stepping, optimizes=lambda n: torch.optim.LBFGS(n.parameters()))
    moved, _ = trained(
        mover(), stepping=stepping, optimizes=lambda n: torch.optim.LBFGS(n.parameters())
    )
    assert same(plain, moved)


def test_without_host_memory_weights_stay() -> None:
    plain, _ = trained()
    moved, report = trained(mover(host_limit_bytes=100))
    assert same(plain, moved)
    assert report is not None
    assert report.most_offloaded_bytes == 0
    assert "of host memory" in report.refused[0].text


@pytest.mark.filterwarnings("ignore")
def test_compiled_modules_keep_their_weights() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        net = network()
        compiled = torch.compile(net, backend="eager")
        optimizer = adamw(net)
        with mover() as governed:
            for number in range(6):
                step(compiled, optimizer, number)
            assert texts(governed.report()) == ("weights stay: the program compiles",)
            assert not away(net)
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.mark.filterwarnings("ignore")
def test_compiling_in_the_middle() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    job: Any = None

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        nonlocal job
        if number == 0:
            job = torch.compile(net, backend="eager")
        return step(job if number > 4 else net, optimizer, number)

    try:
        plain, _ = trained(stepping=stepping)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        moved, report = trained(mover(), stepping=stepping)
        assert same(plain, moved)
        assert report is not None
        assert texts(report) == ("weights stay: the program compiles",)
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_several_processes_keep_their_weights(alone: None) -> None:
    report = check(moves=False)
    assert texts(report) == ("weights stay: other processes may read them",)


def test_cuda_graphs_keep_weights_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[str] = []

    class Graph:
        def capture_begin(self) -> None:
            played.append("begin")

        def replay(self) -> None:
            played.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    before, after = Graph(), Graph()
    torch.manual_seed(3)
    net = network()
    optimizer = adamw(net)
    with mover() as governed:
        for number in range(5):
            step(net, optimizer, number)
        net(batch())
        assert away(net)
        after.capture_begin()
        assert not away(net)
        after.replay()
        for number in range(3):
            step(net, optimizer, number)
        net(batch())
        assert not away(net)
        with pytest.raises(WeightsMoved, match="captured before"):
            before.replay()
        assert texts(governed.report())[0] == "weights stay: the program captures CUDA graphs"
    assert played == ["begin", "replay"]
    before.replay()


@pytest.mark.parametrize(("pool", "moves"), [((0, 0), True), ((0, 1), False)])
def test_graphs_captured_before_keep_weights_where_they_are(
    pool: tuple[int, int], moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody of ours saw the capture; the memory of the graph shows that there is one. So none is
    ever replayed over weights that have moved, which would be an error."""
    segments = [{"segment_pool_id": (0, 0)}, {"segment_pool_id": pool}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    on_cuda = graphs_may_exist(torch.device("cuda"))
    assert on_cuda != moves
    assert not graphs_may_exist(torch.device("cpu"))
    monkeypatch.setattr(weights_module, "graphs_may_exist", lambda device: on_cuda)
    report = check(moves=moves)
    reason = "weights stay: CUDA graphs were captured before, which keep addresses"
    assert (reason in [refusal.text for refusal in report.refused]) != moves


def test_another_tensor_of_the_class_of_a_weight_that_is_away() -> None:
    """Made past the class's own constructor, it was never away: its bytes are its value."""
    torch.manual_seed(3)
    net = network()
    optimizer = adamw(net)
    with mover():
        for number in range(5):
            step(net, optimizer, number)
        loss = net(batch()).square().mean()
        kind = type(away(net)[0])
        other = torch.Tensor._make_subclass(kind, torch.arange(4.0))
        assert type(other) is kind
        assert (other * 2).tolist() == [0.0, 2.0, 4.0, 6.0]
        assert type(other) is nn.Parameter
        loss.backward()


def test_another_stream_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may read a weight whose memory is given to others."""

    class Stream:
        def synchronize(self) -> None:
            seen.append("synchronized")

    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_stream", seen.append)
    main, side = Stream(), Stream()
    torch.manual_seed(3)
    net = network()
    optimizer = adamw(net)
    with mover() as governed:
        governed._store.modules.stream = main
        for number in range(5):
            step(net, optimizer, number)
        net(batch())
        torch.cuda.set_stream(main)
        assert len(away(net)) == 5
        torch.cuda.set_stream(side)
        assert not away(net)
        assert seen == [main, "synchronized", side]
        copied_bytes = governed.report().out_bytes
        step(net, optimizer, 5)
        net(batch())
        assert not away(net)
        assert governed.report().out_bytes == copied_bytes


def test_an_error_of_ours_brings_all_home(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    fence = Fence(lambda where, error: told.append(error))
    plain, _ = trained()
    governed = mover(fence=fence)
    copy_out = CpuStandIn.copy_out

    def fails(backend: CpuStandIn, host: torch.Tensor, device: torch.Tensor) -> Any:
        assert device.nbytes < 1024, "a weight"
        return copy_out(backend, host, device)

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        if number == 5:
            monkeypatch.setattr(CpuStandIn, "copy_out", fails)
        return step(net, optimizer, number)

    moved, report = trained(governed, stepping=stepping)
    assert same(plain, moved)
    assert report is not None
    assert not report.moving
    assert len(told) == 1


def test_one_engine_at_a_time() -> None:
    with mover(), pytest.raises(UsageError, match="one memory engine"), mover():
        pass
    with mover():
        pass


def test_room_may_change() -> None:
    governed = mover(offloaded_bytes=WIDTH * WIDTH * 4)

    def stepping(net: Net, optimizer: Optimizer, number: int) -> float:
        if number == 5:
            governed.make_room(3 * WIDTH * WIDTH * 4)
        if number == 8:
            governed.make_room(0)
        return step(net, optimizer, number)

    plain, _ = trained(steps=10)
    moved, report = trained(governed, stepping=stepping, steps=10)
    assert same(plain, moved)
    assert report is not None
    assert report.weights == 0
