"""Below the floor of weights, gradients and optimizer state: its cost, and whether it is exact.

    python benchmarks/state_h200.py --out DIR [--parts rows,identity,cap] [--limit SECONDS]

GPT 1.64B (bf16 autocast, fp32 fused AdamW), all rows from one process; times are medians of CUDA
events around whole iterations, peaks are allocated memory. `rows` compares plain with gradients
consumed in backward, with optimizer state streamed, and with both under the engine for saved
tensors at a budget. `identity` compares loss, parameters and optimizer state with plain's, bit for
bit, on a shallower model with deterministic kernels. `cap` finds the largest batch that trains
under a cap of 40 GiB. `--tiny` runs all parts on a CPU, to test this script.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from memory_h200 import VOCABULARY, Gpt
from torch.nn.attention import SDPBackend, sdpa_kernel

from kilter.act.swapper import CpuStandIn, Swapper
from kilter.act.swapper.cuda import Cuda, measure_link
from kilter.act.swapper.state import StateMover
from kilter.core.units import GIB
from kilter.plan.swap.problem import Link

FIRST = time.perf_counter()
CAP_BYTES = 40 * GIB


@dataclass(frozen=True)
class Machine:
    """Where this runs."""

    device: torch.device
    link: Link
    tiny: bool

    def backend(self) -> Any:
        return CpuStandIn() if self.tiny else Cuda.open()

    def mark(self) -> Any:
        return self.backend().mark() if self.tiny else torch.cuda.Event(enable_timing=True)

    def peak_bytes(self) -> int:
        return 0 if self.tiny else torch.cuda.max_memory_allocated()

    def settle(self) -> None:
        gc.collect()
        if not self.tiny:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


class Job:
    """A model, its optimizer and a batch of random tokens."""

    def __init__(self, machine: Machine, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        width, length = (64, 16) if machine.tiny else (1600, 1024)
        with machine.device:
            self.model = Gpt(layers, width, length)
        self.device_type = machine.device.type
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.length = length
        self.deal(batch)

    def deal(self, batch: int) -> None:
        tokens = torch.randint(0, VOCABULARY, (batch, self.length + 1))
        device = next(self.model.parameters()).device
        self.inputs = tokens[:, :-1].contiguous().to(device)
        self.targets = tokens[:, 1:].contiguous().to(device)

    def step(self) -> torch.Tensor:
        with torch.autocast(self.device_type, torch.bfloat16):
            logits = self.model(self.inputs)
            loss = F.cross_entropy(logits.flatten(0, -2), self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@dataclass(frozen=True)
class Mode:
    """One way to run."""

    name: str
    gradients: str = "keep"
    room_gb: float | None = None
    share: float | None = None
    """Budget of the engine for saved tensors, of plain's peak."""
    moves: bool = True
    anew: bool = True
    """The engine for saved tensors watches again once gradients are consumed."""


MODES = (
    Mode("plain", moves=False),
    Mode("consumed", "consume"),
    Mode("consumed, 8 GB of state stay", "consume", 8.0),
    Mode("consumed, 1 GB of state at a time", "consume", 1.0),
    Mode("kept, 8 GB of state stay", "keep", 8.0),
    Mode("swapper 56.8 %", share=0.568, moves=False),
    Mode("consumed, swapper 56.8 %", "consume", share=0.568),
    Mode("consumed, swapper 50 %", "consume", share=0.5),
    Mode("consumed, 8 GB of state stay, swapper 50 %", "consume", 8.0, share=0.5),
    Mode("consumed, 4 GB of state stay, swapper 50 %", "consume", 4.0, share=0.5),
    Mode("consumed, 8 GB of state stay, swapper 40 %", "consume", 8.0, share=0.4),
)


