# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
"""Triton kernels: all heads of a layer by head, linear layers between them, and convolutions.

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
def product(a, b, total, PRECISION: tl.constexpr):
    """`total` plus a times b. `tf32x3`: each float32 is cut into the nearest TF32 and the rest, and
    three products are added, the small ones first. (The compiler's own way under this name, which
    asks each operand whether it is infinite, takes a third more instructions; here an infinity
    makes no number.)
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
        total = product(a, b, total, PRECISION)
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
        found = product(weight, x, found, PRECISION)
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
        score = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        score = product(a, b, score, PRECISION) * scale + added
        higher = tl.maximum(most, tl.max(score, 1))
        # Where every column so far is masked there is nothing to compare with yet.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        part = tl.exp(score - level[:, None])
        kept = tl.exp(most - level)
        total = total * kept + tl.sum(part, 1)
        found = product(part.to(x.dtype), x, found * kept[:, None], PRECISION)
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
    RELU: tl.constexpr,
):
    """One row times weight (columns x inner) transposed, plus bias, RELU: its positive part. Every
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


@triton.jit
def _after(
    total,
    channel,
    there,
    at,
    real,
    bias,
    mean,
    spread,
    gain,
    shift,
    residual,
    epsilon,
    ACROSS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
):
    """What follows a convolution: bias, batch norm, residual, ReLU. `channel`: of every element, or
    of every column of `total` (ACROSS), whose numbers are then loaded once."""
    if BIAS:
        more = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
        total += more[None, :] if ACROSS else more
    if NORM:
        middle = tl.load(mean + channel, mask=there, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.load(spread + channel, mask=there, other=1.0).to(tl.float32) + epsilon)
        scale *= tl.load(gain + channel, mask=there, other=0.0).to(tl.float32)
        more = tl.load(shift + channel, mask=there, other=0.0).to(tl.float32)
        if ACROSS:
            total = (total - middle[None, :]) * scale[None, :] + more[None, :]
        else:
            total = (total - middle) * scale + more
    if RESIDUAL:
        total += tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    if RELU:
        total = tl.maximum(total, 0.0)
    return total


@triton.jit(
    do_not_specialize=[
        "channels",
        "image",
        "height",
        "width",
        "width_out",
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
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    ONE: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
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
    """A block of pixels by output channels: what lies under the window (HIGH x WIDE), summand by
    summand, times the weights (channels x inner, as they lie). Pixels come first because neighbours
    in a block's first dimension are what neighbouring threads load and store. ONE: one image.
    POINT: the window is one pixel, moves by one and never leaves the map. With SPLIT there are
    several float32 outputs one after the other, each of its share of `inner`, and what follows is
    left to `add_up`. `image`: elements of one image of x; `area`: of one channel of the output."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, inner)
    there = row < channels
    real = column < pixels
    pixel = column
    source = x + pixel
    to = column
    if not ONE:
        number = column // area
        pixel = column - number * area
        source = x + number * image + pixel
        to = number * channels * area + pixel
    # Which pixels of the window lie on the map: a bit for each.
    taps_in = tl.zeros((COLUMNS,), dtype=tl.int64 if HIGH * WIDE > 32 else tl.int32)
    if not POINT:
        down = pixel // width_out
        top = down * stride_y - padding_y
        left = (pixel - down * width_out) * stride_x - padding_x
        source += top * width + left - pixel
        for i in tl.static_range(HIGH * WIDE):
            y, z = top + i // WIDE, left + i % WIDE
            on_map = real & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            taps_in |= on_map.to(taps_in.dtype) << i
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for start in range(first, last, INNER):
        step = start + tl.arange(0, INNER)
        inside = step < last
        b = tl.load(
            weight + row[None, :] * inner + step[:, None],
            mask=there[None, :] & inside[:, None],
            other=0.0,
        )
        if POINT:
            offset = step * area
            within = inside[None, :] & real[:, None]
        else:
            channel = step // (HIGH * WIDE)
            tap = step - channel * (HIGH * WIDE)
            offset = channel * (height * width) + tap // WIDE * (width - WIDE) + tap
            within = inside[None, :] & (((taps_in[:, None] >> tap[None, :]) & 1) != 0)
        a = tl.load(source[:, None] + offset[None, :], mask=within, other=0.0)
        total = product(a, b, total, PRECISION)
    both = there[None, :] & real[:, None]
    at = to[:, None] + row[None, :] * area
    if SPLIT:
        at += tl.program_id(2) * (pixels * channels)
    else:
        total = _after(
            total, row, there, at, both, bias, mean, spread, gain, shift, residual, epsilon,
            True, BIAS, NORM, RESIDUAL, RELU,
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
        total, at // area % channels, real, at, real, bias, mean, spread, gain, shift, residual,
        epsilon, False, BIAS, NORM, RESIDUAL, RELU,
    )  # fmt: skip
    tl.store(out + at, total.to(out.dtype.element_ty), mask=real)
