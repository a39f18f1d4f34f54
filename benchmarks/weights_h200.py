"""Weights that are away over the end of forward: cost, memory saved, and whether it is exact.

    python benchmarks/weights_h200.py --out FILE [--parts identity,rows,session] [--limit SECONDS]

The job is that of `state_h200.py` (GPT 1.64B, bf16 autocast, fp32 fused AdamW). `rows`: weights
move alone, with gradients consumed in backward, and with optimizer state streaming as well; feature
maps stay. `identity`: losses, parameters and optimizer state against plain's on a shallower model,
bit for bit, deterministic kernels. `session`: what a session decides for budgets far below plain's
peak, the least that is possible as it goes, and losses and parameters against plain's, on the
shallower model with deterministic kernels. `--tiny` runs all parts on a CPU, to test this script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from memory_h200 import Pinned
from state_h200 import Governed, Job, Machine, Shared, told
from state_h200 import Mode as SessionMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from kilter.act.swapper.cuda import Cuda, measure_link
from kilter.act.swapper.state import StateMover
from kilter.act.swapper.weights import WeightMover
from kilter.core.units import GIB
from kilter.plan.swap.problem import Link

FIRST = time.perf_counter()
WARM = 14
"""Iterations until gradients are consumed and the plan for weights was made anew with its times."""


@dataclass(frozen=True)
class Mode:
    """One way to run."""

    name: str
    weights_gb: float | None = None
    """That are to be away; None: weights stay."""
    consume: bool = False
    room_gb: float | None = None
    """For optimizer state; None: all of it stays."""


MODES = (
    Mode("plain"),
    Mode("weights", 1000.0),
    Mode("consumed", consume=True),
    Mode("consumed, 3 GB of weights", 3.0, consume=True),
    Mode("consumed, weights", 1000.0, consume=True),
    Mode("consumed, 1 GB of state at a time", consume=True, room_gb=1.0),
    Mode("consumed, 1 GB of state at a time, weights", 1000.0, consume=True, room_gb=1.0),
    Mode("plain again"),
)


class Movers(contextlib.ExitStack):
    """The engines of a mode, joined as a session joins them."""

    def __init__(self, machine: Machine, mode: Mode) -> None:
        super().__init__()
        Shared.free_from = 0
        self.weights: WeightMover | None = None
        self.state: StateMover | None = None
        scale = 1e4 if machine.tiny else 1e9
        small = 1024 if machine.tiny else 2**20
        if mode.weights_gb is not None:
            self.weights = WeightMover(
                machine.backend(),
                link=machine.link,
                away_bytes=int(mode.weights_gb * scale),
                min_bytes=small,
            )
        if mode.consume:
            self.state = StateMover(
                machine.backend(),
                link=machine.link,
                gradients="consume",
                room_bytes=None if mode.room_gb is None else int(mode.room_gb * scale),
                min_bytes=small,
                before_update=self.weights.before_update if self.weights else None,
            )
            self.enter_context(self.state)
        if self.weights is not None:
            self.enter_context(self.weights)

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.weights is not None:
            report = asdict(self.weights.report())
            plan = report.pop("plan")
            found["weights"] = report
            found["stall_s"] = None if plan is None else plan["stall_s"]
        if self.state is not None:
            state = self.state.report()
            found["state"] = {
                "consuming": state.consuming,
                "away_bytes": state.away_bytes,
                "late": state.late,
                "refused": state.refused,
            }
        return found


def timed(machine: Machine, job: Job, count: int) -> dict[str, float]:
    """Median of iterations, their peak, and what is allocated in between."""
    machine.settle()
    marks = [machine.backend().mark() if machine.tiny else machine.mark() for _ in range(count + 1)]
    if machine.tiny:
        for _ in range(count):
            job.step()
        return {}
    marks[0].record()
    begin = time.perf_counter()
    for mark in marks[1:]:
        job.step()
        mark.record()
    host_s = (time.perf_counter() - begin) / count
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks))
    return {
        "iteration_s": times[count // 2],
        "slowest_s": times[-1],
        "host_s": host_s,
        "peak_bytes": machine.peak_bytes(),
        "between_bytes": torch.cuda.memory_allocated(),
    }


def rows(machine: Machine, names: list[str]) -> Iterator[dict[str, Any]]:
    job = Job(machine, 2 if machine.tiny else 48, 8)
    for mode in MODES:
        if names and mode.name not in names:
            continue
        machine.settle()
        begin = time.perf_counter()
        with Movers(machine, mode) as movers:
            for _ in range(4 if mode.name.startswith("plain") else WARM):
                job.step()
            warm_s = time.perf_counter() - begin
            found = timed(machine, job, 7)
            values = movers.told()
        yield {"row": mode.name, "warm_s": warm_s, **found, **values}


def identity(machine: Machine) -> Iterator[dict[str, Any]]:
    """Plain twice: are the kernels deterministic? Then the modes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    plain: list[torch.Tensor] = []
    modes = (
        Mode("plain"),
        Mode("plain again"),
        Mode("weights", 1000.0),
        Mode("consumed, weights", 1000.0, consume=True),
        Mode("consumed and streamed, weights", 1000.0, consume=True, room_gb=2.0),
    )
    for mode in modes:
        machine.settle()
        job = Job(machine, 2 if machine.tiny else 12, 2)
        values: list[torch.Tensor] = []
        with sdpa_kernel(SDPBackend.MATH), Movers(machine, mode) as movers:
            values += [job.step() for _ in range(WARM)]
            report = movers.told()
        for p in job.model.parameters():
            values.append(p.detach().clone())
            values += [v.clone() for _, v in sorted(job.optimizer.state[p].items())]
        plain = plain or values
        same = [torch.equal(a, b) for a, b in zip(plain, values, strict=True)]
        yield {
            "identity": mode.name,
            "tensors": len(same),
            "different": len(same) - sum(same),
            **report,
        }
        del job
    torch.use_deterministic_algorithms(False)


