"""Is it the same answer? Differences to a float64 reference, of the serial loop and others.

The reference interprets the traced graph with every floating value widened: the same mathematics
without the rounding. A way of running passes if its largest difference is at most twice that of the
serial loop (`kilter.plan.branches.within`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx


class _Widened(fx.Interpreter):  # type: ignore[misc]
    """The graph in float64."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _wide(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        wide = {
            k: torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v
            for k, v in kwargs.items()
        }
        if target is torch.ops.aten._softmax.default:
            args = (*args[:2], False)  # half to float: the input is double already
        if "_scaled_dot_product" in str(target):
            return _attention(target, args, kwargs)
        return super().call_function(target, args, wide)


def _attention(target: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The fused attentions have no float64 form; their definition has."""
    names = [a.name for a in target._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    found, _ = torch.ops.aten._scaled_dot_product_attention_math(
        given["query"],
        given["key"],
        given["value"],
        given.get("attn_bias", given.get("attn_mask")),
        0.0,
        given.get("is_causal", False),
        scale=given.get("scale"),
    )
    return (found, *[None] * (len(target._schema.returns) - 1))


def _wide(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().to(torch.float64)
    return x


def reference(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs in float64; `RuntimeError` where an operation has no float64 form."""
    with torch.no_grad():
        return list(_Widened(graph).run(*(_wide(x) for x in inputs)))


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest absolute difference; infinite if shapes, or places of NaN or infinities, differ.
    Integers and booleans must be equal."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel() == 0:
            continue
        if not a.is_floating_point():
            worst = max(worst, 0.0 if bool(torch.equal(a, b.to(a.dtype))) else float("inf"))
            continue
        wide, exact = a.to(torch.float64), b.to(torch.float64)
        same = (wide == exact) | (wide.isnan() & exact.isnan())
        gap = torch.where(same, torch.zeros_like(wide), (wide - exact).abs())
        largest = float(gap.max())
        worst = max(worst, float("inf") if largest != largest else largest)
    return worst


def one_rounding(outputs: Sequence[Tensor]) -> float:
    """One unit in the last place of the largest output."""
    worst = 0.0
    for t in outputs:
        if t.is_floating_point() and t.numel():
            finite = torch.where(t.isfinite(), t, torch.zeros_like(t))
            worst = max(worst, float(finite.abs().max()) * torch.finfo(t.dtype).eps)
    return worst


def bitwise(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
        for a, b in zip(found, expected, strict=True)
    )
