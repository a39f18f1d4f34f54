"""Rules that are read off the schema of an operator make the same bits again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kilter.memory.engine.operation_graph import Operator, operator_of
from kilter.memory.engine.operations import OPERATIONS
from kilter.memory.engine.schema_rules import OTHER_OPERATORS, VIEW_OPERATORS, rule_of

Operation = Callable[[Tensor, Tensor], Tensor]
WHERE = torch.rand(2, 4, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.5

BY_ELEMENT: dict[str, Operation] = {
    "abs": lambda x, y: x.abs(),
    "acos": lambda x, y: x.acos(),
    "acosh": lambda x, y: x.reciprocal().acosh(),
    "add": lambda x, y: torch.add(x, y, alpha=0.3),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x, value=0.1),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.1),
    "asin": lambda x, y: x.asin(),
    "asinh": lambda x, y: x.asinh(),
    "atan": lambda x, y: x.atan(),
    "atan2": torch.atan2,
    "atanh": lambda x, y: x.atanh(),
    "celu": lambda x, y: F.celu(x - y, 0.7),
    "clamp": lambda x, y: x.clamp(0.2, None),
    "clamp_max": lambda x, y: x.clamp_max(0.4),
    "clamp_min": lambda x, y: x.clamp_min(0.4),
    "clamp_min of a tensor": lambda x, y: x.clamp_min(y),
    "copysign": torch.copysign,
    "cos": lambda x, y: x.cos(),
    "cosh": lambda x, y: x.cosh(),
    "digamma": lambda x, y: x.digamma(),
    "div": torch.div,
    "div by a number": lambda x, y: x / 3,
    "elu": lambda x, y: F.elu(x - y, 0.7),
    "erf": lambda x, y: x.erf(),
    "erfc": lambda x, y: x.erfc(),
    "erfinv": lambda x, y: x.erfinv(),
    "exp": lambda x, y: x.exp(),
    "exp2": lambda x, y: x.exp2(),
    "expm1": lambda x, y: x.expm1(),
    "fmax": torch.fmax,
    "frac": lambda x, y: (3 * x).frac(),
    "gelu": lambda x, y: F.gelu(x, approximate="tanh"),
    "hardshrink": lambda x, y: F.hardshrink(x, 0.3),
    "hardsigmoid": lambda x, y: F.hardsigmoid(x),
    "hardtanh": lambda x, y: F.hardtanh(x, 0.3, 0.6),
    "hypot": torch.hypot,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp by a tensor": lambda x, y: torch.lerp(x, y, y),
    "lgamma": lambda x, y: x.lgamma(),
    "log": lambda x, y: x.log(),
    "log10": lambda x, y: x.log10(),
    "log1p": lambda x, y: x.log1p(),
    "log2": lambda x, y: x.log2(),
    "logaddexp": torch.logaddexp,
    "logit": lambda x, y: x.logit(0.1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mish": lambda x, y: F.mish(x),
    "mul": torch.mul,
    "mul by a mask": lambda x, y: x * WHERE,
    "neg": lambda x, y: -x,
    "pow": torch.pow,
    "pow of a number": lambda x, y: 2**x,
    "pow to a number": lambda x, y: x**1.5,
    "reciprocal": lambda x, y: x.reciprocal(),
    "relu": lambda x, y: F.relu(x - y),
    "rsqrt": lambda x, y: x.rsqrt(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "silu": lambda x, y: F.silu(x),
    "sin": lambda x, y: x.sin(),
    "sinc": lambda x, y: x.sinc(),
    "sinh": lambda x, y: x.sinh(),
    "softplus": lambda x, y: F.softplus(x, 2.0, 1.0),
    "softshrink": lambda x, y: F.softshrink(x, 0.3),
    "sqrt": lambda x, y: x.sqrt(),
    "sub": lambda x, y: torch.sub(x, y, alpha=0.3),
    "tan": lambda x, y: x.tan(),
    "tanh": lambda x, y: x.tanh(),
    "where": lambda x, y: torch.where(WHERE, x, y),
    "xlogy": torch.xlogy,
}
BY_NAME: dict[str, Operation] = {
    "_fft_c2c": lambda x, y: torch.fft.ifft(
        torch.view_as_complex(x.unfold(-1, 2, 2)), dim=1, norm="ortho"
    ),
    "_fft_r2c": lambda x, y: torch.fft.rfft(x),
    "_prelu_kernel": lambda x, y: F.prelu(x - y, y[0, :, 0, 0]),
    "alias": lambda x, y: torch.ops.aten.alias(x),
    "amax": lambda x, y: x.amax((1, -1), keepdim=True),
    "amin": lambda x, y: x.amin(-1),
    "avg_pool2d": lambda x, y: F.avg_pool2d(x, 3, 2, 1, True, False),
    "avg_pool3d": lambda x, y: F.avg_pool3d(x, 3, (1, 2, 2), 1, divisor_override=5),
    "baddbmm": lambda x, y: torch.baddbmm(x[0], y[0], x[1], alpha=0.1, beta=2),
    "bmm": lambda x, y: torch.bmm(x[0], y[0]),
    "channel_shuffle": lambda x, y: torch.channel_shuffle(x, 2),
    "diagonal": lambda x, y: x.diagonal(1, -1, 2),
    "flip": lambda x, y: x.flip(0, -1),
    "glu": lambda x, y: F.glu(x, 1),
    "hardswish": lambda x, y: F.hardswish(9 * (x - y)),
    "im2col": lambda x, y: F.unfold(x, 3, 1, 1, 2),
    "leaky_relu": lambda x, y: F.leaky_relu(x - y, 0.2),
    "logsumexp": lambda x, y: x.logsumexp((0, 2)),
    "mm": lambda x, y: torch.mm(x[0, 0], y[0, 0]),
    "permute": lambda x, y: x.permute(-1, 0, 2, 1),
    "pixel_shuffle": lambda x, y: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x, y: F.pixel_unshuffle(x, 3),
    "reflection_pad1d": lambda x, y: F.pad(x[0], (1, 2), mode="reflect"),
    "reflection_pad2d": lambda x, y: F.pad(x, (1, 2, 3, 0), mode="reflect"),
    "reflection_pad3d": lambda x, y: F.pad(x, (1, 2, 3, 0, 1, 1), mode="reflect"),
    "repeat": lambda x, y: x.repeat(2, 1, 1, 2),
    "replication_pad1d": lambda x, y: F.pad(x[0], (1, 2), mode="replicate"),
    "replication_pad2d": lambda x, y: F.pad(x, (1, 2, 3, 0), mode="replicate"),
    "replication_pad3d": lambda x, y: F.pad(x, (1, 2, 3, 0, 1, 1), mode="replicate"),
    "roll": lambda x, y: x.roll((1, -2), (-1, 2)),
    "select": lambda x, y: x.select(-1, -2),
    "slice": lambda x, y: x[:, :, -9:-2:2],
    "std": lambda x, y: x.std((1, 2), correction=0),
    "t": lambda x, y: x[0, 0].t(),
    "transpose": lambda x, y: x.transpose(-1, 1),
    "tril": lambda x, y: x.tril(-1),
    "triu": lambda x, y: x.triu(1),
    "unfold": lambda x, y: x.unfold(-1, 3, 2),
    "unsqueeze": lambda x, y: x.unsqueeze(-2),
    "upsample_bicubic2d": lambda x, y: F.interpolate(x, size=(20, 50), mode="bicubic"),
    "upsample_bilinear2d": lambda x, y: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
    "upsample_linear1d": lambda x, y: F.interpolate(x[0], scale_factor=1.5, mode="linear"),
    "upsample_nearest1d": lambda x, y: F.interpolate(x[0], size=17),
    "_upsample_nearest_exact1d": lambda x, y: F.interpolate(x[0], size=17, mode="nearest-exact"),
    "_upsample_nearest_exact2d": lambda x, y: F.interpolate(x, size=17, mode="nearest-exact"),
    "_upsample_nearest_exact3d": lambda x, y: F.interpolate(
        x[None], size=(5, 9, 17), mode="nearest-exact"
    ),
    "upsample_nearest2d": lambda x, y: F.interpolate(x, size=17),
    "upsample_nearest3d": lambda x, y: F.interpolate(x[None], scale_factor=2),
    "upsample_trilinear3d": lambda x, y: F.interpolate(x[None], scale_factor=2, mode="trilinear"),
    "var": lambda x, y: x.var(-1, keepdim=True),
    "view_as_complex": lambda x, y: torch.view_as_complex(x.unfold(-1, 2, 2)),
    "view_as_real": lambda x, y: torch.view_as_real(torch.view_as_complex(x.unfold(-1, 2, 2))),
}
WITHOUT: dict[str, Operation] = {
    "random numbers": lambda x, y: torch.native_dropout(x, 0.5, True)[0],
    "random slopes": lambda x, y: F.rrelu(x - y, training=True),
    "a number that the node does not keep": lambda x, y: 1 - x,
    "a number in a mask": lambda x, y: x.masked_fill(WHERE, 0.3),
    "a type that the node does not keep": lambda x, y: x.cumsum(-1),
    "several results": lambda x, y: x.max(-1)[0],
    "rows that are added up": lambda x, y: x.index_add(0, torch.tensor([0, 0]), y),
    "limits that may be missing": lambda x, y: torch.clamp(x, y, None),
}


class Again:
    """Carries out what made a tensor, from the leaves of its graph on."""

    output, made = 0, None

    def saved(self, node: Any, name: str, index: int | None = None) -> Any:
        return getattr(node, name.replace("_raw", "", 1))

    def value(self, edge: tuple[Any, int]) -> Any:
        node, _ = edge
        if node is None or node.name() == "torch::autograd::AccumulateGrad":
            return node and node.variable
        like = node._input_metadata[0]
        rule = OPERATIONS.get(node.name()) or rule_of(node)
        return rule and rule.build(self, node, like.dtype, tuple(like.shape))  # type: ignore[arg-type]

    def call(self, operator: Operator, *given: Any, output: int | None = None, **named: Any) -> Any:
        return operator_of(operator)(*given, **named)


def made_by(operation: Operation, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    x, y = ((0.9 * torch.rand(2, 4, 12, 12, dtype=dtype) + 0.05).requires_grad_() for _ in "xy")
    return operation(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*BY_ELEMENT, *BY_NAME])
def test_an_operation_is_carried_out_again_with_the_same_bits(
    name: str, dtype: torch.dtype
) -> None:
    made = made_by((BY_ELEMENT | BY_NAME)[name], dtype)
    rule = rule_of(made.grad_fn)
    assert rule is not None
    assert rule.kind == (
        "view" if name in VIEW_OPERATORS else name.split()[0].strip("_").replace("_", " ")
    )
    with torch.no_grad():
        again = Again().value((made.grad_fn, 0))
    assert again.dtype is made.dtype
    assert torch.equal(again, made)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_is_not_known_to_make_the_same_bits_again_has_no_rule(name: str) -> None:
    with torch.no_grad():
        made = Again().value((made_by(WITHOUT[name], torch.float32).grad_fn, 0))
    assert made is None


def test_each_operation_that_is_known_by_name_has_a_case() -> None:
    assert set(BY_NAME) == VIEW_OPERATORS | OTHER_OPERATORS
