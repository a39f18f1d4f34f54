# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
"""Triton kernels of `fused`: scores, softmax and values of all heads of a layer, by head.

Imported only where Triton is. `heads` holds for each head: rows, columns, slots, splits, and where
its row table, column table, scores and bias begin.
"""

import triton
import triton.language as tl


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
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of a head's scores, added up over some of its slots."""
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
    channel = tl.arange(0, WIDTH)
    each = (slots + splits - 1) // splits
    first = split * each
    last = tl.minimum(first + each, slots)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for slot in range(first, last):
        q_row = tl.load(query + row_at + row * slots + slot, mask=row < rows, other=0)
        k_row = tl.load(key + column_at + column * slots + slot, mask=column < columns, other=0)
        a = tl.load(
            q + q_row[:, None] * WIDTH + channel[None, :], mask=(row < rows)[:, None], other=0.0
        )
        b = tl.load(
            k + k_row[None, :] * WIDTH + channel[:, None],
            mask=(column < columns)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    to = out + score_at + (split * rows + row[:, None]) * columns + column[None, :]
    tl.store(to, total, mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def softmax(scored, bias, out, heads, scales, work, SPAN: tl.constexpr):
    """One row of a head: the sum of its splits, scaled, plus its bias; then the softmax."""
    item = work + tl.program_id(0) * 2
    head, row = tl.load(item), tl.load(item + 1)
    numbers = heads + head * 8
    rows, columns, splits = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 3)
    score_at, bias_at = tl.load(numbers + 6), tl.load(numbers + 7)
    column = tl.arange(0, SPAN)
    inside = column < columns
    at = row * columns + column
    score = tl.zeros((SPAN,), dtype=tl.float32)
    for split in range(splits):
        score += tl.load(scored + score_at + split * rows * columns + at, mask=inside, other=0.0)
    added = tl.load(bias + bias_at + at, mask=inside, other=float("-inf"))
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
def linear(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    inner,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    RELU: tl.constexpr,
):
    """x (rows x inner) times weight (columns x inner) transposed, plus bias; `inner` is a multiple
    of INNER."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, INNER)
    a_at = x + (row % rows)[:, None] * x_stride + step[None, :]
    b_at = weight + (column % columns)[None, :] * weight_stride + step[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, inner, INNER):
        total = tl.dot(tl.load(a_at), tl.load(b_at), total, input_precision="tf32x3")
        a_at += INNER
        b_at += INNER
    total += tl.load(bias + column % columns)[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], total, mask=inside)