def session(
    machine: Machine, layers: int, budgets_gib: list[float], steps: int
) -> Iterator[dict[str, Any]]:
    """Plain twice (are the kernels deterministic?), then each budget: the same steps from the
    beginning, then some that are timed."""
    torch.use_deterministic_algorithms(True)  # with `warn_only` attention's backward is not
    plain: list[torch.Tensor] = []
    for budget_gib in (None, None, *budgets_gib):
        machine.settle()
        job = Job(machine, layers, 8)
        budget = 10**6 if machine.tiny else int((budget_gib or 0) * GIB)
        mode = SessionMode("session", budget_gib, "consume", joint=budget_gib is not None)
        row: dict[str, Any] = {"session": budget_gib, "layers": layers}
        begin = time.perf_counter()
        losses, floors = [], []
        attention = SDPBackend.MATH if machine.tiny else SDPBackend.FLASH_ATTENTION
        with (
            sdpa_kernel(attention),
            Governed(machine, mode, budget if mode.joint else None).govern() as engines,
        ):
            for _ in range(steps):
                losses.append(job.step())
                engines.border()
                problem = engines.floor._problem(budget)[1] if engines.floor else None
                floors.append(None if problem is None else round(problem.floor_bytes / GIB, 3))
            row["warm_s"] = time.perf_counter() - begin
            found = [value.cpu() for value in (*losses, *job.model.parameters())]
            row |= timed(machine, job, 7)
            row |= told(engines) if mode.joint else {}
            weights = engines.floor.weights if engines.floor else None
            if weights is not None:
                row["weights"] = asdict(weights) | {"plan": None}
        plain = plain or found
        same = [torch.equal(a, b) for a, b in zip(plain, found, strict=True)]
        row |= {"tensors": len(same), "different": len(same) - sum(same)}
        row["least_gib"] = [a for a, b in pairwise([*floors, None]) if a is not None and a != b]
        yield row
        del job
    torch.use_deterministic_algorithms(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="identity,rows,session")
    parser.add_argument("--modes", default="", help="rows to run, separated by ;")
    parser.add_argument("--budgets", default="7", help="of sessions, GiB")
    parser.add_argument("--layers", type=int, default=12, help="of the model of sessions")
    parser.add_argument("--steps", type=int, default=40, help="of sessions, compared with plain")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; no row begins later")
    parser.add_argument("--host-gib", type=float, default=0, help="pinned once, for all rows")
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
        if options.host_gib:
            Pinned.piece = backend.reserve(int(options.host_gib * GIB))
        print(machine.link, torch.cuda.get_device_name(), torch.__version__, flush=True)
    budgets = [float(size) for size in options.budgets.split(",")]
    parts = {
        "rows": lambda: rows(machine, [name for name in options.modes.split(";") if name]),
        "identity": lambda: identity(machine),
        "session": lambda: session(
            machine, 2 if options.tiny else options.layers, budgets, options.steps
        ),
    }
    with options.out.open("w") as file:
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
