"""Programs nobody thought of: random networks in random training loops, held against the plain run.

A program is drawn operation by operation, its loop habit by habit. Whatever it does, including
what autograd forbids, must come out the same under a memory plan, bit for bit. Half of them write
to tensors, look at saved tensors, hook and fail at random moments, on a link so slow that what can
be recomputed is. `KILTER_TEST_PROGRAMS=2000` tries as many of each instead of a few; of the second
half, other ones with another `KILTER_TEST_SEED`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, example, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.plan.problem import Link

# The program's own, where no input of its first layer requires a gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

WIDTH = 32
STEPS = 12
TOKENS = 50
SHOWS_SAVED = hasattr(torch._C._autograd.SavedTensor, "data")
"""Else this PyTorch does not show what its nodes saved: little is recomputed."""


class Squared(torch.autograd.Function):
    """Saves its input and its output, and needs both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grads[0] * (2 * x + 0 * y)


class Tagged(torch.autograd.Function):
    """Reads attributes of what it saved, also of a parameter."""

    seen: tuple[Any, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        seen = (getattr(x, "tag", None), getattr(weight, "tag", None), weight.is_leaf)
        if SHOWS_SAVED:
            Tagged.seen += seen
        return grads[0] * weight, (grads[0] * x).sum(0)


class Net(nn.Module):
    """What the operations of all programs share: a few layers, used once, twice or never."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(4))
        self.norms = nn.ModuleList(
            (
                nn.LayerNorm(WIDTH),
                nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-3),
                nn.LayerNorm(WIDTH, bias=False),
                nn.RMSNorm(WIDTH),
                nn.BatchNorm1d(WIDTH),
                nn.GroupNorm(4, WIDTH),
            )
        )
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.scale = nn.Parameter(torch.rand(WIDTH))


def block(net: Net, x: Tensor, which: int) -> Tensor:
    return F.gelu(net.linears[which % 4](net.norms[which % 4](x)))


def heads(x: Tensor) -> Tensor:
    return x.reshape(len(x), 4, WIDTH // 4)


def attention(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    query, key = heads(x).transpose(0, 1), heads(y).transpose(0, 1)
    found = F.scaled_dot_product_attention(query, key, key, is_causal=which % 2 == 0)
    return found.transpose(0, 1).reshape(x.shape)


def written_to(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    """In place, on something that nobody else has."""
    fresh = x * 1.5
    if which % 3 == 0:
        fresh.add_(y)
    elif which % 3 == 1:
        fresh[:, : WIDTH // 2] = y[:, WIDTH // 2 :]
    else:
        fresh = fresh.relu_()
    return fresh


def harm(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    """In place, on what may be needed as it was: often an error, and then the same error."""
    z = torch.sigmoid(x)
    out = z * y
    with torch.no_grad():
        z[0, which % WIDTH] += 1.0
    return out


def mixed(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    low = x.to(torch.bfloat16) if which % 2 else x.double()
    return (low * 2).tanh().to(x.dtype) + y


def hooked(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    z = x * y
    if z.requires_grad:
        z.register_hook(lambda grad: grad * 0.5)
    return z


def on_host(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    """Saved by hooks of the program's own."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return block(net, x, which) * y


def recurrent(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    return net.lstm(heads(x))[0].reshape(x.shape)


def convolved(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    return net.conv(heads(x)).reshape(x.shape)


def unbound(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    a, b = x.chunk(2, dim=1)
    return torch.cat((b * 2, a.sigmoid() * b), dim=1)


def gathered(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    order = torch.argsort(x.detach(), dim=1)
    return torch.where(y > 0, x.gather(1, order), y)


def looked_up(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    tokens = (x.detach().sum(1).abs() * 10).long() % TOKENS
    return net.embedding(tokens) + y


def squares(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    small = torch.tanh(x)
    return torch.matmul(torch.matmul(small, torch.tanh(y).t()), small) / len(x)


def tagged(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    z = torch.sin(x)
    z.tag = which  # type: ignore[attr-defined]
    net.scale.tag = which  # type: ignore[attr-defined]
    made: Tensor = Tagged.apply(z, net.scale)
    return made


def biased(net: Net, x: Tensor, y: Tensor, which: int) -> Tensor:
    """Matrix products large beside their weights, so that what they read may be copied."""
    wide = torch.cat([x] * 24)
    return F.gelu(net.linears[which % 4](wide)).unflatten(0, (24, -1)).mean(0) + y


Op = Callable[[Net, Tensor, Tensor, int], Tensor]
OPS: tuple[Op, ...] = (
    lambda net, x, y, which: net.linears[which % 4](x),
    lambda net, x, y, which: net.norms[which % len(net.norms)](x),
    lambda net, x, y, which: (F.gelu, F.silu, torch.relu, torch.tanh, torch.sigmoid)[which % 5](x),
    lambda net, x, y, which: F.gelu(x, approximate="tanh"),
    lambda net, x, y, which: x + y,
    lambda net, x, y, which: torch.add(x, y, alpha=0.5),
    lambda net, x, y, which: x * y,
    lambda net, x, y, which: x / (1 + y * y),
    lambda net, x, y, which: x * net.scale,
    lambda net, x, y, which: x**2 if which % 2 else (x.abs() + 1).sqrt(),
    lambda net, x, y, which: F.dropout(x, 0.3),
    lambda net, x, y, which: torch.softmax(x, dim=which % 2),
    lambda net, x, y, which: heads(x).transpose(1, 2).reshape(x.shape).contiguous(),
    lambda net, x, y, which: heads(x).permute(2, 0, 1).reshape(x.shape),
    lambda net, x, y, which: checkpoint(block, net, x, which, use_reentrant=False),
    lambda net, x, y, which: Squared.apply(torch.tanh(x)),
    lambda net, x, y, which: x.t().clone().t() * y,
    lambda net, x, y, which: x.detach() * y,
    lambda net, x, y, which: x.clone(),
    lambda net, x, y, which: F.linear(F.gelu(x.t()).t(), net.linears[which % 4].weight),
    attention, written_to, harm, mixed, hooked, on_host, recurrent, convolved, unbound, gathered,
    looked_up, squares, tagged, biased,
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    ops: tuple[tuple[int, int, int, int], ...]
    """For each operation: which, its two inputs, and a variant."""
    depth: int
    """How often they follow one another."""
    habits: tuple[str, ...]
    optimizer: str
    share: float
    planner: str
    lag: int
    bytes_per_s: float

    deeds: tuple[Deed, ...] = ()

    def forward(
        self, net: Net, x: Tensor, *, upto: int | None = None, step: int = 0, held: Any = None
    ) -> Tensor:
        pool, total = [x], x.new_zeros(())
        for at, (op, left, right, which) in enumerate((self.ops * self.depth)[:upto]):
            made = OPS[op](net, pool[-1 - left % len(pool)], pool[right % len(pool)], which)
            total = total + made.float().mean()  # every result counts: none is pruned away
            pool = [*pool[-3:], made]  # nobody holds what lies further back
            for deed in self.deeds:
                if deed.due(step, at):
                    do(deed, net, pool, held)
        for deed in self.deeds:
            if deed.due(step, -1):
                do(deed, net, pool, held)
        return total


@dataclass(frozen=True)
class Deed:
    """What a program does once in a while, in the middle of forward or after it."""

    what: str
    since: int
    every: int
    at: int
    """Operation after which it is done; -1: when forward is over."""
    which: int

    def due(self, step: int, at: int) -> bool:
        return at == self.at and step >= self.since and (step - self.since) % self.every == 0


DEEDS = (
    "parameter in place", "parameter through data", "parameter detached", "new data",
    "activation in place", "activation through data", "activation hook", "node hook",
    "held", "dropped",
)  # fmt: skip


def halved(grads: Any) -> Any:
    return tuple(None if grad is None else grad * 0.5 for grad in grads)


def do(deed: Deed, net: Net, pool: list[Tensor], held: list[Tensor]) -> None:
    """Small changes, so that numbers stay numbers."""
    parameters = list(net.parameters())
    parameter = parameters[deed.which % len(parameters)]
    activation = pool[deed.which % len(pool)]
    match deed.what:
        case "parameter in place":
            with torch.no_grad():
                parameter.mul_(0.9)
        case "parameter through data":
            parameter.data.clamp_(-0.1, 0.1)
        case "parameter detached":
            parameter.detach().add_(0.01)
        case "new data":
            parameter.data = parameter.data * 0.9
        case "activation in place":
            with torch.no_grad():
                activation.mul_(0.9)
        case "activation through data":
            activation.data.mul_(0.9)
        case "activation hook" if activation.requires_grad:
            activation.register_hook(lambda grad: grad * 0.5)
        case "node hook" if activation.grad_fn is not None:
            activation.grad_fn.register_prehook(halved)
        case "held":
            held.append(activation)
        case "dropped":
            held.clear()


HABITS = (
    "shapes", "branches", "evaluates", "drops a graph", "accumulates", "retains", "penalises",
    "fails in forward", "interleaves", "autocast", "keeps zeros", "late backward", "no step",
    "steps in backward", "updates in backward", "fails in backward", "module hooks", "tensor hooks",
    "packs itself", "looks at the graph",
)  # fmt: skip
programs = st.builds(
    Program,
    ops=st.lists(
        st.tuples(
            st.integers(0, len(OPS) - 1), st.integers(0, 3), st.integers(0, 7), st.integers(0, 29)
        ),
        min_size=3,
        max_size=9,
    ).map(tuple),
    habits=st.lists(st.sampled_from(HABITS), max_size=3, unique=True).map(tuple),
    depth=st.integers(1, 6),
    optimizer=st.sampled_from(("sgd", "adamw", "fused")),
    share=st.sampled_from((0.3, 0.5, 0.7, 0.9)),
    planner=st.sampled_from(("mix", "mix", "mix", "spanning", "literal")),
    lag=st.sampled_from((0, 1, 8)),
    bytes_per_s=st.sampled_from((1e5, 1e6, 1e12)),
)


deeds = st.builds(
    Deed,
    what=st.sampled_from(DEEDS),
    since=st.sampled_from((0, 6, 8)),
    every=st.integers(1, 3),
    at=st.integers(-1, 12),
    which=st.integers(0, 29),
)
harmful = st.builds(
    lambda program, deeds: replace(program, deeds=tuple(deeds), bytes_per_s=1e5, planner="mix"),
    programs,
    st.lists(deeds, min_size=1, max_size=3),
)


def backward(loss: Tensor, net: Net, habits: tuple[str, ...]) -> None:
    if "penalises" in habits:
        found = torch.autograd.grad(
            loss, net.linears[0].weight, create_graph=True, allow_unused=True
        )
        if found[0] is not None:
            loss = loss + found[0].square().sum()
    if "retains" in habits:
        loss.backward(retain_graph=True)
    loss.backward()


def one_step(program: Program, net: Net, step: int, left: list[Tensor]) -> Tensor:
    """Forward and backward of one iteration, with the program's habits."""
    habits = program.habits
    held: list[Tensor] = []
    forward = partial(program.forward, net, step=step, held=held)
    rows = 12 if "shapes" in habits and step % 3 == 2 else 16
    x = torch.randn(rows, WIDTH)
    upto = len(program.ops) * program.depth // 2 + 1 if "branches" in habits and step % 2 else None
    around = torch.autocast("cpu", torch.bfloat16) if "autocast" in habits else nullcontext()
    if "packs itself" in habits and step % 3 == 1:
        around = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    if "evaluates" in habits and step % 2:
        with torch.no_grad():
            forward(x)
    if "drops a graph" in habits:
        forward(x)
    if "fails in forward" in habits and step % 4 == 3:
        forward(x, upto=2) + torch.zeros(3)[5]
    with around:
        loss = forward(x, upto=upto)
        other = forward(x * 0.5, upto=upto) if "interleaves" in habits else None
    if "fails in backward" in habits and step % 4 == 3:
        net.scale.register_hook(fail)
    if "looks at the graph" in habits and step % 2:
        look_at(loss)
    if other is not None:
        backward(other, net, habits)
    if "accumulates" in habits:
        backward(loss, net, habits)
        with around:
            loss = forward(-x, upto=upto)
    if "late backward" in habits:
        left.append(loss)
        if len(left) < 2:
            return loss
        loss = left.pop(0)
    backward(loss, net, habits)
    return loss


def fail(gradient: Tensor) -> None:
    raise ValueError("the program's own")


def look_at(loss: Tensor) -> None:
    """As tools do that draw graphs."""
    nodes = [loss.grad_fn] if loss.grad_fn is not None else []
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following is not None][:2]
        for name in dir(node):
            if name.startswith("_saved_"):
                getattr(node, name)
        if len(nodes) > 40:
            return


def hook(program: Program, net: Net) -> None:
    """What the program leaves at its modules and parameters for good."""
    if "module hooks" in program.habits:
        for module in (*net.linears, net.conv, net.norms[0]):
            module.register_full_backward_pre_hook(lambda module, grads: halved(grads))
            module.register_full_backward_hook(lambda module, before, after: halved(before))
            module.register_forward_hook(lambda module, inputs, output: output * 1.5)
    for parameter in net.parameters():
        if "tensor hooks" in program.habits:
            parameter.register_hook(lambda grad: grad * 0.5)
        if "steps in backward" in program.habits:
            own = torch.optim.SGD([parameter], lr=1e-3)
            parameter.register_post_accumulate_grad_hook(lambda p, own=own: own.step())  # type: ignore[misc]
        if "updates in backward" in program.habits:
            parameter.register_post_accumulate_grad_hook(update)


def update(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=1e-3)  # type: ignore[arg-type]


def trail(program: Program, swapper: Swapper | None) -> list[Any]:
    """All that the program can see: losses, gradients, parameters, errors, random numbers."""
    torch.manual_seed(3)
    Tagged.seen = ()
    net = Net()
    parameters = list(net.parameters())
    hook(program, net)
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        if program.optimizer == "sgd"
        else torch.optim.AdamW(parameters, lr=1e-3, fused=program.optimizer == "fused")
    )
    seen: list[Any] = []
    left: list[Tensor] = []
    with swapper or nullcontext():
        for step in range(STEPS):
            try:
                seen.append(one_step(program, net, step, left).detach().clone())
            except (RuntimeError, IndexError, ValueError) as error:
                seen.append(type(error).__mro__[-4:])
                left.clear()
            seen += [None if p.grad is None else p.grad.clone() for p in parameters]
            if not ("no step" in program.habits and step % 2):
                optimizer.step()
                optimizer.zero_grad(set_to_none="keeps zeros" not in program.habits)
        left.clear()
    return [*seen, *(p.detach().clone() for p in parameters), torch.rand(1), Tagged.seen]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    return type(a) is type(b) and not isinstance(a, Tensor) and a == b


def differences(program: Program) -> tuple[list[int], Any]:
    plain = trail(program, None)
    speed = program.bytes_per_s
    link = Link(
        to_host_bytes_per_s=speed, to_device_bytes_per_s=speed, both_bytes_per_s=1.5 * speed
    )
    watch = Swapper(CpuStandIn(), budget_bytes=10**12, link=link, min_bytes=256)
    watched = trail(program, watch)
    held_bytes = max((record.peak_bytes for record in watch.records()), default=4096)
    swapper = Swapper(
        CpuStandIn(lag=program.lag),
        budget_bytes=max(1, int(program.share * held_bytes)),
        link=link,
        planner=program.planner,
        min_bytes=256,
    )
    governed = trail(program, swapper)
    assert len(plain) == len(watched) == len(governed)
    rows = zip(plain, watched, governed, strict=True)
    found = [i for i, (a, b, c) in enumerate(rows) if not (same(a, b) and same(a, c))]
    return found, swapper.report()


@settings(
    max_examples=int(os.environ.get("KILTER_TEST_PROGRAMS", "8")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(programs)
@example(  # what a recipe reads was written to
    Program(((0, 0, 0, 1), (22, 0, 1, 0), (0, 0, 0, 0)), 1, (), "sgd", 0.2, "mix", 0, 1e12)
)
@example(  # parts of one storage with version counters of their own: twice through a recurrent cell
    Program(
        ((0, 0, 0, 24), (26, 0, 0, 18), (14, 0, 0, 20), (0, 0, 0, 14), (0, 0, 0, 24)), 1,
        ("penalises",), "sgd", 0.7, "mix", 0, 1e12,
    )
)  # fmt: skip
@example(  # a graph that outlives the step, while the next pass uses the plan's host memory
    Program(
        ((6, 3, 6, 16), (1, 0, 0, 6), (8, 2, 3, 16), (5, 3, 7, 7), (15, 1, 5, 9), (6, 3, 0, 22),
         (23, 3, 5, 29)), 2, ("keeps zeros", "late backward", "accumulates"), "fused", 0.7, "mix",
        8, 1e5,
    )
)  # fmt: skip
@example(  # recomputed in the layout of the result, of which a turned view was saved
    Program(((0, 0, 0, 0), (19, 0, 0, 1), (0, 0, 0, 2)), 3, (), "sgd", 0.5, "mix", 0, 1e5)
)
def test_any_program_gives_the_plain_numbers(program: Program) -> None:
    found, report = differences(program)
    note(str(report))
    assert not found


recomputed = 0


@settings(
    max_examples=int(os.environ.get("KILTER_TEST_PROGRAMS", "12")),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@seed(int(os.environ.get("KILTER_TEST_SEED", "11")))
@given(harmful)
@example(  # written to after the trial, and saved then: what reads it is not made without that
    Program(
        ((0, 0, 0, 0),) * 5 + ((15, 3, 0, 0), (0, 0, 0, 0)), 2, (), "sgd", 0.5, "mix", 0, 1e5,
        (Deed("activation in place", since=6, every=1, at=8, which=3),),
    )
)  # fmt: skip
def one_harmful_program(program: Program) -> None:
    global recomputed
    found, report = differences(program)
    note(str(report))
    recomputed += report.recomputed
    assert not found


def test_programs_that_write_look_and_fail_give_the_plain_numbers() -> None:
    one_harmful_program()
    assert recomputed > 50 or not SHOWS_SAVED
