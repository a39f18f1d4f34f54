# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
"""Convolutions, with what follows them, and the sum of their parts."""

import triton
import triton.language as tl

from kilter.parallel.kernels.common import product


@triton.jit
def _after(
    total, channel, there, at, real, bias, mean, spread, gain, shift, residual, epsilon,
    ACROSS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
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
        "channels", "image", "height", "width", "width_out", "stride_y", "stride_x",
        "padding_y", "padding_x",
    ]
)  # fmt: skip
def convolve(
    x, weight, out, bias, mean, spread, gain, shift, residual, epsilon, channels, pixels, inner,
    share, image, height, width, area, width_out, stride_y, stride_x, padding_y, padding_x,
    ONE: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, POINT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, SPLIT: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of pixels by output channels: the pixels under the window (HIGH x WIDE), summand by
    summand, times the weights (channels x inner, as they lie). Pixels are the first dimension,
    because neighbouring threads load and store neighbours of a block's first dimension. ONE: there
    is one image. POINT: the window is one pixel, moves by one pixel and never leaves the map. With
    SPLIT there are several float32 outputs one after the other, each over its `share` of `inner`,
    and `add_up` does what follows. `image`: elements of one image of x; `area`: of one channel of
    the output."""
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
    parts, out, bias, mean, spread, gain, shift, residual, epsilon, numel, area, channels,
    SIZE: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
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
