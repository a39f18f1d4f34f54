"""The host's and the device's time under memory plans, beside plain and own checkpointing.

    python benchmarks/memory_host.py [--models opt,qwen3,bert] [--iterations 10]
        [--arms plain,checkpointing,calls,operations,75%,75%+host]

For each model of `memory_libraries.py`, through the engine alone: plain; its own checkpointing;
both with kilter's hooks and everything kept (`plain+hooks`); calls of modules, or single
operations, recomputed at the peak of checkpointing; single operations within shares of plain's
peak, also by plans that count the host's time for each tensor (`75%+host`). What is printed:
medians of iterations that wait for the device before they begin and after their end (milliseconds
until forward and until backward have been issued, and in all); an iteration in a loop that runs on;
the allocated peak; how long kernels take and how long the computing stream is idle in gaps above
20 us, of that where the host had not launched what comes next, while iterations run on (PyTorch's
profiler); and what the plan was. A host that others use scatters by a third: compare what one run
prints, and repeat it. Without a GPU it runs tiny models on the stand-in, which only tests this
script.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from memory_libraries import JOBS, SMALL_BATCH, losses_of, model_of

from kilter.core.units import MIB
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.cuda import Cuda, measure_link
from kilter.memory.engine.host import IDLE_PASSES
from kilter.memory.host_time import HOST_EACH_S
from kilter.memory.plan.problem import Link

UNLIMITED_BYTES = 2**50
ARMS = "plain,plain+hooks,checkpointing,checkpointing+hooks,calls"
GAP_NS = 20_000
"""The computing stream counts as idle in longer gaps than this."""
SETTLING = 12 + IDLE_PASSES
"""Iterations before those that count: passes are watched, tried, planned and measured in them, and
host memory that the plan does not need is given back, which stops one pass for up to 0.4 s."""
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
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.loss_of = losses_of(job, model, job.batch if CUDA else SMALL_BATCH, DEVICE)

    def iteration(self) -> tuple[float, float, float]:
        """Seconds until forward, then backward, was issued, and in all."""
        wait()
        begin_s = time.perf_counter()
        forward_s, backward_s = self.step()
        wait()
        return forward_s - begin_s, backward_s - forward_s, time.perf_counter() - begin_s

    def step(self) -> tuple[float, float]:
        """One iteration that waits for nothing: when forward, then backward, was issued."""
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss = self.loss_of()
        forward_s = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return forward_s, backward_s


def measure(training: Training, settling: int, iterations: int) -> tuple[list[float], int]:
    """Medians of the three times, and the peak in bytes (0 on a CPU)."""
    for _ in range(settling):
        training.iteration()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    rows = [training.iteration() for _ in range(iterations)]
    peak_bytes = torch.cuda.max_memory_allocated() if CUDA else 0
    return [statistics.median(column) for column in zip(*rows, strict=True)], peak_bytes


def run_on(training: Training, iterations: int) -> float:
    """Seconds of an iteration in a loop that does not wait."""
    wait()
    begin_s = time.perf_counter()
    for _ in range(iterations):
        training.step()
    wait()
    return (time.perf_counter() - begin_s) / iterations


class Work(NamedTuple):
    """What the device does at one time, on one stream."""

    begin_ns: int
    end_ns: int
    stream: int
    launch: int
    """The host's call that has issued it has this number."""


def on_the_device(training: Training, iterations: int) -> str:
    """What the computing stream does in iterations that run on: milliseconds of each with work, and
    idle in gaps above 20 us. Where what ends a gap was launched within it, the host was late; else
    the stream waited for something, as for a copy. The first iteration, which starts the profiler,
    does not count."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(iterations + 1):
            training.step()
        wait()
    assert profiled.profiler is not None
    works: list[Work] = []
    launched_ns: dict[int, int] = {}
    for event in profiled.profiler.kineto_results.events():
        begin_ns, end_ns = event.start_ns(), event.start_ns() + event.duration_ns()
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            works.append(Work(begin_ns, end_ns, event.device_resource_id(), event.correlation_id()))
        elif event.name().startswith("cu"):
            launched_ns[event.correlation_id()] = end_ns
    on_streams = Counter[int]()
    for work in works:
        on_streams[work.stream] += work.end_ns - work.begin_ns
    ((computing, _),) = on_streams.most_common(1)
    spans = sorted(work for work in works if work.stream == computing)
    worked_ns = sum(work.end_ns - work.begin_ns for work in spans)
    from_ns = spans[0].begin_ns + (spans[-1].begin_ns - spans[0].begin_ns) // (iterations + 1)
    gaps = [
        (after.begin_ns - before.end_ns, launched_ns.get(after.launch, 0) > before.end_ns)
        for before, after in pairwise(spans)
        if before.begin_ns >= from_ns and after.begin_ns - before.end_ns > GAP_NS
    ]
    idle_ms = sum(gap_ns for gap_ns, _ in gaps) / iterations / 1e6
    late_ms = sum(gap_ns for gap_ns, late in gaps if late) / iterations / 1e6
    kernels_ms = worked_ns / (iterations + 1) / 1e6
    return f"kernels {kernels_ms:6.1f}, idle {idle_ms:6.1f} ms (host late {late_ms:.1f})"


class Arm(NamedTuple):
    """How a model is trained, by its name on the command line."""

    name: str
    kind: str
    """`plain`, `checkpointing`, `calls`, `operations`, or a share of plain's peak."""
    more: str
    """`hooks` (kilter's, everything kept) or `host` (plans count its time), or nothing."""

    @classmethod
    def of(cls, name: str) -> Arm:
        kind, _, more = name.partition("+")
        return cls(name, kind, more)

    @property
    def valid(self) -> bool:
        if self.kind in ("plain", "checkpointing"):
            return self.more in ("", "hooks")
        share = self.kind.removesuffix("%")
        known = self.kind in ("calls", "operations") or (share != self.kind and share.isdecimal())
        return known and self.more in ("", "host")

    @property
    def bare(self) -> bool:
        """Without kilter."""
        return self.name in ("plain", "checkpointing")

    def budget_bytes(self, peaks: dict[str, int]) -> int:
        """By what the arms before have taken."""
        if self.more == "hooks":
            return UNLIMITED_BYTES
        if self.kind.endswith("%"):
            return peaks["plain"] * int(self.kind[:-1]) // 100 // MIB * MIB
        return peaks["checkpointing"] // MIB * MIB


