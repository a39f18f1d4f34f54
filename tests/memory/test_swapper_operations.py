"""Every operation that a recipe may name: recomputed, and bit for bit what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.operations import OPERATIONS
from kilter.memory.engine.pass_record import SavedTensor
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
        self.three = nn.Linear(WIDTH, 3 * WIDTH)
        self.group = nn.GroupNorm(2, 4)


def images(x: Tensor) -> Tensor:
    return x.unflatten(0, (4, -1)).transpose(1, 2)


def square(w: Weights) -> Tensor:
    return w.words.weight[:WIDTH].view(1, WIDTH, WIDTH)


def twice(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).transpose(1, 2)


# What makes a tensor that the next operation saves. `w.two` saves its input.
BODIES: dict[str, tuple[str, Body]] = {
    "AddBackward0": ("add", lambda x, w: w.two(x + w.one(x))),
    "AddmmBackward0": ("matrix product", lambda x, w: F.silu(w.two(x))),
    "BmmBackward0": (
        "bmm",
        lambda x, w: F.silu(torch.bmm(w.one(x).view(4, -1, WIDTH), square(w).repeat(4, 1, 1))),
    ),
    "CloneBackward0": ("copy", lambda x, w: w.two(w.one(x).relu().transpose(0, 1).clone().t())),
    "ConvolutionBackward0": ("convolution", lambda x, w: F.silu(w.conv(images(w.one(x))))),
    "DivBackward0": ("div", lambda x, w: w.two(w.one(x) / 3.0)),
    "EmbeddingBackward0": (
        "lookup",
        lambda x, w: w.two(w.words(torch.arange(96, device=x.device) % 100)) + 0 * x.sum(),
    ),
    "GeluBackward0": ("gelu", lambda x, w: w.two(F.gelu(w.one(x), approximate="tanh"))),
    "MmBackward0": ("mm", lambda x, w: F.silu(w.one(x))),
    "MulBackward0": ("mul", lambda x, w: w.two(w.one(x) * torch.full((WIDTH,), 0.3))),
    "NativeBatchNormBackward0": ("batch norm", lambda x, w: w.two(w.batch(w.one(x)))),
    "NativeDropoutBackward0": (
        "dropout",
        lambda x, w: w.two(torch.native_dropout(w.one(x), 0.3, True)[0]),
    ),
    "NativeLayerNormBackward0": ("layer norm", lambda x, w: w.two(w.norm(w.one(x)))),
    "PermuteBackward0": ("add", lambda x, w: w.two(x + w.one(x).permute(-1, 0).permute(1, 0))),
    "PowBackward0": ("pow", lambda x, w: w.two(w.one(x) ** 3)),
    "ReluBackward0": ("relu", lambda x, w: w.two(w.one(x).relu())),
    "ReshapeAliasBackward0": (
        "add",
        lambda x, w: w.two(
            x + w.three(x).view(96, 3, -1).unbind(1)[1].reshape(2, 48, 48).sin().reshape(96, -1)
        ),
    ),
    "SigmoidBackward0": ("sigmoid", lambda x, w: w.two(w.one(x).sigmoid())),
    "SiluBackward0": ("silu", lambda x, w: w.two(F.silu(w.one(x)))),
    "TanhBackward0": ("tanh", lambda x, w: w.two(w.one(x).tanh())),
    "ToCopyBackward0": ("cast", lambda x, w: w.one(x).relu().double().sin()),
    "TransposeBackward0": (
        "add",
        lambda x, w: w.two(x + twice(w.one(x).view(2, -1, WIDTH)).flatten(0, 1)),
    ),
    "UnsafeViewBackward0": ("view", lambda x, w: F.silu(w.one(x.view(2, -1, WIDTH)))),
    "ViewBackward0": ("add", lambda x, w: w.two(x + w.one(x).view(-1).view(-1, WIDTH))),
}


def after(operation: Callable[[Tensor], Tensor], *, planes: bool = False) -> Body:
    """The operation on a matrix product, or on its rows as planes of images; its result is saved
    by the next one."""

    def body(x: Tensor, w: Weights) -> Tensor:
        y = w.one(x)
        return F.silu(operation(y.view(2, 4, 12, WIDTH) if planes else y))

    return body


def on_planes(operation: Callable[[Tensor], Tensor]) -> Body:
    return after(operation, planes=True)


def of_mine(operation: Callable[[Tensor, Weights], Tensor]) -> Body:
    """The same with parameters."""

    def body(x: Tensor, w: Weights) -> Tensor:
        return F.silu(operation(w.one(x).view(2, 4, 12, WIDTH), w))

    return body


def attention(mask: bool) -> Body:
    def body(x: Tensor, w: Weights) -> Tensor:
        query, key, value = w.three(x).view(2, WIDTH, 3, 4, 12).permute(2, 0, 3, 1, 4).unbind(0)
        added = torch.ones(WIDTH, WIDTH).tril().log() if mask else None
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=added)
        return w.two(found.transpose(1, 2).reshape(96, WIDTH))

    return body


PLACES = torch.randperm(96, generator=torch.Generator().manual_seed(0))
BODIES |= {
    "AbsBackward0": ("abs", after(torch.abs)),
    "AdaptiveAvgPool2DBackward0": ("pooling", on_planes(lambda x: F.adaptive_avg_pool2d(x, 6))),
    "AdaptiveMaxPool2DBackward0": ("pooling", on_planes(lambda x: F.adaptive_max_pool2d(x, 6))),
    "AvgPool2DBackward0": ("avg pool2d", on_planes(lambda x: F.avg_pool2d(x, 3, 2, 1))),
    "BaddbmmBackward0": (
        "baddbmm",
        after(lambda x: torch.baddbmm(*(x.view(2, WIDTH, WIDTH),) * 3, alpha=0.1, beta=2)),
    ),
    "CatBackward0": ("concatenation", after(lambda x: torch.cat([x.sin(), x.cos()], -1))),
    "ChannelShuffleBackward0": (
        "channel shuffle", on_planes(lambda x: torch.channel_shuffle(x.relu(), 2))
    ),
    "ClampBackward1": ("clamp", after(lambda x: x.clamp(min=-0.1))),
    "ConstantPadNdBackward0": (
        "padding", on_planes(lambda x: F.pad(x.relu(), (0, 2, 1, 0), value=3))
    ),
    "CosBackward0": ("cos", after(torch.cos)),
    "DivBackward1": ("div", after(lambda x: torch.ops.aten.div.Scalar(x, 3.0))),
    "EluBackward0": ("elu", after(F.selu)),
    "ErfBackward0": ("erf", after(torch.erf)),
    "ExpBackward0": ("exp", after(lambda x: (x * x).exp())),
    "ExpandBackward0": ("add", after(lambda x: x + x[:1].relu().expand(96, WIDTH))),
    "FlipBackward0": ("flip", after(lambda x: x.relu().flip(0, 1))),
    "GatherBackward0": (
        "gather", lambda x, w: w.two(w.one(x).relu().gather(0, PLACES[:, None].repeat(1, WIDTH)))
    ),
    "GluBackward0": ("glu", after(lambda x: F.glu(x.relu()))),
    "HardsigmoidBackward0": ("hardsigmoid", after(F.hardsigmoid)),
    "HardswishBackward0": ("hardswish", after(F.hardswish)),
    "HardtanhBackward0": ("hardtanh", after(F.relu6)),
    "IndexBackward0": ("index", after(lambda x: x.relu()[:, PLACES[PLACES < WIDTH]])),
    "IndexSelectBackward0": ("index", after(lambda x: x.relu().index_select(0, PLACES))),
    "LeakyReluBackward0": ("leaky relu", after(F.leaky_relu)),
    "LogSoftmaxBackward0": ("softmax", after(lambda x: x.log_softmax(0))),
    "MaxPool2DWithIndicesBackward0": ("pooling", on_planes(lambda x: F.max_pool2d(x, 3, 2, 1))),
    "MeanBackward1": ("mean", after(lambda x: x.view(2, WIDTH, WIDTH).mean(0))),
    "MishBackward0": ("mish", after(F.mish)),
    "MulBackward1": ("mul", after(lambda x: torch.ops.aten.mul.Scalar(x, 0.3))),
    "NativeGroupNormBackward0": ("group norm", of_mine(lambda x, w: w.group(x))),
    "NegBackward0": ("neg", after(lambda x: -x.relu())),
    "PixelShuffleBackward0": ("pixel shuffle", on_planes(lambda x: F.pixel_shuffle(x.relu(), 2))),
    "PixelUnshuffleBackward0": (
        "pixel unshuffle", on_planes(lambda x: F.pixel_unshuffle(x.relu(), 2))
    ),
    "ReflectionPad2DBackward0": (
        "reflection pad2d", on_planes(lambda x: F.pad(x, (1, 2, 3, 0), mode="reflect"))
    ),
    "RepeatBackward0": ("repeat", after(lambda x: x.relu().repeat(2, 1))),
    "ReplicationPad2DBackward0": (
        "replication pad2d", on_planes(lambda x: F.pad(x, (1, 2, 3, 0), mode="replicate"))
    ),
    "RollBackward0": ("roll", on_planes(lambda x: x.relu().roll((1, -2), (-1, 2)))),
    "RsqrtBackward0": ("rsqrt", after(lambda x: x.exp().rsqrt())),
    "SafeSoftmaxBackward0": ("softmax", after(lambda x: torch.ops.aten._safe_softmax(x, -1))),
    "ScaledDotProductFlashAttentionForCpuBackward0": ("attention", attention(mask=True)),
    "SelectBackward0": ("add", after(lambda x: x[:WIDTH] + x.view(2, WIDTH, -1).select(0, -1))),
    "SinBackward0": ("sin", after(torch.sin)),
    "SliceBackward0": ("add", after(lambda x: x[-60:-2:2] + x[:29])),
    "SoftmaxBackward0": ("softmax", after(lambda x: x.softmax(-1, dtype=torch.float64))),
    "SoftplusBackward0": ("softplus", after(lambda x: F.softplus(x, 2.0, 10.0))),
    "SplitBackward0": ("add", after(lambda x: torch.add(*x.chunk(2)))),
    "SplitWithSizesBackward0": ("mul", after(lambda x: torch.mul(*x.split([40, 40, 16])[:2]))),
    "SqrtBackward0": ("sqrt", after(lambda x: x.exp().sqrt())),
    "SqueezeBackward0": ("add", after(lambda x: x + x.sin()[None].squeeze())),
    "SqueezeBackward1": ("add", after(lambda x: x + x.sin()[None].squeeze(0))),
    "SqueezeBackward2": ("add", after(lambda x: x + x.sin()[None, None].squeeze((0, 1)))),
    "StackBackward0": ("concatenation", after(lambda x: torch.stack([x.sin(), x.cos()], -1))),
    "SubBackward0": ("sub", after(lambda x: torch.sub(x.sin(), x, alpha=0.5))),
    "SumBackward1": ("sum", after(lambda x: x.view(2, WIDTH, WIDTH).sum(0, keepdim=True))),
    "TBackward0": ("add", after(lambda x: x + x.sin().t().t())),
    "UnbindBackward0": ("add", after(lambda x: torch.add(*x.view(WIDTH, 2, WIDTH).unbind(1)))),
    "UnsqueezeBackward0": ("add", after(lambda x: x + x.view(2, 1, -1).unsqueeze(1).view(96, -1))),
    "UpsampleBicubic2DBackward0": (
        "upsample bicubic2d",
        on_planes(lambda x: F.interpolate(x.relu(), size=(20, 50), mode="bicubic")),
    ),
    "UpsampleBilinear2DBackward0": (
        "upsample bilinear2d",
        on_planes(lambda x: F.interpolate(x.relu(), scale_factor=1.5, mode="bilinear")),
    ),
    "UpsampleNearest2DBackward0": (
        "upsample nearest2d", on_planes(lambda x: F.interpolate(x.relu(), scale_factor=2))
    ),
    "UpsampleNearestExact2DBackward0": (
        "upsample nearest exact2d",
        on_planes(lambda x: F.interpolate(x.relu(), scale_factor=2, mode="nearest-exact")),
    ),
    "WhereBackward0": ("where", after(lambda x: torch.where(x > 0, x.sin(), x.cos()))),
}  # fmt: skip
ONLY_ON_A_GPU = {
    "CudnnBatchNormBackward0",
    "FusedRmsNormBackward0",
    "ScaledDotProductCudnnAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductFlashAttentionBackward0",
}


def train(body: Body, budget_bytes: int | None) -> tuple[list[Tensor], list[SavedTensor], int]:
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
    assert set(OPERATIONS) <= set(BODIES) | ONLY_ON_A_GPU


def graph_of(tensor: Tensor) -> Iterator[str]:
    """The names of the nodes that lead to it."""
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            yield node.name()
            nodes += [before for before, _ in node.next_functions]


@shows_saved
@pytest.mark.parametrize("node", BODIES)
def test_it_is_made_again_and_equal(node: str) -> None:
    kind, body = BODIES[node]
    assert node in graph_of(body(torch.randn(96, WIDTH, requires_grad=True).sin(), Weights()))
    plain, _, _ = train(body, None)
    ours, data, _ = train(body, 10**9)
    assert [d.name for d in data if d.recipe == kind and d.recompute_s is not None]
    assert not [d.name for d in data if d.recipe is not None and d.recompute_s is None]
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@shows_saved
def test_a_long_chain_of_views_is_made_again() -> None:
    def body(x: Tensor, w: Weights) -> Tensor:
        y = w.one(x).relu().view(2, WIDTH, 4, 12).permute(2, 0, 1, 3)[:, None].squeeze(1)
        return w.two(-y.transpose(1, 2).transpose(1, 2).permute(1, 2, 0, 3).reshape(96, WIDTH))

    _, data, _ = train(body, 10**9)
    assert [d.name for d in data if d.recipe == "neg" and d.recompute_s is not None]


@shows_saved
@pytest.mark.parametrize("known", [True, False])
def test_what_is_put_together_with_tensors_outside_the_graph(known: bool) -> None:
    """As keys with an empty cache are; what else is outside the graph is out of reach."""
    outside = torch.empty(96, 0) if known else torch.ones(96, 1)

    def body(x: Tensor, w: Weights) -> Tensor:
        y = torch.cat([outside, w.one(x).exp().cos()], -1).sin()
        return w.two(y[:, -WIDTH:].contiguous())

    plain, _, _ = train(body, None)
    ours, data, _ = train(body, 10**9)
    found = [d for d in data if d.recipe == "concatenation" and d.recompute_s is not None]
    assert bool(found) is known
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


@shows_saved
def test_passes_are_tried_once_although_their_levels_change() -> None:
    """Optimizer state has left or come back: levels are measured anew, recipes stay."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step() -> None:
        model(torch.randn(96, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with Swapper(CpuStandIn(), budget_bytes=80_000, link=LINK, min_bytes=MIN_BYTES) as swapper:
        for _ in range(6):
            step()
        first = swapper.report()
        swapper.weigh_anew()
        assert not swapper.report().plans
        for _ in range(3):
            step()
        again = swapper.report()
    assert first.plans
    assert first.plans[0].recomputed > 0
    assert first.watched == 3  # the last of them tries the recipes
    assert again.watched - first.watched == 2
    assert again.plans[0].recomputed == first.plans[0].recomputed
    assert again.recomputed > first.recomputed
