"""Under any memory plan the numbers are those of the plain run, bit for bit.

The device is the CPU stand-in: its copies come as late as they may, and what is evicted is
poisoned, so a wrong order or a lost datum shows in the numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from kilter.memory.engine import CpuStandIn, Swapper, SwapReport
from kilter.memory.engine.host import IDLE_PASSES
from kilter.memory.host_memory import HostLimit
from kilter.memory.plan.problem import Link

SLOW = Link(to_host_bytes_per_s=1e6, to_device_bytes_per_s=1e6, both_bytes_per_s=2e6)
FAST = Link(to_host_bytes_per_s=1e14, to_device_bytes_per_s=1e14, both_bytes_per_s=2e14)
shows_saved = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"),
    reason="this PyTorch does not show what its nodes saved, so little is recomputed",
)
STEPS = 9
WIDTH = 64


@dataclass
class Trail:
    """Everything that must be identical."""

    values: list[torch.Tensor] = field(default_factory=list)

    def add(self, *tensors: torch.Tensor | None) -> None:
        self.values += [t.detach().clone() for t in tensors if t is not None]

    def same(self, other: Trail) -> bool:
        return len(self.values) == len(other.values) and all(
            a.dtype == b.dtype and bool(a.isfinite().all()) and torch.equal(a, b)
            for a, b in zip(self.values, other.values, strict=True)
        )


Job = Callable[[Trail], Iterator[None]]
"""Trains a few steps; yields after each."""


def run(job: Job, swapper: Swapper | None = None) -> Trail:
    trail = Trail()
    torch.manual_seed(7)
    with swapper or nullcontext():
        for _ in job(trail):
            pass
    return trail


@cache
def plainly(job: Job) -> Trail:
    """What it gives without us."""
    return run(job)


@cache
def plain_peak_bytes(job: Job) -> int:
    """What it holds at most, as a swapper observes it that moves nothing."""
    watch = Swapper(CpuStandIn(), budget_bytes=10**12, link=FAST, min_bytes=256)
    run(job, watch)
    return max(record.peak_bytes for record in watch.records())


def governed(
    job: Job, *, share: float = 0.5, link: Link = FAST, planner: str = "mix", lag: int = 8
) -> tuple[Trail, SwapReport, int]:
    """Run under a budget of `share` of what plain holds; also what plain holds."""
    peak_bytes = plain_peak_bytes(job)
    swapper = Swapper(
        CpuStandIn(lag=lag),
        budget_bytes=int(share * peak_bytes),
        link=link,
        planner=planner,
        min_bytes=256,
    )
    trail = run(job, swapper)
    return trail, swapper.report(), peak_bytes


def training(
    model: Callable[[], nn.Module],
    batch: Callable[[], tuple[torch.Tensor, ...]],
    *,
    autocast: bool = False,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.float().square().mean(),
) -> Job:
    """The ordinary loop."""

    def job(trail: Trail) -> Iterator[None]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value = loss(net(*batch()))
            optimizer.zero_grad()
            value.backward()
            trail.add(value, *(p.grad for p in net.parameters()))
            optimizer.step()
            trail.add(*net.parameters(), *net.buffers())
            yield

    return job


def rows(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


class Block(nn.Module):
    """A transformer block as people write them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.one(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, 4, WIDTH // 4).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.down(F.gelu(self.up(self.two(x))))
        return x + F.dropout(y, self.dropout, self.training)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    """ResNet's basic block: batch norm, ReLU in place, sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.na(self.a(x)), inplace=True)
        y = self.nb(self.b(y))
        y += x
        return F.relu(y, inplace=True)


class Views(nn.Module):
    """Chunks, transposes, broadcasts with stride 0, and one storage seen as several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.a(x).chunk(2, dim=-1)
        y = torch.tanh(left * right + left.t().contiguous().t() * right.sigmoid())
        wide = y.mean(0, keepdim=True).expand_as(y)
        return self.b(y * wide) * y[:, ::2].repeat_interleave(2, dim=1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x)
        for _ in range(5):
            state = self.cell(x, state)
        return state


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(0.1) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        x = self.blocks[1](x)
        return checkpoint(self.blocks[2], x, use_reentrant=self.reentrant)


def tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 50, (4, 16)),)


def stack(make: Callable[[], nn.Module], count: int = 4) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for _ in range(count)))


