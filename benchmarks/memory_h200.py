"""Iteration time and peak memory under a memory budget: plain, block checkpointing, and kilter.

    python benchmarks/memory_h200.py --out FILE [--workloads gpt,dropout,long,resnet]
        [--shares 75,60,50]

All rows of a workload come from one process, between two plain ones; times are medians of CUDA
events around whole iterations, peaks are allocated memory, both measured once the plan has settled.
The loop does not wait for the device; `waiting_s` is for one that does after each iteration, as to
print its loss, so that each begins with the host behind.
FILE gets one JSON object a line, as they come. `--identity` compares loss, every gradient and
every parameter of some planned steps with those of plain ones, bit for bit, with deterministic
kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812
from gpt import VOCABULARY, Gpt
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from kilter.core.units import GIB
from kilter.memory.engine import Swapper
from kilter.memory.engine.cuda import Cuda, measure_link
from kilter.memory.engine.pass_record import PassRecord
from kilter.memory.plan.feedback import slower
from kilter.memory.plan.problem import Link

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or matrix products may vary
RUN_IN = 4
"""Iterations before the timed ones, without waiting in between: a host that starts with the device
idle needs some to get ahead of it."""


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet152

        self.net = resnet152().to(memory_format=torch.channels_last)
        self.checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        net = self.net
        x = net.maxpool(net.relu(net.bn1(net.conv1(x))))
        for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
            for block in stage:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return net.fc(torch.flatten(net.avgpool(x), 1))


@dataclass
class Job:
    """A model with its optimizer and one batch of random data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, torch.Tensor]

    def step(self, mark: Callable[[], None] = lambda: None) -> torch.Tensor:
        """One iteration; `mark` is called when each of its three phases has been issued."""
        inputs, targets = self.batch
        with torch.autocast(inputs.device.type, torch.bfloat16):
            logits = self.model(inputs)
            loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        mark()
        loss.backward()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()
        return loss.detach()


def gpt(
    layers: int,
    width: int,
    batch: int,
    length: int,
    device: object = "cuda",
    *,
    dropout: float = 0.0,
) -> Job:
    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt(layers, width, length, dropout=dropout)
        tokens = torch.randint(0, VOCABULARY, (batch, length + 1))
    return Job(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
    )


