"""Gradients, optimizer state and weights that make room: cost, what trains, and is it exact.

    python benchmarks/state_h200.py --out DIR [--parts rows,identity,cap] [--limit SECONDS]

GPT 1.64B (bf16 autocast, fp32 fused AdamW), all rows from one process; times are medians of CUDA
events around whole iterations, peaks are allocated memory. `rows` compares plain and per-block
checkpointing with gradients consumed in backward, with optimizer state streamed, with weights away
over the end of forward, and with what a session decides for a budget (*joint*: activations and all
of these together, settled by itself). `identity` compares losses, parameters and optimizer state
with plain's, bit for bit, on a shallower model with deterministic kernels. `cap` finds the largest
batch that trains under a cap, by default of 40 GiB. `--tiny` runs all parts on a CPU, to test this
script.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from memory_h200 import Job, gpt, timed
from torch.nn.attention import SDPBackend, sdpa_kernel

from kilter.core.units import GIB
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.cuda import Cuda, measure_link
from kilter.memory.engine.state import StateMover
from kilter.memory.engine.weights import WeightMover
from kilter.memory.plan.problem import Link
from kilter.memory.state_and_weights import StateAndWeightPolicy
from kilter.memory.usable_bytes import usable_device_bytes
from kilter.session.fence import Fence

FIRST = time.perf_counter()
IDENTITY_STEPS = 40
WEIGHTS_WARM = 14
"""Iterations until gradients are consumed and the plan for weights was made anew with its times."""
ALL_GB = 1000.0


@dataclass(frozen=True)
class Machine:
    """Where this runs."""

    device: torch.device
    link: Link
    tiny: bool
    layers: int = 48
    width: int = 1600

    def backend(self) -> Any:
        return CpuStandIn(spoil=True) if self.tiny else Cuda.open()

    def peak_bytes(self) -> int:
        return 0 if self.tiny else torch.cuda.max_memory_allocated()

    def settle(self) -> None:
        gc.collect()
        if not self.tiny:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def gpt_on(machine: Machine, layers: int, batch: int) -> Job:
    width, length = (64, 16) if machine.tiny else (machine.width, 1024)
    return gpt(layers, width, batch, length, machine.device)


@dataclass(frozen=True)
class Mode:
    """One way to run."""

    name: str
    share: float | None = None
    """Budget, of plain's peak."""
    gradients: str = "keep"
    room_gb: float | None = None
    weights_gb: float | None = None
    """That are to be away; None: weights stay."""
    moves: bool = False
    """Gradients and state are moved as said here."""
    joint: bool = False
    """Gradients and state are moved as a session decides."""
    checkpointing: bool = False


MODES = (
    Mode("plain"),
    Mode("checkpoint", checkpointing=True),
    Mode("joint 60 %", 0.6, "consume", joint=True),
    Mode("joint as checkpoint", 0.0, "consume", joint=True),
    Mode("joint 50 %", 0.5, "consume", joint=True),
    Mode("joint 75 %", 0.75, "consume", joint=True),
    Mode("joint 40 %", 0.4, "consume", joint=True),
    Mode("kept 60 %", 0.6, "keep", joint=True),
    Mode("swapper 60 %", 0.6),
    Mode("swapper as checkpoint", 0.0),
    Mode("consumed", None, "consume", moves=True),
    Mode("consumed, 8 GB of state stay", None, "consume", 8.0, moves=True),
    Mode("consumed, 1 GB of state at a time", None, "consume", 1.0, moves=True),
    Mode("kept, 8 GB of state stay", None, "keep", 8.0, moves=True),
    Mode("weights", weights_gb=ALL_GB),
    Mode("consumed, 3 GB of weights", None, "consume", weights_gb=3.0, moves=True),
    Mode("consumed, weights", None, "consume", weights_gb=ALL_GB, moves=True),
    Mode("plain again"),
)


