"""Is it the same answer? Differences to a float64 reference, of the serial loop and others.

The reference interprets the traced graph with every floating value widened: the same mathematics
without the rounding. A way of running passes if its largest difference is at most twice that of the
serial loop (`kilter.plan.branches.within`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def tf32_allowed() -> tuple[bool, bool]:
    """Whether float32 matrix products, and convolutions, may be rounded to TF32 now."""
    try:
        products = torch.get_float32_matmul_precision() != "highest"
        return products, torch.backends.cudnn.allow_tf32
    except RuntimeError:  # set by newer switches, of which the older ones want to know nothing
        kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv
        allowed = [kind.fp32_precision == "tf32" for kind in kinds]
        return allowed[0], allowed[1]


class _Widened(fx.Interpreter):  # type: ignore[misc]
    """The graph in float64; `weights` are stand-ins that gradients are taken for."""

    def __init__(self, graph: fx.GraphModule, weights: dict[int, Tensor]) -> None:
        super().__init__(graph)
        self.weights = weights

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        return self.weights[id(found)] if id(found) in self.weights else _wide(found)

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
        return list(_Widened(graph, {}).run(*(_wide(x) for x in inputs)))


def reference_gradients(
    graph: fx.GraphModule, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs in float64, then the gradients of `gradients` in float64."""
    wide = [_wide(x).requires_grad_(x.requires_grad) for x in inputs]
    leaves = [_wide(w).requires_grad_() for w in weights]
    stand_ins = {id(w): leaf for w, leaf in zip(weights, leaves, strict=True)}
    return gradients(lambda given: _Widened(graph, stand_ins).run(*given), wide, leaves)


def gradients(
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """The outputs, then the gradients for the inputs that require one and for the weights, of a sum
    of the outputs with fixed factors: the same for every way of running."""
    with torch.enable_grad():
        outputs = list(run(inputs))
        roots = [t for t in outputs if t.requires_grad]
        leaves = [*(t for t in inputs if t.requires_grad), *weights]
        factors = [_factors(t) for t in roots]
        found = (
            torch.autograd.grad(roots, leaves, factors, allow_unused=True)
            if roots and leaves
            else [None] * len(leaves)
        )
    made = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return [t.detach() for t in (*outputs, *made)]


def _factors(like: Tensor) -> Tensor:
    """Numbers between -1 and 1 that differ from element to element."""
    steps = torch.linspace(0.5, 0.5 + like.numel(), like.numel(), device=like.device)
    return steps.cos().reshape(like.shape).to(like.dtype)


def to_own_scale(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor over the largest value of its exact counterpart: errors of small gradients count
    like those of large ones."""
    scales = [float(e.abs().max()) if e.numel() and e.is_floating_point() else 1.0 for e in exact]
    return [
        f.to(torch.float64) / s if s > 0 and f.is_floating_point() else f
        for f, s in zip(found, scales, strict=True)
    ]


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