def resnet(batch: int) -> Job:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Resnet()
        images = torch.randn(batch, 3, 224, 224).to(memory_format=torch.channels_last)
        targets = torch.randint(0, 1000, (batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Job(model, optimizer, (images, targets))


WORKLOADS: dict[str, Callable[[], Job]] = {
    "gpt": lambda: gpt(48, 1600, 8, 1024),
    "dropout": lambda: gpt(48, 1600, 8, 1024, dropout=0.1),
    "long": lambda: gpt(36, 1280, 2, 8192),
    "resnet": lambda: resnet(256),
}
SMALL: dict[str, tuple[Callable[[], Job], float]] = {
    "gpt": (lambda: gpt(24, 1600, 2, 1024), 0.85),
    "dropout": (lambda: gpt(24, 1600, 2, 1024, dropout=0.1), 0.85),
    "long": (lambda: gpt(12, 1280, 2, 2048), 0.8),
    "resnet": (lambda: resnet(32), 0.7),
}
"""For the comparison bit for bit: shallower, and the budget as a share of plain's peak."""


class Pinned(Cuda):
    """Takes host memory from one pinned piece: pinning it anew for each row takes minutes."""

    piece: torch.Tensor | None = None
    taken_bytes = 0

    def reserve(self, size_bytes: int) -> torch.Tensor:
        piece = Pinned.piece
        begin = self.taken_bytes
        self.taken_bytes = begin + -(-size_bytes // 512) * 512
        if piece is None or self.taken_bytes > piece.numel():
            return super().reserve(size_bytes)
        return piece[begin : begin + size_bytes]

    def give_back(self, host: torch.Tensor) -> None:
        if host.data_ptr() in self._registered:
            super().give_back(host)


@dataclass(frozen=True)
class Row:
    """One mode of one workload; all measured unless named predicted or bound."""

    workload: str
    mode: str
    iteration_s: float
    peak_bytes: int
    budget_bytes: int | None = None
    predicted_s: float | None = None
    compute_s: float | None = None
    swapped: int = 0
    recomputed: int = 0
    out_bytes: int = 0
    host_bytes: int = 0
    device_s: tuple[float, ...] = ()
    """Forward, backward, optimizer step on the device."""
    host_s: tuple[float, ...] = ()
    """The same on the CPU, which issues them: where it is late, the device waits; where it is far
    ahead, it waits for the device."""
    slowest_s: float = 0.0
    """The longest of the iterations."""
    bound_s: float | None = None
    """Of swapping alone, from plain's phases, this budget and the link; derived."""
    waiting_s: float = 0.0
    """Iteration time if the program waits for the device after each."""
    peaks_bytes: tuple[int, ...] = ()
    """Of the passes that were measured while the plan settled."""
    waited_s: float | None = None
    """For which the device stood still for copies in a pass under the plan."""
    hastened: int = 0
    late: int = 0
    deviations: int = 0
    events: int = 0
    refused: tuple[str, ...] = ()
    label: str = "measured"


@dataclass(frozen=True)
class Timing:
    """Medians over some iterations, and the peak over all of them."""

    iteration_s: float
    peak_bytes: int
    device_s: tuple[float, ...]
    host_s: tuple[float, ...]
    slowest_s: float


def timed(job: Job, count: int, *, waiting: bool = False) -> Timing:
    """A loop that runs on, or one that waits for the device after each iteration."""
    if not waiting:
        for _ in range(RUN_IN):
            job.step()
    else:
        torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks: list[torch.cuda.Event] = []
    clock: list[float] = []

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        clock.append(time.perf_counter())

    for _ in range(count):
        mark()
        job.step(mark)
        if waiting:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    device_s = [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]
    host_s = [b - a for a, b in pairwise(clock)]
    phases = [tuple(device_s[i : i + 3]) for i in range(0, 4 * count, 4)]
    times_s = [sum(phase) for phase in phases]
    return Timing(
        statistics.median(times_s),
        torch.cuda.max_memory_allocated(),
        tuple(statistics.median(phase[i] for phase in phases) for i in range(3)),
        tuple(statistics.median(host_s[i::4]) for i in range(3)),
        max(times_s),
    )


@contextlib.contextmanager
def checkpointing(job: Job) -> Iterator[None]:
    job.model.checkpointing = True
    try:
        yield
    finally:
        job.model.checkpointing = False


def ours(
    job: Job, base: Row, link: Link, count: int, *, heard: bool = True, segments: bool = False
) -> tuple[Row, PassRecord | None]:
    """One row under a budget: let the engine watch, try and plan, then measure. Not `heard`, it
    is not told for how long passes wait; with `segments` calls of modules may be made again."""
    assert base.budget_bytes is not None
    planner = "spanning" if base.mode.startswith("swap") else "mix"
    backend = Pinned.open()
    backend.shows_waits = heard
    swapper = Swapper(
        backend, budget_bytes=base.budget_bytes, link=link, planner=planner, segments=segments
    )
    with swapper:
        for done in range(40):
            job.step()
            report = swapper.report()
            if report.settled or (done > 5 and not report.plans):
                break
        planned = bool(report.plans)  # else it spills on demand, which takes seconds
        timing = timed(job, count) if planned else timed(job, 1, waiting=True)
        waiting_s = timed(job, 3, waiting=True).iteration_s if planned else 0.0
        report = swapper.report()
    row = replace(
        base,
        **vars(timing),
        waiting_s=waiting_s,
        waited_s=report.waited_s,
        hastened=report.hastened,
        late=report.late,
        deviations=report.deviations,
        host_bytes=report.host_bytes,
        peaks_bytes=report.peaks_bytes,
        refused=tuple(dict.fromkeys(text[:160] for text in map(str, report.refused)))[:6],
    )
    if not report.plans:
        return row, None
    value = report.plans[-1]
    record = swapper.records()[0]
    row = replace(
        row,
        predicted_s=value.iteration_s,
        compute_s=value.compute_s,
        swapped=value.swapped,
        recomputed=value.recomputed,
        out_bytes=value.out_bytes,
        events=len(record.events),
    )
    return row, record


def in_ms(times_s: tuple[float, ...]) -> str:
    return "+".join(f"{time_s * 1e3:.1f}" for time_s in times_s)


def bound_s(plain: Timing, budget_bytes: int, link: Link) -> float:
    """No schedule that only swaps is faster: what exceeds the budget at the end of forward must
    have left by then, and must come back in backward."""
    over_bytes = max(0, plain.peak_bytes - budget_bytes)
    forward_s, backward_s, step_s = plain.device_s
    return (
        max(forward_s, over_bytes / link.to_host_bytes_per_s)
        + max(backward_s, over_bytes / link.to_device_bytes_per_s)
        + step_s
    )


Tell = Callable[[dict[str, Any]], None]
"""Writes a line."""


def measure(name: str, link: Link, options: argparse.Namespace, tell: Tell) -> None:
    """All rows of a workload. Those under a budget are left out when the time is up."""
    job = WORKLOADS[name]()
    plain_bytes = 0

    def add(row: Row) -> None:
        tell(asdict(row))
        share = row.peak_bytes / plain_bytes if plain_bytes else 1.0
        extra = (
            ""
            if row.predicted_s is None or row.compute_s is None
            else f"predicted +{(row.predicted_s - row.compute_s) * 1e3:.1f}"
        )
        print(
            f"{name} {row.mode} {row.iteration_s * 1e3:.1f} ms {row.peak_bytes / GIB:.2f} GiB",
            f"({share:.3f}) {in_ms(row.device_s)} waiting {in_ms((row.waiting_s,))}",
            f"{extra} {row.swapped}+{row.recomputed}",
            f"late {row.late} waited {in_ms((row.waited_s or 0.0,))} {row.refused[:1]}",
            flush=True,
        )

    def plain(mode: str) -> Timing:
        for _ in range(3):
            job.step()
        timing = timed(job, options.count)
        waiting_s = timed(job, 3, waiting=True).iteration_s
        add(Row(name, mode, waiting_s=waiting_s, **vars(timing)))
        return timing

    before = plain("plain")
    plain_bytes = before.peak_bytes
    with checkpointing(job):
        for _ in range(2):
            job.step()
        checkpoint = timed(job, options.count)
        waiting_s = timed(job, 3, waiting=True).iteration_s
    add(Row(name, "checkpoint", waiting_s=waiting_s, **vars(checkpoint)))
    budgets = {"as checkpoint": checkpoint.peak_bytes}
    for share in numbers(options.shares):
        budgets[f"{share} %"] = share * plain_bytes // 100
    for share in numbers(options.swap_shares):
        budgets[f"swap only {share} %"] = share * plain_bytes // 100
    for (mode, budget), kind in product(budgets.items(), options.recompute.split(",")):
        mode += "" if kind == "operations" else f", {kind}"
        if f"{name} {mode}" in options.skip:
            continue
        if time.perf_counter() > options.until_s:
            break
        base = Row(name, mode, 0.0, 0, budget_bytes=budget)
        row, record = ours(job, base, link, options.count, segments=kind == "segments")
        if mode.startswith("swap"):
            row = replace(row, bound_s=bound_s(before, budget, link))
        add(row)
        if options.records and record is not None:
            tell({"workload": name, "mode": mode, "record": msgspec.to_builtins(record)})
    for heard in (False, True) if options.wrong_table else ():
        share = numbers(options.shares)[0]
        base = Row(name, f"{share} %, wrong table, feedback {heard}", 0.0, 0)
        base = replace(base, budget_bytes=share * plain_bytes // 100)
        wrong = slower(link, out=1 / options.wrong_table, back=1 / options.wrong_table)
        add(ours(job, base, wrong, options.count, heard=heard)[0])
    in_time = time.perf_counter() < options.until_s
    if options.offload and in_time and f"{name} save_on_cpu" not in options.skip:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            job.step()
            add(Row(name, "save_on_cpu", **vars(timed(job, 2, waiting=True))))
    plain("plain again")


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def identity(name: str, link: Link, steps: int = 8) -> dict[str, object]:
    """Loss of each step, and gradients and parameters of the last, against the plain run."""
    found: list[list[torch.Tensor]] = []
    make, share = SMALL[name]
    report = None
    peak = 0
    for governed in (False, False, True):  # plain against itself: are the kernels deterministic?
        before = torch.cuda.memory_allocated()
        job = make()
        budget = before + int(share * peak)
        swapper = Swapper(Pinned.open(), budget_bytes=budget or 1, link=link)
        values: list[torch.Tensor] = []
        torch.cuda.reset_peak_memory_stats()
        with swapper if governed else contextlib.nullcontext():
            for i in range(steps):
                inputs, targets = job.batch
                with torch.autocast("cuda", torch.bfloat16):
                    logits = job.model(inputs)
                    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
                loss.backward()
                values.append(loss.detach().clone())
                if i == steps - 1:
                    values += [p.grad.clone() for p in job.model.parameters()]
                job.optimizer.step()
                job.optimizer.zero_grad()
        values += [p.detach().clone() for p in job.model.parameters()]
        values += [b.detach().clone() for b in job.model.buffers()]
        peak = peak or torch.cuda.max_memory_allocated() - before
        found.append(values)
        report = swapper.report()
        del job, loss, logits
    assert report is not None
    control, same = (
        [torch.equal(a, b) for a, b in zip(found[0], other, strict=True)] for other in found[1:]
    )
    return {
        "workload": name,
        "tensors": len(same),
        "different": len(same) - sum(same),
        "plain_differs_from_itself": len(control) - sum(control),
        "planned_passes": report.planned,
        "swapped": sum(p.swapped for p in report.plans),
        "recomputed": sum(p.recomputed for p in report.plans),
        "late": report.late,
        "refused": [str(reason) for reason in report.refused[:4]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workloads", default="gpt,long,resnet")
    parser.add_argument("--count", type=int, default=6, help="timed iterations of a row")
    parser.add_argument("--shares", default="75,60,50", help="budgets, percent of plain's peak")
    parser.add_argument("--swap-shares", default="", help="the same for plans that only swap")
    parser.add_argument("--skip", action="append", default=[], help='a row, as in "gpt 50 %%"')
    parser.add_argument("--offload", action="store_true", help="save_on_cpu as well; it is slow")
    parser.add_argument(
        "--wrong-table",
        type=float,
        metavar="TIMES",
        help="two more rows at the first share, planned for a link so many times as fast as it is: "
        "without feedback of what copies were waited for, and with it",
    )
    parser.add_argument("--records", action="store_true", help="write what was observed, too")
    parser.add_argument(
        "--recompute",
        default="operations",
        help="`operations,segments`: a row without and one with calls of modules made again",
    )
    parser.add_argument("--identity", action="store_true")
    parser.add_argument("--host-gib", type=int, default=24, help="pinned once, for all rows")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no new row after that")
    options = parser.parse_args()
    options.until_s = time.perf_counter() + options.limit_s

    def tell(line: dict[str, Any]) -> None:
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    backend = Pinned.open()
    link = measure_link(backend)
    backend.close()
    device, version = torch.cuda.get_device_name(), torch.__version__
    tell({"link": asdict(link), "device": device, "torch": version})
    print(link, device, version, flush=True)
    keeper = Cuda.open()
    Pinned.piece = keeper.reserve(options.host_gib * GIB)
    for name in options.workloads.split(","):
        if options.identity:
            # Only without `warn_only` is flash attention's backward deterministic; ResNet's pooling
            # has no such variant, and adds in order all the same.
            torch.use_deterministic_algorithms(True, warn_only=name == "resnet")
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # which has a deterministic backward
                found = identity(name, link)
            torch.use_deterministic_algorithms(False)
            tell(found)
            print(json.dumps(found), flush=True)
        else:
            measure(name, link, options, tell)
        torch.cuda.empty_cache()
    keeper.close()


if __name__ == "__main__":
    main()
