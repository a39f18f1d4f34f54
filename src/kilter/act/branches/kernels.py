# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
"""Triton kernels of `fused`: scores and values of all heads of a layer, dispatched by head.

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
        total = tl.dot(a, b, total, input_precision="ieee")
    to = out + score_at + (split * rows + row[:, None]) * columns + column[None, :]
    tl.store(to, total, mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def values(
    scored,
    bias,
    v,
    out,
    heads,
    scales,
    work,
    value,
    place,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Softmax over a block of rows, running (Milakov and Gimelshein 2018), times one slot of v."""
    item = work + tl.program_id(0) * 3
    head, block, slot = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    numbers = heads + head * 8
    rows, columns, slots, splits = (
        tl.load(numbers),
        tl.load(numbers + 1),
        tl.load(numbers + 2),
        tl.load(numbers + 3),
    )
    row_at, column_at, score_at, bias_at = (
        tl.load(numbers + 4),
        tl.load(numbers + 5),
        tl.load(numbers + 6),
        tl.load(numbers + 7),
    )
    scale = tl.load(scales + head)
    row = block * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    highest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((ROWS,), dtype=tl.float32)
    found = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row[:, None] * columns + column[None, :]
        score = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for split in range(splits):
            score += tl.load(
                scored + score_at + split * rows * columns + at, mask=inside, other=0.0
            )
        added = tl.load(bias + bias_at + at, mask=inside, other=float("-inf"))
        score = score * scale + added.to(tl.float32)
        top = tl.maximum(highest, tl.max(score, 1))
        # A row that has seen nothing but masked columns keeps weight 0 instead of NaN.
        base = tl.where(top == float("-inf"), 0.0, top)
        part = tl.exp(score - base[:, None])
        shrink = tl.exp(highest - base)
        weight = weight * shrink + tl.sum(part, 1)
        v_row = tl.load(value + column_at + column * slots + slot, mask=column < columns, other=0)
        x = tl.load(
            v + v_row[:, None] * WIDTH + channel[None, :],
            mask=(column < columns)[:, None],
            other=0.0,
        )
        found = tl.dot(part.to(x.dtype), x, found * shrink[:, None], input_precision="ieee")
        highest = top
    found = found / weight[:, None]
    token = tl.load(place + row_at + row * slots + slot, mask=row < rows, other=0)
    to = out + token[:, None] * stride + head * WIDTH + channel[None, :]
    tl.store(to, found.to(out.dtype.element_ty), mask=(row < rows)[:, None])
