"""Whether a way computes the same as the serial loop: differences to a float64 reference.

The reference interprets the traced graph with every floating point value in float64: the same
mathematics without the rounding. A way passes if its largest difference to the reference is at most
twice that of the serial loop (`plan.within`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from kilter.observe.torch_internals.branches import (
    ATTENTION_BY_DEFINITION,
    SOFTMAX,
    arguments_of,
    result_count,
)
from kilter.parallel.plan import within
from kilter.parallel.trace import WayRefused

if TYPE_CHECKING:
    from kilter.parallel.candidates import TracedRequest, WayRequest


def tf32_allowed() -> tuple[bool, bool]:
    """Whether float32 matrix products, and convolutions, may be rounded to TF32 now."""
    try:
        products = torch.get_float32_matmul_precision() != "highest"
        return products, torch.backends.cudnn.allow_tf32
    except RuntimeError:  # set by the newer switches: the older ones then raise when read
        kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv
        allowed = [kind.fp32_precision == "tf32" for kind in kinds]
        return allowed[0], allowed[1]


class _Widened(fx.Interpreter):  # type: ignore[misc]
    """The graph in float64. `weights`: tensors in place of weights, to take gradients for."""

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
        if target is SOFTMAX:
            args = (*args[:2], False)  # half to float: the input is double already
        if "_scaled_dot_product" in str(target):
            return _attention(target, args, kwargs)
        return super().call_function(target, args, wide)


def _attention(target: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The fused attentions have no float64 form, but their definition has one."""
    names = [a.name for a in arguments_of(target)]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    found, _ = ATTENTION_BY_DEFINITION(
        given["query"],
        given["key"],
        given["value"],
        given.get("attn_bias", given.get("attn_mask")),
        0.0,
        given.get("is_causal", False),
        scale=given.get("scale"),
    )
    return (found, *[None] * (result_count(target) - 1))


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
    """The outputs, then the gradients of a sum of the outputs with fixed factors, for the inputs
    that require a gradient and for the weights. The factors are the same for every way."""
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
    """Numbers between -1 and 1, different for each element."""
    steps = torch.linspace(0.5, 0.5 + like.numel(), like.numel(), device=like.device)
    return steps.cos().reshape(like.shape).to(like.dtype)


def to_own_scale(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor divided by the largest value of its exact counterpart, so that errors of small
    gradients count like those of large gradients."""
    scales = [float(e.abs().max()) if e.numel() and e.is_floating_point() else 1.0 for e in exact]
    return [
        f.to(torch.float64) / s if s > 0 and f.is_floating_point() else f
        for f, s in zip(found, scales, strict=True)
    ]


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest absolute difference. It is infinite if shapes differ, or the places of NaN or
    infinities, or any integers or booleans."""
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


class Judge:
    """The serial loop's results, their own error, and the limit for the error of every way. In
    training the results are the outputs and the gradients, each divided by its largest value."""

    def __init__(
        self, request: WayRequest, traced: TracedRequest, outputs: Sequence[Tensor]
    ) -> None:
        self.request, self.traced = request, traced
        self.outputs = [t.detach() for t in outputs]
        if request.gradients:
            self.outputs = self.results(request.run_loop)
        try:
            self.exact = self._reference()
        except (NotImplementedError, RuntimeError, TypeError):
            # No float64 form exists: the serial loop itself is then the reference.
            self.exact = self.outputs
        self.serial_error = self._error(self.outputs)
        self.floor = one_rounding(self._scaled(self.outputs))
        self.repeatable = bitwise(self.results(request.run_loop), self.outputs)

    def results(self, run: Callable[[Sequence[Tensor]], Any]) -> list[Tensor]:
        """What a way computes on the request's inputs: outputs, and gradients in training."""
        return self.request.results(run, self.traced.weights)

    def check(
        self, run: Callable[[Sequence[Tensor]], Any], *, same_kernels: bool
    ) -> tuple[float, bool]:
        """The error of a way, and whether its results equal the loop's bit for bit; `WayRefused`
        if the results are not right. `same_kernels`: they have to be equal bit for bit, where the
        loop's own results are in every call."""
        found = self.results(run)
        worst, same = self._error(found), bitwise(found, self.outputs)
        if same_kernels and self.repeatable and not same:
            raise WayRefused("not_bitwise", "not equal to the serial loop bit for bit")
        if not within(worst, self.serial_error, self.floor):
            raise WayRefused(
                "inexact",
                f"differs from the float64 reference by {worst:.3g}, the serial loop by "
                f"{self.serial_error:.3g}",
            )
        return worst, same

    def _reference(self) -> list[Tensor]:
        request, traced = self.request, self.traced
        if request.gradients:
            return reference_gradients(traced.unfolded, request.examples(), traced.weights)
        return reference(traced.graph, request.tensors)

    def _scaled(self, found: Sequence[Tensor]) -> Sequence[Tensor]:
        return to_own_scale(found, self.exact) if self.request.gradients else found

    def _error(self, found: Sequence[Tensor]) -> float:
        return error(self._scaled(found), self._scaled(self.exact))
