"""FLOPs of a framework operation by torch's own formulas (`torch.utils.flop_counter`)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from kilter.observe.kineto import Flops


def torch_flops() -> Flops:
    """A counter for `read_kineto`. Imports torch's table, so call it outside the step path."""
    from torch.utils.flop_counter import flop_registry

    formulas: dict[str, Callable[..., int]] = {
        str(packet): formula for packet, formula in flop_registry.items()
    }
    positional = {str(packet): _positional(packet) for packet in flop_registry}
    # Not in the table (2.13): what a CPU runs for scaled_dot_product_attention.
    for suffix in ("", "_backward"):
        same = formulas.get(f"aten._scaled_dot_product_flash_attention{suffix}")
        if same is not None:
            formulas.setdefault(f"aten._scaled_dot_product_flash_attention_for_cpu{suffix}", same)

    def flops(name: str, shapes: Sequence[Any], values: Sequence[Any]) -> float | None:
        operation = name.replace("::", ".")
        formula = formulas.get(operation)
        if formula is None:
            return None
        # Older profilers write no values.
        arguments = [shape or _value(value) for shape, value in zip_longest(shapes, values)]
        arguments = arguments[: positional.get(operation)]
        try:
            if operation == "aten.convolution_backward":
                return _convolution_backward(formulas["aten.convolution"], arguments)
            return float(formula(*arguments, out_val=_output(operation, arguments)))
        except (TypeError, ValueError, IndexError, AssertionError):
            # An overload whose inputs the formula does not know: not counted rather than wrong.
            return None

    return flops


def _positional(packet: Any) -> int | None:
    """How many arguments of an operation the formulas take: those that are not keywords."""
    overload = getattr(packet, "default", None)
    if overload is None:
        return None
    return sum(not argument.kwarg_only for argument in overload._schema.arguments)


def _value(text: Any) -> Any:
    """What a "Concrete Inputs" entry says: `"[1, 1]"`, `"False"`, `"1"`; "" is None."""
    try:
        return ast.literal_eval(text) if isinstance(text, str) and text else None
    except (ValueError, SyntaxError):
        return None


def _convolution_backward(forward: Callable[..., int], arguments: Sequence[Any]) -> float:
    """Each gradient has the products of the forward pass. Torch's own formula counts those of a
    grouped convolution as if it had one group (2.13)."""
    output_gradient, x, w = arguments[:3]
    transposed, mask = arguments[7], arguments[10]
    once = forward(x, w, None, None, None, None, transposed, out_val=output_gradient)
    return float(once * sum(mask[:2]))


def _output(operation: str, arguments: Sequence[Any]) -> Any:
    """The output shape, for the formulas that need one: those of convolutions."""
    if "conv" in operation:
        return _convolved(*arguments[:2], *arguments[3:9])
    return None


def _convolved(
    x: list[int],
    w: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool = False,
    output_padding: list[int] | int = 0,
    groups: int = 1,
) -> list[int]:
    """https://docs.pytorch.org/docs/stable/generated/torch.nn.Conv2d.html, ...ConvTranspose2d"""
    n = len(x) - 2
    s, p, d, o = (_each(v, n) for v in (stride, padding, dilation, output_padding))
    if transposed:
        sides = [
            (x[2 + i] - 1) * s[i] - 2 * p[i] + d[i] * (w[2 + i] - 1) + o[i] + 1 for i in range(n)
        ]
        return [x[0], w[1] * groups, *sides]
    sides = [(x[2 + i] + 2 * p[i] - d[i] * (w[2 + i] - 1) - 1) // s[i] + 1 for i in range(n)]
    return [x[0], w[0], *sides]


def _each(value: list[int] | int | None, n: int) -> list[int]:
    if isinstance(value, list):
        return value * n if len(value) == 1 else value
    return [value or 0] * n