@contextlib.contextmanager
def governed(
    machine: Machine, mode: Mode, budget_bytes: int | None
) -> Iterator[tuple[StateMover | None, Swapper | None]]:
    """The engines that a mode asks for, joined."""
    with contextlib.ExitStack() as stack:
        swapper = None
        if budget_bytes is not None:
            swapper = Swapper(
                machine.backend(),
                budget_bytes=budget_bytes,
                link=machine.link,
                min_bytes=1024 if machine.tiny else 2**20,
            )
            stack.enter_context(swapper)
        mover = None
        if mode.moves:
            scale = 1e4 if machine.tiny else 1e9  # a tiny model has 52 MB of state
            mover = StateMover(
                machine.backend(),
                link=machine.link,
                gradients=mode.gradients,
                room_bytes=None if mode.room_gb is None else int(mode.room_gb * scale),
                before_update=None if swapper is None else swapper.before_update,
                changed=swapper.forget if swapper is not None and mode.anew else None,
            )
            stack.enter_context(mover)
        yield mover, swapper


def warm(job: Job, mover: StateMover | None, swapper: Swapper | None, passes: int = 4) -> None:
    """Run until nothing is watched any more, and `passes` have run under a plan."""
    for number in range(24):
        job.step()
        planned = swapper is None or swapper.report().planned >= passes
        if number >= 5 and planned:
            return
        if swapper is not None and len(swapper.report().refused) > 40:
            return


def timed(machine: Machine, job: Job, count: int) -> dict[str, float]:
    machine.settle()
    begin = time.perf_counter()
    marks = [machine.mark() for _ in range(count + 1)]
    if machine.tiny:
        for _ in range(count):
            job.step()
        return {"iteration_s": (time.perf_counter() - begin) / count, "peak_bytes": 0}
    marks[0].record()
    for mark in marks[1:]:
        job.step()
        mark.record()
    host_s = (time.perf_counter() - begin) / count
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]
    return {
        "iteration_s": statistics.median(times),
        "peak_bytes": machine.peak_bytes(),
        "host_s": host_s,
    }


