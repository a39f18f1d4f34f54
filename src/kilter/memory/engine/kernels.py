# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
"""Triton kernels of `fused`. Imported only where Triton is."""

import triton
import triton.language as tl


@triton.jit
def normalised(out, x, mean, rstd, weight, bias, width, BLOCK: tl.constexpr, AFFINE: tl.constexpr):
    """One row: `weight * (rstd * (x - mean)) + bias`, in the order of the framework's kernel. If
    not `AFFINE`, without weight and bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside)
    value = tl.load(rstd + row) * (value - tl.load(mean + row))
    if AFFINE:
        value = tl.load(weight + column, mask=inside) * value + tl.load(bias + column, mask=inside)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)
