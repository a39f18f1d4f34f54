# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
"""Linear layers of few rows, with the layer norm behind them, and of a single row."""

import triton
import triton.language as tl

from kilter.parallel.kernels.common import product


@triton.jit
def linear(
    x, weight, bias, out, rows, columns, share, x_stride, weight_stride, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, SPLITS: tl.constexpr, RELU: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x (rows x inner) times weight (columns x inner) transposed, plus bias; RELU: its positive
    part. With SPLITS there are as many outputs one after the other, without bias, each over its
    `share` of `inner`, which is a multiple of INNER. (`share` is an argument so that the compiler
    can see that it is a multiple of 16 and load 16 bytes of a row at once.)"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    step = split * share + tl.arange(0, INNER)
    a_at = x + (row % rows)[:, None] * x_stride + step[None, :]
    b_at = weight + (column % columns)[None, :] * weight_stride + step[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, share, INNER):
        total = product(tl.load(a_at), tl.load(b_at), total, PRECISION)
        a_at += INNER
        b_at += INNER
    if not SPLITS:
        total += tl.load(bias + column % columns).to(tl.float32)[None, :]
        if RELU:
            total = tl.maximum(total, 0.0)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = out + (split * rows + row[:, None]) * columns + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    parts, bias, residual, gain, shift, out, rows, columns, epsilon, ROWS: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The layer norm of rows: the sum of their PARTS, in order, plus bias, plus residual."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SPAN)
    real = column < columns
    inside = (row < rows)[:, None] & real[None, :]
    at = row[:, None] * columns + column[None, :]
    total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    found = tl.zeros((ROWS, SPAN), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        found += tl.load(parts + part * rows * columns + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        found += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    total += found
    mean = tl.sum(total, 1) / columns
    total = tl.where(real[None, :], total - mean[:, None], 0.0)
    spread = tl.sum(total * total, 1) / columns
    total *= tl.rsqrt(spread + epsilon)[:, None]
    total *= tl.load(gain + column, mask=real, other=0.0).to(tl.float32)[None, :]
    total += tl.load(shift + column, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def single(
    x, weight, bias, out, columns, inner, weight_stride, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """One row times weight (columns x inner) transposed, plus bias; RELU: its positive part. Every
    weight is read once."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < columns
    total = tl.zeros((COLUMNS, INNER), dtype=tl.float32)
    for start in range(0, inner, INNER):
        step = start + tl.arange(0, INNER)
        inside = step < inner
        a = tl.load(x + step, mask=inside, other=0.0).to(tl.float32)
        at = weight + column[:, None] * weight_stride + step[None, :]
        b = tl.load(at, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += a[None, :] * b
    found = tl.sum(total, 1) + tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
    if RELU:
        found = tl.maximum(found, 0.0)
    tl.store(out + column, found.to(out.dtype.element_ty), mask=real)
