# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
"""What all our kernels share: how they are launched, and their product of two blocks."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from triton.errors import TritonError

from kilter.parallel.trace import WayRefused, first_line


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Compile at first use, and run; `WayRefused` if the kernel cannot be compiled for this GPU."""
    try:
        kernel[tuple(grid)](*arguments, **options)
    except TritonError as error:
        text = f"a kernel cannot be compiled ({type(error).__name__}: {first_line(error)})"
        raise WayRefused("kernel", text) from error


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """`total` plus a times b. `tf32x3`: each float32 is split into the nearest TF32 and the rest,
    and three products are added, the small ones first. (The compiler has its own form of this name.
    It tests each operand for infinity and takes a third more instructions; here an infinity gives
    NaN.)
    """
    if PRECISION == "tf32x3" and a.dtype == tl.float32:
        a_big = ((a.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        b_big = ((b.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        part = tl.dot(a - a_big, b_big, input_precision="tf32")
        part = tl.dot(a_big, b - b_big, part, input_precision="tf32")
        total += tl.dot(a_big, b_big, part, input_precision="tf32")
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total
