# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
"""Triton kernels of `fused`: all heads of a layer by head, and linear layers between them.

Imported only where Triton is. `heads` holds for each head: rows, columns, slots, splits, and where
its row table, column table, scores and bias begin. Heads of one slot are done by `attend` alone,
the others by `scores`, `softmax` and `values`.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from triton.errors import TritonError

from kilter.act.branches.tracing import Refused


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """Compile at first use, and run; `Refused` if the kernel cannot be had on this card."""
    try:
        kernel[tuple(grid)](*arguments, **options)
    except TritonError as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise Refused(f"a kernel cannot be compiled ({type(error).__name__}: {first})") from error


@triton.jit
def scores(
    q,
    k,
    out,
    heads,
    work,
    query,
    key,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of a head's scores, added up over some of its slots, TOGETHER at a time."""
    item = work + tl.program_id(0) * 4
    head, block, column_block, split = (
        tl.load(item),
        tl.load(item + 1),
        tl.load(item + 2),
        tl.load(item + 3),
    )
    numbers = heads + head * 8
    rows, columns, slots, splits = (
        tl.load(numbers),
        tl.load(numbers + 1),
        tl.load(numbers + 2),
        tl.load(numbers + 3),
    )
    row_at, column_at, score_at = (
        tl.load(numbers + 4),
        tl.load(numbers + 5),
        tl.load(numbers + 6),
    )
    row = block * ROWS + tl.arange(0, ROWS)
    column = column_block * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, TOGETHER * WIDTH)
    channel = inner % WIDTH
    each = (slots + splits - 1) // splits
    first = split * each
    last = tl.minimum(first + each, slots)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(first, last, TOGETHER):
        slot = start + inner // WIDTH
        of_q = (row < rows)[:, None] & (slot < last)[None, :]
        of_k = (column < columns)[None, :] & (slot < last)[:, None]
        q_row = tl.load(query + row_at + row[:, None] * slots + slot[None, :], mask=of_q, other=0)
        k_row = tl.load(
            key + column_at + column[None, :] * slots + slot[:, None], mask=of_k, other=0
        )
        a = tl.load(q + q_row * WIDTH + channel[None, :], mask=of_q, other=0.0)
        b = tl.load(k + k_row * WIDTH + channel[:, None], mask=of_k, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    to = out + score_at + (split * rows + row[:, None]) * columns + column[None, :]
    tl.store(to, total, mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def softmax(scored, bias, out, heads, scales, work, SPAN: tl.constexpr, SPLITS: tl.constexpr):
    """One row of a head: the sum of its splits (at most SPLITS), scaled, plus its bias; then the
    softmax."""
    item = work + tl.program_id(0) * 2
    head, row = tl.load(item), tl.load(item + 1)
    numbers = heads + head * 8
    rows, columns, splits = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 3)
    score_at, bias_at = tl.load(numbers + 6), tl.load(numbers + 7)
    column = tl.arange(0, SPAN)
    inside = column < columns
    at = row * columns + column
    added = tl.load(bias + bias_at + at, mask=inside, other=float("-inf"))
    score = tl.zeros((SPAN,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):  # unrolled: all loads are under way at once
        score += tl.load(
            scored + score_at + split * rows * columns + at,
            mask=inside & (split < splits),
            other=0.0,
        )
    score = score * tl.load(scales + head) + added
    part = tl.exp(score - tl.max(score, 0))
    part = part / tl.sum(part, 0)
    tl.store(out + bias_at + at, part.to(out.dtype.element_ty), mask=inside)


@triton.jit
def values(
    weights,
    v,
    out,
    heads,
    work,
    value,
    place,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of a head's rows times one slot of v, put where it belongs."""
    item = work + tl.program_id(0) * 3
    head, block, slot = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    numbers = heads + head * 8
    rows, columns, slots = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    row_at, column_at, weight_at = (
        tl.load(numbers + 4),
        tl.load(numbers + 5),
        tl.load(numbers + 7),
    )
    row = block * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    found = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        weight = tl.load(
            weights + weight_at + row[:, None] * columns + column[None, :],
            mask=(row < rows)[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        v_row = tl.load(value + column_at + column * slots + slot, mask=column < columns, other=0)
        x = tl.load(
            v + v_row[:, None] * WIDTH + channel[None, :],
            mask=(column < columns)[:, None],
            other=0.0,
        )
        found = tl.dot(weight, x, found, input_precision=PRECISION)
    token = tl.load(place + row_at + row * slots + slot, mask=row < rows, other=0)
    to = out + token[:, None] * stride + head * WIDTH + channel[None, :]
    tl.store(to, found.to(out.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit
def attend(
    q,
    k,
    v,
    bias,
    out,
    heads,
    scales,
    work,
    query,
    key,
    value,
    place,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of rows of a head of one slot, from scores to values, columns by columns (the running
    softmax of Milakov and Gimelshein 2018)."""
    item = work + tl.program_id(0) * 2
    head, block = tl.load(item), tl.load(item + 1)
    numbers = heads + head * 8
    rows, columns = tl.load(numbers), tl.load(numbers + 1)
    row_at, column_at, bias_at = (
        tl.load(numbers + 4),
        tl.load(numbers + 5),
        tl.load(numbers + 7),
    )
    scale = tl.load(scales + head)
    row = block * ROWS + tl.arange(0, ROWS)
    real = row < rows
    channel = tl.arange(0, WIDTH)
    q_row = tl.load(query + row_at + row, mask=real, other=0)
    a = tl.load(q + q_row[:, None] * WIDTH + channel[None, :], mask=real[:, None], other=0.0)
    most = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    found = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < columns
        k_row = tl.load(key + column_at + column, mask=inside, other=0)
        v_row = tl.load(value + column_at + column, mask=inside, other=0)
        b = tl.load(k + k_row[None, :] * WIDTH + channel[:, None], mask=inside[None, :], other=0.0)
        x = tl.load(v + v_row[:, None] * WIDTH + channel[None, :], mask=inside[:, None], other=0.0)
        added = tl.load(
            bias + bias_at + row[:, None] * columns + column[None, :],
            mask=real[:, None] & inside[None, :],
            other=float("-inf"),
        )
        score = tl.dot(a, b, input_precision=PRECISION) * scale + added
        higher = tl.maximum(most, tl.max(score, 1))
        # Where every column so far is masked there is nothing to compare with yet.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.exp(score - level[:, None])
        kept = tl.exp(most - level)
        total = total * kept + tl.sum(part, 1)
        found = tl.dot(part.to(x.dtype), x, found * kept[:, None], input_precision=PRECISION)
        most = higher
    token = tl.load(place + row_at + row, mask=real, other=0)
    to = out + token[:, None] * stride + head * WIDTH + channel[None, :]
    tl.store(to, (found / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def linear(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    share,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLITS: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x (rows x inner) times weight (columns x inner) transposed, plus bias, RELU: its positive
    part. With SPLITS there are as many outputs one after the other, without bias, each of its share
    of `inner`, a multiple of INNER. (An argument, not computed here: the compiler may then know
    that it is a multiple of 16, and that rows may be loaded 16 bytes at once.)"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    step = split * share + tl.arange(0, INNER)
    a_at = x + (row % rows)[:, None] * x_stride + step[None, :]
    b_at = weight + (column % columns)[None, :] * weight_stride + step[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, share, INNER):
        total = tl.dot(tl.load(a_at), tl.load(b_at), total, input_precision=PRECISION)
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
    parts,
    bias,
    residual,
    gain,
    shift,
    out,
    rows,
    columns,
    epsilon,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
):
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
    x,
    weight,
    bias,
    out,
    columns,
    inner,
    weight_stride,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """One row times weight (columns x inner) transposed, plus bias: every weight is read once."""
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
    tl.store(out + column, found.to(out.dtype.element_ty), mask=real)


@triton.jit
def _after(
    total,
    channel,
    real,
    at,
    bias,
    mean,
    spread,
    gain,
    shift,
    residual,
    epsilon,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
):
    """What follows a convolution: bias, batch norm, residual, ReLU. `channel` and `real` broadcast
    over `total`."""
    if BIAS:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    if NORM:
        total -= tl.load(mean + channel, mask=real, other=0.0).to(tl.float32)
        total *= tl.rsqrt(tl.load(spread + channel, mask=real, other=1.0).to(tl.float32) + epsilon)
        total *= tl.load(gain + channel, mask=real, other=0.0).to(tl.float32)
        total += tl.load(shift + channel, mask=real, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    if RELU:
        total = tl.maximum(total, 0.0)
    return total


@triton.jit(
    do_not_specialize=[
        "channels",
        "pixels",
        "image",
        "height",
        "width",
        "area",
        "width_out",
        "window",
        "window_width",
        "stride_y",
        "stride_x",
        "padding_y",
        "padding_x",
    ]
)
def convolve(
    x,
    weight,
    out,
    bias,
    mean,
    spread,
    gain,
    shift,
    residual,
    epsilon,
    channels,
    pixels,
    inner,
    share,
    image,
    height,
    width,
    area,
    width_out,
    window,
    window_width,
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    POINT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of output channels by pixels: the weights (channels x inner, as they lie) times what
    lies under the window, summand by summand. POINT: the window is one pixel and moves by one. With
    SPLIT there are several float32 outputs one after the other, each of its share of `inner`, and
    what follows is left to `add_up`. `image`: elements of one image of x; `area`: of the output."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, inner)
    there = row < channels
    real = column < pixels
    number = column // area
    pixel = column % area
    source = x + number * image
    top = pixel // width_out * stride_y - padding_y
    left = pixel % width_out * stride_x - padding_x
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(first, last, INNER):
        step = start + tl.arange(0, INNER)
        inside = step < last
        a = tl.load(
            weight + row[:, None] * inner + step[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        within = inside[:, None] & real[None, :]
        if POINT:
            at = step[:, None] * area + pixel[None, :]
        else:
            channel = step // window
            tap = step % window
            y = top[None, :] + (tap // window_width)[:, None]
            z = left[None, :] + (tap % window_width)[:, None]
            within = within & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            at = (channel * height * width)[:, None] + y * width + z
        b = tl.load(source[None, :] + at, mask=within, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    both = there[:, None] & real[None, :]
    at = (number * channels * area + pixel)[None, :] + row[:, None] * area
    if SPLIT:
        at += tl.program_id(2) * (pixels * channels)
    else:
        total = _after(
            total, row[:, None], both, at, bias, mean, spread, gain, shift, residual, epsilon,
            BIAS, NORM, RESIDUAL, RELU,
        )  # fmt: skip
    tl.store(out + at, total.to(out.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["numel", "area", "channels"])
def add_up(
    parts,
    out,
    bias,
    mean,
    spread,
    gain,
    shift,
    residual,
    epsilon,
    numel,
    area,
    channels,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
):
    """The sum of a convolution's PARTS, in order, and what follows it."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    real = at < numel
    total = tl.zeros((SIZE,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * numel + at, mask=real, other=0.0)
    total = _after(
        total, at // area % channels, real, at, bias, mean, spread, gain, shift, residual, epsilon,
        BIAS, NORM, RESIDUAL, RELU,
    )  # fmt: skip
    tl.store(out + at, total.to(out.dtype.element_ty), mask=real)