class Governed(contextlib.ExitStack):
    """The engines that a mode asks for, joined as a session joins them."""

    def __init__(self, machine: Machine, mode: Mode, budget_bytes: int | None) -> None:
        super().__init__()
        self.machine = machine
        self.mode = mode
        self.budget_bytes = budget_bytes
        self.swapper: Swapper | None = None
        self.mover: StateMover | None = None
        self.weights: WeightMover | None = None
        self.floor: StateAndWeightPolicy | None = None
        self.settled_at: int | None = None
        self.decided_s = 0.0
        """The longest that a decision took."""
        self.each_s: list[float] = []
        """Of the first iterations, as the host sees them."""
        self.steps = 0

    def govern(self, fresh: bool = False) -> Governed:
        """Begin; the job is `fresh` if it has made no step yet."""
        machine, mode = self.machine, self.mode
        min_bytes = 1024 if machine.tiny else 2**20
        if self.budget_bytes is not None:
            backend = machine.backend()
            self.swapper = Swapper(
                backend, budget_bytes=self.budget_bytes, link=machine.link, min_bytes=min_bytes
            )
            self.enter_context(self.swapper)
        if mode.joint:
            assert self.swapper is not None
            self.floor = StateAndWeightPolicy(
                self.swapper, machine.backend, machine.link, Fence(fail), mode.gradients, min_bytes
            )
            self.callback(self.floor.close)
            if fresh:
                self.floor.begin(backend.used_bytes() or 0, self.budget_bytes or 0)
        scale = 1e4 if machine.tiny else 1e9  # a tiny model has 52 MB of state
        if mode.weights_gb is not None:
            self.weights = WeightMover(
                machine.backend(),
                link=machine.link,
                offloaded_bytes=int(mode.weights_gb * scale),
                min_bytes=min_bytes,
            )
        if mode.moves:
            self.mover = StateMover(
                machine.backend(),
                link=machine.link,
                gradients=mode.gradients,
                room_bytes=None if mode.room_gb is None else int(mode.room_gb * scale),
                before_update=self.weights.before_update if self.weights else None,
            )
            self.enter_context(self.mover)
        if self.weights is not None:
            self.enter_context(self.weights)
        return self

    def iteration_ended(self) -> None:
        """An iteration has ended."""
        self.steps += 1
        if self.floor is None or self.swapper is None:
            return
        report = self.swapper.report()
        begin = time.perf_counter()
        self.floor.iteration_ended(report, self.budget_bytes or 0, begin)
        self.decided_s = max(self.decided_s, time.perf_counter() - begin)
        if self.settled_at is None and self.floor.settled and self.swapper.planned:
            self.settled_at = self.steps

    def ready(self, passes: int) -> bool:
        """Nothing is watched any more, and `passes` have run under a plan."""
        if self.floor is not None:
            return self.settled_at is not None and self.steps >= self.settled_at + passes
        planned = self.swapper is None or self.swapper.report().planned >= passes
        return self.steps >= (5 if self.weights is None else WEIGHTS_WARM) and planned


def fail(where: str, error: str) -> None:
    raise AssertionError(f"{where}: {error}")


def warm(job: Job, engines: Governed, passes: int = 4, most: int = 80) -> None:
    while not engines.ready(passes) and engines.steps < most:
        begin = time.perf_counter()
        job.step()
        engines.iteration_ended()
        engines.each_s.append(round(time.perf_counter() - begin, 3))
        print(f"{engines.steps}: {engines.each_s[-1]} s", end=" ", flush=True, file=sys.stderr)


def timed_on(machine: Machine, job: Job, count: int) -> dict[str, Any]:
    """As of `memory_h200`; without a GPU the mean time alone."""
    machine.settle()
    if not machine.tiny:
        return asdict(timed(job, count))
    begin = time.perf_counter()
    for _ in range(count):
        job.step()
    return {"iteration_s": (time.perf_counter() - begin) / count, "peak_bytes": 0}


