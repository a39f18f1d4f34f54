"""Texts of changing lengths under memory budgets: `python benchmarks/memory_lengths.py`.

    [--shares 75,60] [--iterations 300] [--attention flash|written]

A GPT in bf16 autocast whose batches have any length from 64 to 1,024 tokens in steps of 8, in a
loop that reads its loss. Plain, at shares of plain's largest peak through the engine alone, and
plain again, each from the same weights on the same texts. Printed are the mean iteration of the
first third, in which sizes are watched, tried and planned, the median of the last third, the peak
once the budget is in force, what passes came to, and whether losses and weights have plain's bits.
(Attention of PyTorch's own kernels is not deterministic on a GPU, and plain differs from itself;
written out it is, and its scores grow with the square of the length.) Without a GPU tiny models
run on the stand-in, which only tests this script.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import random
import statistics
import time
from typing import Any

import torch
from torch import nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.cuda import Cuda, measure_link
from kilter.memory.plan.problem import Link

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
WIDTH, BATCH, LAYERS, HEADS = (1024, 8, 12, 8) if CUDA else (32, 2, 3, 2)
MIN_BYTES = 2**20 if CUDA else 2**12


class Block(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self._written = written
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        heads = self.heads(self.norms[0](x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if self._written:
            scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
            y = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value
        else:
            y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.mlp(self.norms[1](x))


class Training:
    def __init__(self, iterations: int, *, written: bool) -> None:
        torch.manual_seed(0)
        with DEVICE:
            self._model = nn.Sequential(*(Block(written) for _ in range(LAYERS)))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        chance = random.Random(0)
        self._lengths = [8 * chance.randrange(8, 128) for _ in range(iterations)]
        self._bits = hashlib.sha256()

    def times_s(self, settled: int) -> list[float]:
        """Seconds of each iteration; the peak counts from number `settled` on."""
        found = []
        for number, tokens in enumerate(self._lengths):
            if CUDA and number == settled:
                torch.cuda.reset_peak_memory_stats()
            begin_s = time.perf_counter()
            x = torch.randn(BATCH, tokens, WIDTH, device=DEVICE)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = self._model(x).float().square().mean()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._bits.update(str(loss.item()).encode())
            found.append(time.perf_counter() - begin_s)
        return found

    def bits(self) -> str:
        for parameter in self._model.parameters():
            self._bits.update(parameter.detach().cpu().numpy().tobytes())
        return self._bits.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", default="75,60", help="of plain's largest peak, in percent")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--attention", choices=("flash", "written"), default="flash")
    args = parser.parse_args()
    third = args.iterations // 3
    if CUDA:
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each new length
        link = measure_link(Cuda.open(0))
    else:
        link = Link(to_host_bytes_per_s=3e8, to_device_bytes_per_s=3e8, both_bytes_per_s=4e8)
    peak_bytes, plain_bits = 0, ""
    for share in (None, *map(int, args.shares.split(",")), None):
        training = Training(args.iterations, written=args.attention == "written")
        budget_bytes = 2**60 if share is None else (peak_bytes or 2**21) * share // 100
        backend = Cuda.open(0) if CUDA else CpuStandIn()
        governed = Swapper(backend, budget_bytes=budget_bytes, link=link, min_bytes=MIN_BYTES)
        arm: Any = contextlib.nullcontext() if share is None else governed
        with arm:
            times_s = training.times_s(settled=third)
        taken_bytes = torch.cuda.max_memory_allocated() if CUDA else 0
        bits, report = training.bits(), governed.report()
        if share is None and not plain_bits:
            peak_bytes, plain_bits = taken_bytes, bits
        begin_ms, end_ms = statistics.mean(times_s[:third]), statistics.median(times_s[-third:])
        words = "plain" if share is None else f"{share} %"
        same = "as plain" if bits == plain_bits else "differ from plain"
        print(
            f"{words:6} first third {1e3 * begin_ms:7.1f}, last {1e3 * end_ms:7.1f} ms  "
            f"{taken_bytes / 2**30:5.2f} GiB  bits {same}"
            + (
                ""
                if share is None
                else f"  of {budget_bytes / 2**30:.2f}; {report.passes} passes, {report.planned} "
                f"under {len(report.plans)} plans, {report.watched} watched, "
                f"{report.deviations} departed, {report.spilled} tensors on demand"
            ),
            flush=True,
        )
        del training
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