def told(mover: StateMover | None, swapper: Swapper | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if mover is not None:
        report = mover.report()
        found["state"] = {
            key: value for key, value in asdict(report).items() if key not in ("plans", "refused")
        }
        found["stall_s"] = [plan.stall_s for plan in report.plans]
        found["refused"] = report.refused
    if swapper is not None:
        values = swapper.report()
        found["swapper"] = {
            "planned": values.planned,
            "late": values.late,
            "deviations": values.deviations,
            "host_bytes": values.host_bytes,
            "predicted_s": [p.iteration_s for p in values.plans][-1:],
            "swapped": [p.swapped for p in values.plans][-1:],
            "remade": [p.remade for p in values.plans][-1:],
            "refused": [text[:120] for text in dict.fromkeys(values.refused)][:3],
        }
    return found


def rows(machine: Machine, names: list[str]) -> Iterator[dict[str, Any]]:
    job = Job(machine, 2 if machine.tiny else 48, 8)
    plain_bytes = 0
    for mode in MODES:
        if names and mode.name not in names and mode.name != "plain":
            continue
        machine.settle()
        budget = None if mode.share is None else int(mode.share * plain_bytes) or 10**6
        with governed(machine, mode, budget) as (mover, swapper):
            warm(job, mover, swapper)
            found = timed(machine, job, 6)
            values = told(mover, swapper)
        plain_bytes = plain_bytes or int(found["peak_bytes"])
        yield {"row": mode.name, "budget_bytes": budget, **found, **values}


def identity(machine: Machine) -> Iterator[dict[str, Any]]:
    """Plain twice: are the kernels deterministic? Then the modes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    plain: list[torch.Tensor] = []
    room_gb = 3000.0 if machine.tiny else 2.0
    modes = (
        Mode("plain", moves=False),
        Mode("plain again", moves=False),
        Mode("consumed", "consume"),
        Mode("consumed and streamed", "consume", room_gb),
        Mode("streamed in the step", "keep", room_gb),
        Mode("consumed and streamed, swapper", "consume", room_gb, 0.7),
    )
    peak_bytes = 0
    for mode in modes:
        machine.settle()
        held_bytes = 0 if machine.tiny else torch.cuda.memory_allocated()
        job = Job(machine, 2 if machine.tiny else 12, 2)
        budget = None
        if mode.share is not None:
            budget = 10**7 if machine.tiny else int(mode.share * peak_bytes) + held_bytes
        values: list[torch.Tensor] = []
        with sdpa_kernel(SDPBackend.MATH), governed(machine, mode, budget) as (mover, swapper):
            values += [job.step() for _ in range(14)]
            peak_bytes = peak_bytes or machine.peak_bytes()
            report = told(mover, swapper)
        for p in job.model.parameters():
            values.append(p.detach().clone())
            values += [v.clone() for _, v in sorted(job.optimizer.state[p].items())]
        plain = plain or values
        same = [torch.equal(a, b) for a, b in zip(plain, values, strict=True)]
        different = len(same) - sum(same)
        yield {"identity": mode.name, "tensors": len(same), "different": different, **report}
        del job
    torch.use_deterministic_algorithms(False)


def cap(machine: Machine, batches: list[int]) -> Iterator[dict[str, Any]]:
    """Which batches train within the cap: plain's, then ours."""
    if not machine.tiny:
        total_bytes = torch.cuda.get_device_properties(machine.device).total_memory
        torch.cuda.set_per_process_memory_fraction(CAP_BYTES / total_bytes)
    budget = int(0.95 * CAP_BYTES)
    ours = Mode("ours", "consume", 4.0, share=1.0, anew=False)
    plain = Mode("plain", moves=False)
    tries = [(plain if batch < 0 else ours, abs(batch)) for batch in batches]
    for mode, batch in tries:
        machine.settle()
        job = Job(machine, 2 if machine.tiny else 48, batch)
        row: dict[str, Any] = {"cap_gib": CAP_BYTES / GIB, "mode": mode.name, "batch": batch}
        report: dict[str, Any] = {}
        try:
            with governed(machine, mode, budget if mode.share else None) as engines:
                try:
                    warm(job, *engines, passes=2)
                    row |= timed(machine, job, 3)
                finally:
                    report = told(*engines)
            row["trains"] = True
        except torch.OutOfMemoryError as error:
            row |= {"trains": False, "error": str(error)[:160]}
        if not machine.tiny:
            row["reserved_bytes"] = torch.cuda.max_memory_reserved()
        yield {**row, **report}
        del job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="identity,rows,cap")
    parser.add_argument("--modes", default="", help="rows to run, separated by ;")
    parser.add_argument(
        "--batches", default="-4,-5,-6,20,24", help="sizes to try; negative ones with plain"
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; no row begins later")
    parser.add_argument("--link", default="", help="GB/s out, in, both; measured if left out")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    given = [float(rate) * 1e9 for rate in (options.link or "50,50,90").split(",")]
    link = Link(
        to_host_bytes_per_s=given[0], to_device_bytes_per_s=given[1], both_bytes_per_s=given[2]
    )
    if options.tiny:
        machine = Machine(torch.device("cpu"), link, True)
    else:
        backend = Cuda.open()
        machine = Machine(backend.device, link if options.link else measure_link(backend), False)
        backend.close()
        print(machine.link, torch.cuda.get_device_name(), torch.__version__, flush=True)
    parts = {
        "rows": lambda: rows(machine, [name for name in options.modes.split(";") if name]),
        "identity": lambda: identity(machine),
        "cap": lambda: cap(machine, [int(batch) for batch in options.batches.split(",")]),
    }
    with (options.out / "state.jsonl").open("w") as file:
        for part in options.parts.split(","):
            for row in parts[part]():
                row["at_s"] = time.perf_counter() - FIRST
                print(json.dumps(row), flush=True)
                file.write(json.dumps({"link": asdict(machine.link), **row}) + "\n")
                file.flush()
                if row["at_s"] > options.limit:
                    return


if __name__ == "__main__":
    main()