JOBS: dict[str, Job] = {
    "transformer": training(stack(Block), rows(4, 16, WIDTH)),
    "transformer under autocast": training(stack(Block), rows(4, 16, WIDTH), autocast=True),
    "dropout": training(stack(lambda: Block(0.2)), rows(4, 16, WIDTH)),
    "tied weights": training(Tied, tokens),
    "residual, in place": training(stack(Residual), rows(4, 8, 8, 8)),
    "convolutions": training(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(8, 8, 3, groups=4, bias=False),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
        ),
        rows(4, 3, 24, 24),
    ),
    "views": training(stack(Views, 3), rows(32, WIDTH)),
    "recurrent": training(Recurrent, rows(32, WIDTH)),
    "gated": training(stack(Gated), rows(32, WIDTH), autocast=True),
    "checkpoint": training(lambda: Checkpointed(False), rows(4, 16, WIDTH)),
    "checkpoint, reentrant": training(lambda: Checkpointed(True), rows(4, 16, WIDTH)),
}


@pytest.mark.parametrize(
    ("name", "planner"),
    [
        *((name, "mix") for name in JOBS),
        *((name, "spanning") for name in ("tied weights", "views", "checkpoint")),
        *((name, "literal") for name in ("dropout", "residual, in place", "gated")),
    ],
)
def test_planned_training_is_bitwise_plain_training(name: str, planner: str) -> None:
    plain = plainly(JOBS[name])
    trail, report, _ = governed(JOBS[name], share=0.6, planner=planner)
    assert trail.same(plain)
    assert report.passes >= STEPS - 1


@pytest.mark.parametrize(
    ("lag", "link"), [(0, FAST), (1, SLOW), (1000, SLOW), (1000, FAST)], ids=str
)
def test_swapping_is_identical_however_late_the_copies_come(lag: int, link: Link) -> None:
    job = JOBS["transformer"]
    plain = plainly(job)
    trail, report, peak_bytes = governed(job, share=0.5, planner="spanning", link=link, lag=lag)
    assert trail.same(plain)
    assert report.planned >= 3
    assert report.late == 0
    assert report.deviations == 0
    assert report.in_bytes > 0
    assert report.held_peak_bytes <= 0.5 * peak_bytes


def test_recompute_is_identical_and_moves_less() -> None:
    job = JOBS["transformer under autocast"]
    plain = plainly(job)
    trail, report, peak_bytes = governed(job, share=0.6, link=SLOW)
    assert trail.same(plain)
    assert report.recomputed > 0
    assert report.planned >= 3
    assert report.held_peak_bytes <= 0.6 * peak_bytes
    (plan,) = report.plans
    assert plan.recomputed > 0


@shows_saved
def test_relu_and_batch_norm_are_made_again_without_touching_running_statistics() -> None:
    job = JOBS["residual, in place"]
    plain = plainly(job)
    trail, report, _ = governed(job, share=0.7, link=SLOW)
    assert report.recomputed > 0
    assert trail.same(plain)  # buffers included


def test_a_deeper_cut_than_possible_is_refused_and_the_numbers_stay() -> None:
    job = JOBS["transformer"]
    plain = plainly(job)
    trail, report, _ = governed(job, share=0.01)
    assert trail.same(plain)
    assert report.plans == ()
    assert report.refused
    assert report.spilled > 0


@shows_saved
@pytest.mark.parametrize("name", ["transformer", "residual, in place"])
def test_what_had_to_leave_before_there_was_a_plan_has_its_recipes_tried_as_well(name: str) -> None:
    """A budget in bytes holds from the first iteration on, long before recipes are tried."""

    def recipes(swapper: Swapper) -> list[bool]:
        assert run(JOBS[name], swapper).same(plainly(JOBS[name]))
        return [datum.recompute_s is not None for datum in swapper.records()[0].data]

    roomy = Swapper(CpuStandIn(), budget_bytes=10**12, link=SLOW, min_bytes=256)
    found = recipes(roomy)
    peak_bytes = roomy.records()[0].peak_bytes
    tight = Swapper(CpuStandIn(), budget_bytes=int(0.5 * peak_bytes), link=SLOW, min_bytes=256)
    assert recipes(tight) == found
    assert sum(found) > len(found) / 2
    assert tight.report().spilled > 0


# What people do that is not the ordinary loop


def looped(body: Callable[[nn.Module, torch.optim.Optimizer, int, Trail], None]) -> Job:
    def job(trail: Trail) -> Iterator[None]:
        net = nn.Sequential(*(Block() for _ in range(3)))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for step in range(STEPS):
            body(net, optimizer, step, trail)
            trail.add(*(p.grad for p in net.parameters()), *net.parameters())
            yield

    return job