def swapper_of(arm: Arm, peaks: dict[str, int], backend: Callable[[], Any], link: Link) -> Swapper:
    """The engine for an arm; `peaks` are those of arms before, in bytes."""
    calls = arm.kind == "calls"
    return Swapper(
        backend(),
        budget_bytes=UNLIMITED_BYTES if arm.bare else arm.budget_bytes(peaks),
        link=link,
        segments=calls,
        alone_s=HOST_EACH_S if calls or arm.more == "host" else 0.0,
    )


def backend_of() -> tuple[Callable[[], Any], Link]:
    """The GPU, or the stand-in, and its link."""
    if CUDA:
        return partial(Cuda.open, 0), measure_link(Cuda.open(0))
    return CpuStandIn, Link(
        to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9
    )


def compare(name: str, arms: list[Arm], iterations: int, backend: Any, link: Link) -> None:
    peaks: dict[str, int] = {}
    for arm in arms:
        training = Training(name, checkpoint=arm.kind == "checkpointing")
        governed = swapper_of(arm, peaks, backend, link)
        with contextlib.nullcontext() if arm.bare else governed:
            times_s, peak_bytes = measure(training, 4 if arm.bare else SETTLING, iterations)
            running_s = run_on(training, iterations)
            device = on_the_device(training, 3) if CUDA else ""
        if arm.bare:
            peaks[arm.name] = peak_bytes
        forward, backward, waiting = (f"{1e3 * time_s:6.1f}" for time_s in times_s)
        plans = [
            f"{plan.swapped} offloaded, {plan.recomputed} recomputed, "
            f"{1e3 * plan.compute_s:.1f} -> {1e3 * plan.iteration_s:.1f} ms [simulated]"
            for plan in governed.report().plans
        ]
        print(
            f"{name:13} {arm.name:19} forward {forward} backward {backward} waits {waiting} "
            f"runs on {1e3 * running_s:6.1f} ms  {peak_bytes / 2**30:6.2f} GiB  {device}  "
            + "; ".join(plans),
            flush=True,
        )
        del training
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


def chosen(parser: argparse.ArgumentParser, models: str, named: str) -> tuple[list[str], list[Arm]]:
    """The models and arms of a command line, or an error that says what is wrong with them."""
    names, arms = models.split(","), [Arm.of(name) for name in named.split(",")]
    if unknown := set(names) - set(JOBS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    if wrong := [arm.name for arm in arms if not arm.valid]:
        parser.error(f"no such arm: {', '.join(wrong)}; see --help of memory_host.py")
    for arm, needed in (
        ("%", "plain"),
        ("calls", "checkpointing"),
        ("operations", "checkpointing"),
    ):
        begin = [one.kind.endswith(arm) for one in arms]
        if any(begin) and needed not in [one.name for one in arms[: begin.index(True)]]:
            parser.error(
                f"the budget of {arms[begin.index(True)].name} comes from {needed}: name it before"
            )
    return names, arms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="opt,qwen3,bert")
    parser.add_argument("--arms", default=ARMS, help="in this order: the first ones are budgets")
    parser.add_argument("--iterations", type=int, default=10, help="that count, of each kind")
    args = parser.parse_args()
    names, arms = chosen(parser, args.models, args.arms)
    backend, link = backend_of()
    for name in names:
        compare(name, arms, args.iterations, backend, link)


if __name__ == "__main__":
    main()
