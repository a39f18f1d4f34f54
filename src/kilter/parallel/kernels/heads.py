# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803
"""All heads of a layer by head.

`heads` holds for each head: rows, columns, slots, splits, and where its row table, column table,
scores and bias begin. Heads of one slot are done by `attend` alone, the others by `scores`,
`softmax` and `values`.
"""

import triton
import triton.language as tl

from kilter.parallel.kernels.common import product


@triton.jit
def scores(
    q, k, out, heads, work, query, key, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of a head's scores, added up over some of its slots, TOGETHER at a time."""
    item = work + tl.program_id(0) * 4
    head, block, column_block, split = (
        tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3),
    )  # fmt: skip
    numbers = heads + head * 8
    rows, columns, slots, splits = (
        tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3),
    )  # fmt: skip
    row_at, column_at, score_at = (
        tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6),
    )  # fmt: skip
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
    weights, v, out, heads, work, value, place, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of a head's rows times one slot of v, put where it belongs."""
    item = work + tl.program_id(0) * 3
    head, block, slot = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    numbers = heads + head * 8
    rows, columns, slots = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    row_at, column_at, weight_at = (
        tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 7),
    )  # fmt: skip
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
    q, k, v, bias, out, heads, scales, work, query, key, value, place, stride, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows of a head of one slot, from scores to values, columns by columns (the running
    softmax of Milakov and Gimelshein 2018)."""
    item = work + tl.program_id(0) * 2
    head, block = tl.load(item), tl.load(item + 1)
    numbers = heads + head * 8
    rows, columns = tl.load(numbers), tl.load(numbers + 1)
    row_at, column_at, bias_at = (
        tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 7),
    )  # fmt: skip
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