def loss_of(net: nn.Module, *shape: int) -> torch.Tensor:
    out: torch.Tensor = net(torch.randn(*(shape or (4, 16, WIDTH))))
    return out.square().mean()


def step(optimizer: torch.optim.Optimizer, value: torch.Tensor, trail: Trail) -> None:
    optimizer.zero_grad()
    value.backward()
    trail.add(value)
    optimizer.step()


@looped
def retain_graph(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    value = loss_of(net)
    opt.zero_grad()
    value.backward(retain_graph=True)
    value.backward()
    trail.add(value)
    opt.step()


@looped
def double_backward(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = net[0].down(F.gelu(net[0].up(net[0].two(x)))).square().mean()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    step(opt, grad.square().mean() + y, trail)


@looped
def accumulation(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    opt.zero_grad()
    for _ in range(3):
        value = loss_of(net) / 3
        value.backward()
        trail.add(value)
    opt.step()


@looped
def evaluation_between(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    step(opt, loss_of(net), trail)
    with torch.no_grad():
        trail.add(loss_of(net))
    if i % 2:
        trail.add(loss_of(net))  # with a graph that nobody uses


@looped
def other_shape(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    step(opt, loss_of(net, *((4, 16, WIDTH) if i % 3 else (4, 12, WIDTH))), trail)


@looped
def other_branch(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    x = net[0](torch.randn(4, 16, WIDTH))
    x = net[1](x) if i != 6 else x.tanh()  # once, in the middle, after the plan is made
    step(opt, net[2](x).square().mean(), trail)


@looped
def other_activation(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    """The same shapes and order of events, but another function: a plan by position would lie."""
    x = torch.randn(64, WIDTH)
    for block in net:
        x = block.down((F.gelu if i != 6 else F.silu)(block.up(block.two(x))))
    step(opt, x.square().mean(), trail)


@looped
def early_stop(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    if i == 6:
        trail.add(loss_of(net))  # forward only
    step(opt, loss_of(net), trail)


@looped
def exception_in_forward(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    if i in (1, 6):
        x = net[0](torch.randn(4, 16, WIDTH))
        with pytest.raises(RuntimeError):
            net[1](x[..., :-1])
        del x
    step(opt, loss_of(net), trail)


@looped
def two_graphs_alive(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    first, second = loss_of(net), loss_of(net)
    opt.zero_grad()
    second.backward()
    first.backward()
    trail.add(first, second)
    opt.step()


@looped
def partial_backward(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    hidden = net[0](torch.randn(4, 16, WIDTH))
    value = net[1](hidden).square().mean()
    (grad,) = torch.autograd.grad(value, hidden, retain_graph=True)
    trail.add(grad)
    step(opt, value + hidden.mean(), trail)


@looped
def unused_branch(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    x = net[0](torch.randn(4, 16, WIDTH))
    unused = net[2](x)
    step(opt, net[1](x).square().mean(), trail)
    trail.add(unused)


@looped
def step_inside_backward(net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail) -> None:
    """Weights change while parts of the same graph have not run backward yet."""
    with torch.autocast("cpu", torch.bfloat16):
        y = net[0].down(F.gelu(net[0].up(torch.randn(64, WIDTH))))
        z = net[1].down(F.gelu(net[1].up(torch.randn(64, WIDTH))))
    first, second = y.float().square().mean(), z.float().square().mean()
    opt.zero_grad()
    first.backward()
    net[1].up.weight.grad = torch.randn_like(net[1].up.weight)
    torch.optim.SGD(net[1].parameters(), lr=0.1).step()
    second.backward()
    trail.add(y, z)
    opt.step()


@looped
def graph_outlives_the_step(
    net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail
) -> None:
    """Someone keeps the loss of the last iteration, with its graph."""
    keep = net.__dict__.setdefault("kept", [])
    value = loss_of(net)
    opt.zero_grad()
    value.backward(retain_graph=True)
    keep[:] = [value]
    trail.add(value)
    opt.step()


@looped
def hooks_and_custom_functions(
    net: nn.Module, opt: torch.optim.Optimizer, i: int, trail: Trail
) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            y = x * x
            ctx.save_for_backward(x, y)
            return y * x

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            x, y = ctx.saved_tensors  # type: ignore[attr-defined]
            trail.add(x)
            return 3 * grad * y

    x = net[0](torch.randn(4, 16, WIDTH))
    x.register_hook(lambda grad: grad.clamp(-1, 1))
    step(opt, Cube.apply(net[1](x)).square().mean(), trail)


ODD = {
    "retain_graph": retain_graph,
    "double backward": double_backward,
    "accumulation": accumulation,
    "evaluation between": evaluation_between,
    "other shape": other_shape,
    "other branch": other_branch,
    "other activation": other_activation,
    "early stop": early_stop,
    "exception in forward": exception_in_forward,
    "two graphs alive": two_graphs_alive,
    "partial backward": partial_backward,
    "unused branch": unused_branch,
    "step inside backward": step_inside_backward,
    "graph outlives the step": graph_outlives_the_step,
    "hooks and custom functions": hooks_and_custom_functions,
}


@pytest.mark.parametrize(
    ("name", "link"), [*((name, SLOW) for name in ODD), *((name, FAST) for name in list(ODD)[::2])]
)
def test_odd_loops_are_bitwise_plain(name: str, link: Link) -> None:
    plain = plainly(ODD[name])
    trail, _, _ = governed(ODD[name], share=0.6, link=link, lag=1000)
    assert trail.same(plain)


@shows_saved
@pytest.mark.parametrize("name", ["other activation", "step inside backward"])
def test_recipes_are_those_of_this_pass(name: str) -> None:
    """Where a recipe remembered from an earlier pass, or run too late, would give other numbers."""
    plain = plainly(ODD[name])
    trail, report, _ = governed(ODD[name], share=0.6, link=SLOW)
    assert trail.same(plain)
    assert report.recomputed >= report.planned >= 3


@pytest.mark.parametrize("name", ["other branch", "early stop"])
def test_deviations_are_counted_and_planning_goes_on(name: str) -> None:
    _, report, _ = governed(ODD[name], share=0.6)
    assert report.deviations >= 1
    assert report.planned >= 2


def test_each_shape_gets_its_own_plan() -> None:
    def job(trail: Trail) -> Iterator[None]:
        net = nn.Sequential(*(Block() for _ in range(3)))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for i in range(24):
            step(optimizer, loss_of(net, 4, 16 if i % 2 else 24, WIDTH), trail)
            yield

    plain = run(job)
    trail, report, _ = governed(job, share=0.7)
    assert trail.same(plain)
    assert len(report.plans) == 2
    assert report.deviations == 0


def test_passes_that_begin_alike_each_get_a_plan() -> None:
    def job(trail: Trail) -> Iterator[None]:
        net = nn.Sequential(*(Block() for _ in range(3)))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for i in range(24):
            x = net[0](torch.randn(4, 16, WIDTH))
            x = net[1](x) if i % 2 else net[1](x).tanh()
            step(optimizer, net[2](x).square().mean(), trail)
            yield

    plain = run(job)
    trail, report, _ = governed(job, share=0.7)
    assert trail.same(plain)
    assert len(report.plans) == 2
    assert report.deviations <= 4  # until the second kind was met often enough
    assert report.planned >= 10


def test_a_swapper_may_be_used_again() -> None:
    job = JOBS["transformer"]
    plain = plainly(job)
    watch = Swapper(CpuStandIn(), budget_bytes=10**12, link=FAST, min_bytes=256)
    run(job, watch)
    peak_bytes = max(record.peak_bytes for record in watch.records())
    swapper = Swapper(CpuStandIn(), budget_bytes=peak_bytes // 2, link=FAST, min_bytes=256)
    for _ in range(2):
        assert run(job, swapper).same(plain)
        assert swapper.report().plans


def test_a_smaller_plan_keeps_working_when_a_larger_one_takes_the_host_memory() -> None:
    def job(trail: Trail) -> Iterator[None]:
        net = nn.Sequential(*(Block() for _ in range(3)))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for i in range(24 + IDLE_PASSES):
            step(optimizer, loss_of(net, 4, 16 if i < 10 or i % 2 else 48, WIDTH), trail)
            yield

    plain = run(job)
    trail, report, peak_bytes = governed(job, share=0.25, planner="spanning")
    assert trail.same(plain)
    assert len(report.plans) == 2
    assert report.host_bytes <= peak_bytes  # nothing is left of what went on demand


def test_writing_to_a_saved_tensor_is_the_error_of_the_plain_run() -> None:
    def job(trail: Trail) -> Iterator[None]:
        weight = torch.randn(64, 64, requires_grad=True)
        for i in range(STEPS):
            x = weight @ weight.detach()
            y = x.exp()
            z = y.exp()
            if i == 7:
                y.add_(1.0)
            z.sum().backward()
            yield

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain:
        run(job)
    for share in (0.3, 2.0):
        with pytest.raises(RuntimeError) as found:
            governed(job, share=share)
        assert type(found.value) is RuntimeError
        assert found.value.__context__ is None
        assert str(found.value) == str(plain.value)


def writes(what: str) -> str:
    """What a backward raises whose saved tensor was written to."""
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(64, 64)
    y = weight @ x
    z = y.tanh() * x
    rows = torch.arange(64)
    loss = (z[rows] * z).exp().sum() + y.square().sum()
    with torch.no_grad():
        {"input": x, "indices": rows, "result": z}[what].add_(1)
    with pytest.raises(RuntimeError) as found:
        loss.backward()
    assert type(found.value) is RuntimeError
    return str(found.value)


@pytest.mark.parametrize("min_bytes", [1024, 10**9])
@pytest.mark.parametrize("what", ["input", "result", "indices"])
def test_the_error_of_the_plain_run_has_its_words(what: str, min_bytes: int) -> None:
    plain = writes(what)
    with Swapper(CpuStandIn(), budget_bytes=10**9, link=FAST, min_bytes=min_bytes):
        assert writes(what) == plain


def test_two_batch_norm_forwards_before_one_backward() -> None:
    """The norm's running statistics change in between, as in adversarial training."""

    def job(trail: Trail) -> Iterator[None]:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(STEPS):
            value = (net(torch.randn(32, WIDTH)) - net(torch.randn(32, WIDTH))).square().mean()
            step(optimizer, value, trail)
            trail.add(*net.parameters(), *net.buffers())
            yield

    plain = run(job)
    trail, _, _ = governed(job, share=0.6)
    assert trail.same(plain)


def test_a_state_dict_taken_while_data_are_away_is_whole() -> None:
    def job(trail: Trail) -> Iterator[None]:
        net = nn.Sequential(*(Block() for _ in range(3)))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for i in range(STEPS):
            value = loss_of(net)
            if i == 7:
                trail.add(*copy.deepcopy(net.state_dict()).values())
            step(optimizer, value, trail)
            yield

    plain = run(job)
    trail, report, _ = governed(job, share=0.5)
    assert trail.same(plain)
    assert report.planned >= 2


def test_no_host_memory_means_recompute_only_and_a_reason() -> None:
    job = JOBS["transformer under autocast"]
    plain = plainly(job)
    watch = Swapper(CpuStandIn(), budget_bytes=10**12, link=FAST, min_bytes=256)
    run(job, watch)
    peak_bytes = max(record.peak_bytes for record in watch.records())
    swapper = Swapper(
        CpuStandIn(host=HostLimit(0)),
        budget_bytes=int(0.8 * peak_bytes),
        link=FAST,
        planner="mix",
        min_bytes=256,
    )
    trail = run(job, swapper)
    report = swapper.report()
    assert trail.same(plain)
    assert report.host_bytes == 0
    assert report.out_bytes == 0


def test_a_graph_that_outlives_the_block_still_runs_backward() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(4, 16, WIDTH)
    value = net(x).square().mean()
    value.backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    with Swapper(CpuStandIn(), budget_bytes=1, link=FAST, min_bytes=256):
        value = net(x).square().mean()
    value.backward()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_nothing_is_left_behind_after_the_block() -> None:
    swapper = Swapper(CpuStandIn(), budget_bytes=1, link=FAST, min_bytes=256)
    run(JOBS["transformer"], swapper)
    seen: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(1) or t, lambda t: t):
        nn.Linear(8, 8)(torch.randn(4, 8)).sum().backward()
    assert seen
    before = swapper.report()
    nn.Linear(64, 64)(torch.randn(64, 64)).sum().backward()
    assert swapper.report() == before


def test_a_view_keeps_the_memory_that_its_base_has_left() -> None:
    def job(trail: Trail) -> Iterator[None]:
        weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
        base = torch.randn(WIDTH, WIDTH)
        view = base.t()
        base.data = torch.zeros(WIDTH, WIDTH)
        (weight * view).sum().backward()
        trail.add(weight.grad)
        yield

    swapper = Swapper(CpuStandIn(), budget_bytes=10**9, link=SLOW, min_bytes=1024)
    assert plainly(job).same(run(job, swapper))
