"""All heads of a layer in four launches: heads of one slot by themselves, and beside them scores,
softmax and values of the others, each for every head at once.

Heads of the form `softmax(a * rows_q(q) rows_k(k)^T + bias) rows_v(v)`, each with its own number of
rows and row tables, differ only in numbers. A program of the grid looks its head up in a work list,
so that eight heads of eight shapes fill the GPU together. The queries, keys and values are never
expanded in memory: a row of the score product is a sum over slots, and each slot is looked up where
it lies. Without Triton the heads run by their definition, `FusedHeads.reference`. `find_heads`
finds the form in a traced graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kilter.parallel import kernels
from kilter.parallel.streams import CudaStreams


@dataclass(frozen=True)
class Cut:
    """How a kernel cuts its work: rows and columns of a block, warps, stages of its loop."""

    rows: int
    columns: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True)
class Blocks:
    """How the kernels of heads cut their work: the best of about 30 settings for each kernel on an
    H200, for heads of 1 to 64 slots of 32 channels."""

    scores: Cut = Cut(16, 64, 4, 2)
    values: Cut = Cut(16, 64, 2, 2)
    attend: Cut = Cut(16, 128, 4, 3)
    slots: int = 8
    """One program of the score kernel adds up so many slots; longer sums are split over
    programs."""
    together: int = 1
    """So many slots are multiplied at once."""
    precision: str = "tf32x3"
    """Float32 products are three TF32 products with the rounding errors added back. They are about
    as exact as `ieee`, and are checked against float64 like every way."""


HALF = replace(Blocks(), scores=Cut(16, 128, 4, 2), values=Cut(16, 128, 2, 2), together=2)
"""They are for 16-bit operands, whose blocks are half as large."""


@dataclass(frozen=True)
class Head:
    """One head as numbers. Row `m` of its scores is a sum over `slots` rows of q and of k."""

    rows: int
    columns: int
    slots: int
    scale: float
    query: Tensor
    """It has (rows * slots) rows of q."""
    key: Tensor
    """It has (columns * slots) rows of k."""
    values: Tensor
    """It has (columns * slots) rows of v."""
    place: Tensor
    """It has the (rows * slots) positions of the rows in the result."""


class FusedHeads:
    """`(q, k, v, bias) -> (tokens, heads * width)` for a layer's heads."""

    def __init__(
        self,
        heads: Sequence[Head],
        width: int,
        device: torch.device,
        blocks: Blocks | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.heads, self.width, self.device, self.dtype = tuple(heads), width, device, dtype
        self.blocks = blocks or Blocks()
        self.tokens = heads[0].rows * heads[0].slots
        self._tables = _Tables(self.heads, self.blocks, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor]:
        if q.is_cuda and kernels.has_triton():
            return (self._launch(q, k, v, bias),)
        return (self.reference(q, k, v, bias),)

    def reference(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """The definition, head by head."""
        parts, at = [], 0
        for head in self.heads:
            a, b = head.rows, head.columns
            scores = q[head.query].reshape(a, -1) @ k[head.key].reshape(b, -1).T
            added = bias[at : at + a * b].reshape(a, b)
            at += a * b
            weights = (scores * head.scale + added).softmax(-1).to(v.dtype)
            found = (weights @ v[head.values].reshape(b, -1)).reshape(-1, self.width)
            parts.append(torch.empty_like(found).index_copy_(0, head.place, found))
        return torch.cat(parts, dim=1)

    def launches(self) -> dict[Hashable, Callable[[], Any]]:
        """The two chains of launches, each on zeros, to have their kernels compiled."""
        t = self._tables
        rows = 1 + max(int(x.max()) for x in (t.query, t.key, t.values))
        given = torch.zeros((rows, self.width), dtype=self.dtype, device=self.device)
        bias = torch.zeros(t.weight_numel, dtype=self.dtype, device=self.device)
        shape = self.tokens, len(self.heads) * self.width
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        chains = {self._launch_single: t.attend_work, self._launch_many: t.score_work}
        return {
            (chain.__name__, self.dtype, self.blocks): partial(
                chain, given, given, given, bias, out
            )
            for chain, work in chains.items()
            if work is not None
        }

    def _launch(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        shape = self.tokens, len(self.heads) * self.width
        out = torch.empty(shape, dtype=v.dtype, device=v.device)
        t = self._tables
        if t.attend_work is not None and t.score_work is not None:
            # Two chains that need nothing of each other, joined before the result is returned.
            streams = CudaStreams(v.device)
            main, side = streams.current(), streams.side(BESIDE)
            streams.wait(side, streams.record(main))
            self._launch_many(q, k, v, bias, out)
            with streams.use(side):
                self._launch_single(q, k, v, bias, out)
            streams.wait(main, streams.record(side))
        elif t.attend_work is not None:
            self._launch_single(q, k, v, bias, out)
        else:
            self._launch_many(q, k, v, bias, out)
        return out

    def _launch_single(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor) -> None:
        """The heads of one slot."""
        from kilter.parallel.kernels import heads as head_kernels
        from kilter.parallel.kernels.common import launch

        t, b = self._tables, self.blocks
        launch(
            head_kernels.attend, t.attend_work.shape[:1],
            q, k, v, bias, out, t.heads, t.scales, t.attend_work, t.query, t.key, t.values,
            t.place, out.shape[1], WIDTH=self.width, PRECISION=b.precision, **b.attend.options(),
        )  # fmt: skip

    def _launch_many(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor) -> None:
        """The heads of several slots."""
        from kilter.parallel.kernels import heads as head_kernels
        from kilter.parallel.kernels.common import launch

        t, b = self._tables, self.blocks
        scores = torch.empty(t.score_numel, dtype=torch.float32, device=q.device)
        weights = torch.empty(t.weight_numel, dtype=v.dtype, device=q.device)
        common = {"WIDTH": self.width, "PRECISION": b.precision}
        launch(
            head_kernels.scores, t.score_work.shape[:1],
            q, k, scores, t.heads, t.score_work, t.query, t.key,
            TOGETHER=b.together, **common, **b.scores.options(),
        )  # fmt: skip
        launch(
            head_kernels.softmax, t.row_work.shape[:1],
            scores, bias, weights, t.heads, t.scales, t.row_work,
            SPAN=t.span, SPLITS=t.splits, num_warps=4,
        )  # fmt: skip
        launch(
            head_kernels.values, t.value_work.shape[:1],
            weights, v, out, t.heads, t.value_work, t.values, t.place, out.shape[1],
            **common, **b.values.options(),
        )  # fmt: skip


BESIDE = -3
"""It is the number of the side stream for heads of one slot."""


class _Tables:
    """The heads' numbers and the work lists of the kernels, on the device."""

    def __init__(self, heads: Sequence[Head], blocks: Blocks, device: torch.device) -> None:
        numbers, score_work, value_work, row_work, attend_work = [], [], [], [], []
        row_at = column_at = score_at = bias_at = self.splits = 0
        for index, h in enumerate(heads):
            splits = math.ceil(h.slots / blocks.slots)
            numbers.append(
                [h.rows, h.columns, h.slots, splits, row_at, column_at, score_at, bias_at]
            )
            row_at += h.rows * h.slots
            column_at += h.columns * h.slots
            bias_at += h.rows * h.columns
            if h.slots == 1:
                high = math.ceil(h.rows / blocks.attend.rows)
                attend_work += [[index, block] for block in range(high)]
                continue
            self.splits = max(self.splits, splits)
            score_at += splits * h.rows * h.columns
            for split in range(splits):
                slots = min(blocks.slots, h.slots - split * blocks.slots)
                score_work += [
                    (slots, [index, row, column, split])
                    for row in range(math.ceil(h.rows / blocks.scores.rows))
                    for column in range(math.ceil(h.columns / blocks.scores.columns))
                ]
            high = math.ceil(h.rows / blocks.values.rows)
            value_work += [[index, row, slot] for row in range(high) for slot in range(h.slots)]
            row_work += [[index, row] for row in range(h.rows)]
        self.score_numel, self.weight_numel = score_at, bias_at
        self.span = 1 << (max(h.columns for h in heads) - 1).bit_length()
        # Longest first: the last programs of the grid are the short ones.
        score_work.sort(key=lambda item: -item[0])

        def work(items: list[list[int]]) -> Any:
            return torch.tensor(items, dtype=torch.int32).to(device) if items else None

        self.heads = torch.tensor(numbers, dtype=torch.int32, device=device)
        self.scales = torch.tensor([h.scale for h in heads], dtype=torch.float32, device=device)
        self.score_work = work([item for _, item in score_work])
        self.value_work = work(value_work)
        self.row_work = work(row_work)
        self.attend_work = work(attend_work)
        self.query = _joined([h.query for h in heads], device)
        self.key = _joined([h.key for h in heads], device)
        self.values = _joined([h.values for h in heads], device)
        self.place = _joined([h.place for h in heads], device)


def _joined(tables: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([t.to(torch.int32) for t in tables]).to(device)
