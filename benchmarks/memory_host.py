"""The host's time in forward and backward under memory plans, beside plain and own checkpointing.

    python benchmarks/memory_host.py [--models opt,qwen3,bert] [--iterations 10]

For each model of `memory_libraries.py`: plain; its own checkpointing; both with kilter's hooks and
everything kept; and calls of modules recomputed at the peak of checkpointing, through the engine
alone. Each iteration waits for the device before it begins and after its end. What is printed are
medians: milliseconds until forward and until backward have been issued, and of the iteration, with
the allocated peak. A host that others use scatters by a third: compare what one run prints, and
repeat it. Without a GPU it runs tiny models on the stand-in, which only tests this script.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from typing import Any

import torch
from memory_libraries import JOBS, SMALL_BATCH, losses_of, model_of

from kilter.core.units import MIB
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.cuda import Cuda, measure_link
from kilter.memory.plan.problem import Link
from kilter.memory.recompute_choice import HOST_EACH_S

UNLIMITED_BYTES = 2**50
SETTLING = 24
"""Iterations before those that count: passes are watched, tried, planned and measured in them."""
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


class Training:
    """One model and its optimizer."""

    def __init__(self, name: str, *, checkpoint: bool) -> None:
        job = JOBS[name]
        torch.manual_seed(0)
        with DEVICE:
            model = model_of(job, not CUDA, checkpoint)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self._loss_of = losses_of(job, model, job.batch if CUDA else SMALL_BATCH, DEVICE)

    def iteration(self) -> tuple[float, float, float]:
        """Seconds until forward, then backward, was issued, and in all."""
        wait()
        begin_s = time.perf_counter()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss = self._loss_of()
        forward_s = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        wait()
        return forward_s - begin_s, backward_s - forward_s, time.perf_counter() - begin_s


def measure(training: Training, settling: int, iterations: int) -> tuple[list[float], int]:
    """Medians of the three times, and the peak in bytes (0 on a CPU)."""
    for _ in range(settling):
        training.iteration()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    rows = [training.iteration() for _ in range(iterations)]
    peak_bytes = torch.cuda.max_memory_allocated() if CUDA else 0
    return [statistics.median(column) for column in zip(*rows, strict=True)], peak_bytes


def compare(name: str, iterations: int, backend: Any, link: Link) -> None:
    own_bytes = 0
    for arm in ("plain", "checkpointing", "calls"):
        training = Training(name, checkpoint=arm == "checkpointing")
        for hooks in (False, True) if arm != "calls" else (True,):
            governed = Swapper(
                backend(),
                budget_bytes=own_bytes // MIB * MIB if arm == "calls" else UNLIMITED_BYTES,
                link=link,
                segments=arm == "calls",
                alone_s=HOST_EACH_S,
            )
            with governed if hooks else contextlib.nullcontext():
                times_s, peak_bytes = measure(training, SETTLING if hooks else 4, iterations)
            if arm == "checkpointing" and not hooks:
                own_bytes = peak_bytes
            kind = f"{arm}, hooks" if hooks and arm != "calls" else arm
            forward, backward, all_of_it = (f"{1e3 * time_s:7.1f}" for time_s in times_s)
            moved = [(plan.swapped, plan.recomputed) for plan in governed.report().plans]
            print(
                f"{name:13} {kind:20} forward {forward} backward {backward} iteration {all_of_it} "
                f"ms  {peak_bytes / 2**30:6.2f} GiB  offloaded, recomputed {moved}",
                flush=True,
            )
        del training
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="opt,qwen3,bert")
    parser.add_argument("--iterations", type=int, default=10, help="that count, of each kind")
    args = parser.parse_args()
    names = args.models.split(",")
    if unknown := set(names) - set(JOBS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    if CUDA:
        link = measure_link(Cuda.open(0))
    else:
        link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    for name in names:
        compare(name, args.iterations, (lambda: Cuda.open(0)) if CUDA else CpuStandIn, link)


if __name__ == "__main__":
    main()