def told(engines: Governed) -> dict[str, Any]:
    found: dict[str, Any] = {
        "steps": engines.steps,
        "settled_at": engines.settled_at,
        "each_s": engines.each_s,
    }
    floor, swapper = engines.floor, engines.swapper
    state = engines.mover.report() if engines.mover else floor.report if floor else None
    if state is not None:
        found["state"] = {
            key: value for key, value in asdict(state).items() if key not in ("plans", "refused")
        }
        found["stall_s"] = [plan.stall_s for plan in state.plans]
        found["refused"] = [str(reason) for reason in state.refused]
    if floor is not None:
        found |= {
            "room_bytes": floor.mover and floor.mover.room_bytes,
            "decided_s": engines.decided_s,
        }
        found["taken_back"] = (
            None if floor.streaming.taken_back is None else str(floor.streaming.taken_back)
        )
    if floor is not None and floor.streaming.plan is not None:
        found["joint"] = {
            "predicted_s": floor.streaming.plan.iteration_s,
            "taken": floor.streaming.taken,
            "moved_bytes": floor.streaming.plan.moved_bytes,
        }
    weights = (
        engines.weights.report() if engines.weights else floor.weights.report if floor else None
    )
    if weights is not None:
        found["weights"] = asdict(weights) | {
            "plan": None,
            "refused": [str(reason) for reason in weights.refused],
        }
        found["weights_stall_s"] = None if weights.plan is None else weights.plan.stall_s
    if swapper is not None:
        values = swapper.report()
        found["swapper"] = {
            "planned": values.planned,
            "late": values.late,
            "waited_s": values.waited_s,
            "hastened": values.hastened,
            "deviations": values.deviations,
            "host_bytes": values.host_bytes,
            "compute_s": [p.compute_s for p in values.plans][-1:],
            "predicted_s": [p.iteration_s for p in values.plans][-1:],
            "recompute_s": [p.recompute_s for p in values.plans][-1:],
            "out_bytes": [p.out_bytes for p in values.plans][-1:],
            "swapped": [p.swapped for p in values.plans][-1:],
            "recomputed": [p.recomputed for p in values.plans][-1:],
            "refused": [text[:120] for text in dict.fromkeys(map(str, values.refused))][:3],
        }
    return found


def observed(engines: Governed) -> dict[str, Any]:
    """What plans are made from."""
    swapper, floor = engines.swapper, engines.floor
    if swapper is None or not swapper.records():
        return {}
    record = max(swapper.records(), key=lambda r: r.peak_bytes)
    visits = floor.mover.visits() if floor is not None and floor.mover is not None else None
    return {
        "observed": engines.mode.name,
        "record": msgspec.to_builtins(record),
        "buckets": [asdict(bucket) for bucket in visits.buckets] if visits else [],
        "at": visits.at if visits else [],
    }


def rows(machine: Machine, names: list[str], records: bool) -> Iterator[dict[str, Any]]:
    job = gpt_on(machine, 2 if machine.tiny else machine.layers, 8)
    plain_bytes = checkpoint_bytes = 0
    for mode in MODES:
        if names and mode.name not in (*names, "plain"):
            continue
        machine.settle()
        budget = None
        if mode.share is not None:
            budget = int(mode.share * plain_bytes) or checkpoint_bytes or 10**6
        job.model.checkpointing = mode.checkpointing
        begin = time.perf_counter()
        with Governed(machine, mode, budget).govern() as engines:
            warm(job, engines)
            warm_s = time.perf_counter() - begin
            found = timed_on(machine, job, 6)
            values = told(engines)
            record = observed(engines) if records else {}
        plain_bytes = plain_bytes or int(found["peak_bytes"])
        if mode.checkpointing:
            checkpoint_bytes = int(found["peak_bytes"])
        yield {"row": mode.name, "budget_bytes": budget, "warm_s": warm_s, **found, **values}
        yield from [record] if record else []


