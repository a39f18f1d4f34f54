"""Every operation that a recipe may name: recomputed, and bit for bit what it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.operations import OPERATIONS
from kilter.memory.engine.pass_record import SavedDatum
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=1e6, to_device_bytes_per_s=1e6, both_bytes_per_s=2e6)
"""So slow that whatever can be recomputed is."""
WIDTH = 48
MIN_BYTES = 1024

shows_saved = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"),
    reason="this PyTorch does not show what its nodes saved, so little is recomputed",
)

Body = Callable[[Tensor, "Weights"], Tensor]


class OwnNorm(nn.LayerNorm):
    """As libraries of models have it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH, bias=False)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.norm, self.own = nn.LayerNorm(WIDTH), OwnNorm(WIDTH)
        self.batch = nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.words = nn.Embedding(100, WIDTH)


def images(x: Tensor) -> Tensor:
    return x.unflatten(0, (4, -1)).transpose(1, 2)


def square(w: Weights) -> Tensor:
    return w.words.weight[:WIDTH].view(1, WIDTH, WIDTH)


def twice(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).transpose(1, 2)


# What makes a tensor that the next operation saves. `w.two` saves its input.
BODIES: dict[str, tuple[str, Body]] = {
    "AddBackward0": ("sum", lambda x, w: w.two(x + w.one(x))),
    "AddmmBackward0": ("matrix product", lambda x, w: F.silu(w.two(x))),
    "BmmBackward0": (
        "matrix product",
        lambda x, w: F.silu(torch.bmm(w.one(x).view(4, -1, WIDTH), square(w).repeat(4, 1, 1))),
    ),
    "CloneBackward0": ("copy", lambda x, w: w.two(w.one(x).relu().transpose(0, 1).clone().t())),
    "ConvolutionBackward0": ("convolution", lambda x, w: F.silu(w.conv(images(w.one(x))))),
    "DivBackward0": ("quotient", lambda x, w: w.two(w.one(x) / 3.0)),
    "EmbeddingBackward0": (
        "lookup",
        lambda x, w: w.two(w.words(torch.arange(96, device=x.device) % 100)) + 0 * x.sum(),
    ),
    "GeluBackward0": ("gelu", lambda x, w: w.two(F.gelu(w.one(x), approximate="tanh"))),
    "MmBackward0": ("matrix product", lambda x, w: F.silu(w.one(x))),
    "MulBackward0": ("product", lambda x, w: w.two(w.one(x) * torch.full((WIDTH,), 0.3))),
    "NativeBatchNormBackward0": ("batch norm", lambda x, w: w.two(w.batch(w.one(x)))),
    "NativeDropoutBackward0": (
        "dropout",
        lambda x, w: w.two(torch.native_dropout(w.one(x), 0.3, True)[0]),
    ),
    "NativeLayerNormBackward0": ("layer norm", lambda x, w: w.two(w.norm(w.one(x)))),
    "PermuteBackward0": ("sum", lambda x, w: w.two(x + w.one(x).permute(-1, 0).permute(1, 0))),
    "PowBackward0": ("power", lambda x, w: w.two(w.one(x) ** 3)),
    "ReluBackward0": ("relu", lambda x, w: w.two(w.one(x).relu())),
    "SigmoidBackward0": ("sigmoid", lambda x, w: w.two(w.one(x).sigmoid())),
    "SiluBackward0": ("silu", lambda x, w: w.two(F.silu(w.one(x)))),
    "TanhBackward0": ("tanh", lambda x, w: w.two(w.one(x).tanh())),
    "ToCopyBackward0": ("cast", lambda x, w: w.one(x).relu().double().sin()),
    "TransposeBackward0": (
        "sum",
        lambda x, w: w.two(x + twice(w.one(x).view(2, -1, WIDTH)).flatten(0, 1)),
    ),
    "UnsafeViewBackward0": ("view", lambda x, w: F.silu(w.one(x.view(2, -1, WIDTH)))),
    "ViewBackward0": ("sum", lambda x, w: w.two(x + w.one(x).view(-1).view(-1, WIDTH))),
}
ONLY_ON_A_GPU = {"CudnnBatchNormBackward0"}


def train(body: Body, budget_bytes: int | None) -> tuple[list[Tensor], list[SavedDatum], int]:
    """Losses and parameters; what was saved, and how many data were recomputed."""
    torch.manual_seed(0)
    weights = Weights()
    before = nn.Linear(WIDTH, WIDTH)
    parameters = [*weights.parameters(), *before.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    found: list[Tensor] = []

    def step(number: int) -> None:
        torch.manual_seed(number)
        x = before(torch.randn(96, WIDTH)).sin()
        loss = body(x, weights).sin().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())

    if budget_bytes is None:
        for number in range(9):
            step(number)
        return found + [p.detach() for p in parameters], [], 0
    with Swapper(
        CpuStandIn(), budget_bytes=budget_bytes, link=LINK, min_bytes=MIN_BYTES
    ) as swapper:
        for number in range(9):
            step(number)
        records, report = swapper.records(), swapper.report()
    data = [datum for record in records for datum in record.data]
    return found + [p.detach() for p in parameters], data, report.recomputed


def test_every_operation_has_a_case() -> None:
    assert set(BODIES) | ONLY_ON_A_GPU == set(OPERATIONS)


@shows_saved
@pytest.mark.parametrize("node", BODIES)
def test_it_is_made_again_and_equal(node: str) -> None:
    kind, body = BODIES[node]
    plain, _, _ = train(body, None)
    ours, data, _ = train(body, 10**9)
    assert [d.name for d in data if d.recipe == kind and d.recompute_s is not None]
    assert not [d.name for d in data if d.recipe is not None and d.recompute_s is None]
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@shows_saved
def test_a_norm_of_a_library_is_made_again() -> None:
    _, data, _ = train(lambda x, w: w.two(w.own(w.one(x))), 10**9)
    assert [d.name for d in data if d.recipe == "layer norm" and d.recompute_s is not None]


@shows_saved
def test_a_block_like_llama_is_made_again_from_its_products() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
            self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
            return x + self.down(F.dropout(F.silu(self.gate(y)) * self.up(y), 0.1))

    def run(budget_bytes: int | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(6)))
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []

        def step(number: int) -> None:
            torch.manual_seed(number)
            loss = model(torch.randn(64, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        if budget_bytes is None:
            for number in range(12):
                step(number)
            return [*losses, *model.parameters()], 0
        with Swapper(
            CpuStandIn(), budget_bytes=budget_bytes, link=LINK, min_bytes=MIN_BYTES
        ) as swapper:
            for number in range(12):
                step(number)
            return [*losses, *model.parameters()], swapper.report().recomputed

    plain, _ = run(None)
    ours, recomputed = run(1_000_000)
    assert recomputed > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
