"""Programs nobody thought of: random networks in random training loops, held against the plain run.

A program is drawn operation by operation, its loop habit by habit. Whatever it does, including
what autograd forbids, must come out the same under a memory plan, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kilter.act.swapper import CpuStandIn, Swapper
from kilter.plan.swap.problem import Link

WIDTH = 32
STEPS = 12
TOKENS = 50


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
    looked_up, squares,
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

    def forward(self, net: Net, x: Tensor, *, upto: int | None = None) -> Tensor:
        pool, total = [x], x.new_zeros(())
        for op, left, right, which in (self.ops * self.depth)[:upto]:
            made = OPS[op](net, pool[-1 - left % len(pool)], pool[right % len(pool)], which)
            total = total + made.float().mean()  # every result counts: none is pruned away
            pool = [*pool[-3:], made]  # nobody holds what lies further back
        return total


HABITS = (
    "shapes", "branches", "evaluates", "drops a graph", "accumulates", "retains", "penalises",
    "fails in forward", "interleaves", "autocast", "keeps zeros", "late backward", "no step",
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
    rows = 12 if "shapes" in habits and step % 3 == 2 else 16
    x = torch.randn(rows, WIDTH)
    upto = len(program.ops) * program.depth // 2 + 1 if "branches" in habits and step % 2 else None
    autocast = torch.autocast("cpu", torch.bfloat16) if "autocast" in habits else nullcontext()
    if "evaluates" in habits and step % 2:
        with torch.no_grad():
            program.forward(net, x)
    if "drops a graph" in habits:
        program.forward(net, x)
    if "fails in forward" in habits and step % 4 == 3:
        program.forward(net, x, upto=2) + torch.zeros(3)[5]
    with autocast:
        loss = program.forward(net, x, upto=upto)
        other = program.forward(net, x * 0.5, upto=upto) if "interleaves" in habits else None
    if other is not None:
        backward(other, net, habits)
    if "accumulates" in habits:
        backward(loss, net, habits)
        with autocast:
            loss = program.forward(net, -x, upto=upto)
    if "late backward" in habits:
        left.append(loss)
        if len(left) < 2:
            return loss
        loss = left.pop(0)
    backward(loss, net, habits)
    return loss


def trail(program: Program, swapper: Swapper | None) -> list[Any]:
    """All that the program can see: losses, gradients, parameters, errors, random numbers."""
    torch.manual_seed(3)
    net = Net()
    parameters = list(net.parameters())
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
            except (RuntimeError, IndexError) as error:
                seen.append(type(error).__mro__[-4:])
                left.clear()
            seen += [None if p.grad is None else p.grad.clone() for p in parameters]
            if not ("no step" in program.habits and step % 2):
                optimizer.step()
                optimizer.zero_grad(set_to_none="keeps zeros" not in program.habits)
        left.clear()
    return [*seen, *(p.detach().clone() for p in parameters), torch.rand(1)]


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
    return [
        i for i, (a, b, c) in enumerate(rows) if not (same(a, b) and same(a, c))
    ], swapper.report()


@settings(
    max_examples=40,
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
@example(  # made again in the layout of the result, of which a turned view was saved
    Program(((0, 0, 0, 0), (19, 0, 0, 1), (0, 0, 0, 2)), 3, (), "sgd", 0.5, "mix", 0, 1e5)
)
def test_any_program_gives_the_plain_numbers(program: Program) -> None:
    found, report = differences(program)
    note(str(report))
    assert not found