def identity(machine: Machine, names: list[str]) -> Iterator[dict[str, Any]]:
    """Plain twice: are the kernels deterministic? Then the modes. A joint budget of 60 % is out of
    reach with all state on the device, one of 37 % with all weights."""
    torch.use_deterministic_algorithms(True)  # with `warn_only` attention's backward is not
    room_gb = 3000.0 if machine.tiny else 2.0
    modes = (
        Mode("plain"),
        Mode("plain again"),
        Mode("joint 60 %", 0.6, "consume", joint=True),
        Mode("joint 42 %", 0.42, "consume", joint=True),
        Mode("joint 37 %", 0.37, "consume", joint=True),
        Mode("consumed", None, "consume", moves=True),
        Mode("consumed and streamed", None, "consume", room_gb, moves=True),
        Mode("streamed in the step", None, "keep", room_gb, moves=True),
        Mode("weights", weights_gb=ALL_GB),
        Mode("consumed and streamed, weights", None, "consume", room_gb, ALL_GB, moves=True),
    )
    attention = SDPBackend.MATH if machine.tiny else SDPBackend.FLASH_ATTENTION
    plain: list[torch.Tensor] = []
    held_bytes = plain_bytes = 0
    for mode in modes:
        if names and mode.name not in (*names, "plain", "plain again"):
            continue
        machine.settle()
        job = gpt_on(machine, 2 if machine.tiny else 12, 8)
        budget = None
        if mode.share is not None:
            budget = 10**7 if machine.tiny else int(mode.share * plain_bytes) + held_bytes
        losses = []
        begin = time.perf_counter()
        with sdpa_kernel(attention), Governed(machine, mode, budget).govern(fresh=True) as engines:
            for _ in range(IDENTITY_STEPS):
                losses.append(job.step())
                engines.iteration_ended()
            row = {"identity": mode.name, "budget_bytes": budget, **told(engines)}
        row |= {"held_bytes": held_bytes, "took_s": time.perf_counter() - begin}
        values = losses
        for p in job.model.parameters():
            values += [p.detach(), *(v for _, v in sorted(job.optimizer.state[p].items()))]
        if not plain:
            plain_bytes = machine.peak_bytes()
            plain = [value.clone() for value in values]
            held_bytes = sum(value.nbytes for value in plain)
        same = [torch.equal(a, b) for a, b in zip(plain, values, strict=True)]
        yield row | {"tensors": len(same), "different": len(same) - sum(same)}
        del job, values, losses
    torch.use_deterministic_algorithms(False)


def cap(machine: Machine, batches: list[int], cap_bytes: int) -> Iterator[dict[str, Any]]:
    """Which batches train within the cap: plain's (negative), then ours, as `--memory-budget auto`
    would have it."""
    budget = int(0.9 * cap_bytes)
    if not machine.tiny:
        total_bytes = torch.cuda.get_device_properties(machine.device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total_bytes)
        budget, _ = usable_device_bytes(torch.cuda, machine.device)
    ours = Mode("ours", 1.0, "consume", joint=True)
    for batch in batches:
        mode = Mode("plain") if batch < 0 else ours
        machine.settle()
        row: dict[str, Any] = {"cap_gib": cap_bytes / GIB, "mode": mode.name, "batch": abs(batch)}
        begin = time.perf_counter()
        engines = Governed(machine, mode, budget if mode.joint else None)
        try:
            job = gpt_on(machine, 2 if machine.tiny else 48, abs(batch))
            with engines.govern(fresh=True):
                try:
                    warm(job, engines, passes=2)
                    row |= {"warm_s": time.perf_counter() - begin} | timed_on(machine, job, 3)
                finally:
                    row |= told(engines)
            row["trains"] = True
        except torch.OutOfMemoryError as error:
            row |= {"trains": False, "error": str(error)[:100]}
        if not machine.tiny:
            row["reserved_bytes"] = torch.cuda.max_memory_reserved()
        yield row
        job = None  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="identity,rows,cap")
    parser.add_argument("--modes", default="", help="rows to run, separated by ;")
    parser.add_argument(
        "--batches", default="-4,-5,-6,20,24", help="sizes to try; negative ones with plain"
    )
    parser.add_argument("--cap", type=float, default=40, help="GiB")
    parser.add_argument("--layers", type=int, default=48, help="of the model of rows")
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--records", action="store_true", help="write what was observed, too")
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
        link = link if options.link else measure_link(backend)
        machine = Machine(backend.device, link, False, options.layers, options.width)
        print(machine.link, torch.cuda.get_device_name(), torch.__version__, flush=True)
    names = [name for name in options.modes.split(";") if name]
    parts = {
        "rows": lambda: rows(machine, names, options.records),
        "identity": lambda: identity(machine, names),
        "cap": lambda: cap(
            machine, [int(batch) for batch in options.batches.split(",")], int(options.cap * GIB)
        ),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "state.jsonl").open("w") as file:
        for part in options.parts.split(","):
            for row in parts[part]():
                row["at_s"] = time.perf_counter() - FIRST
                if "observed" not in row:
                    print(json.dumps(row), flush=True)
                file.write(json.dumps({"link": asdict(machine.link), **row}) + "\n")
                file.flush()
                if row["at_s"] > options.limit:
                    return


if __name__ == "__main__":
    main()
