"""Whether plans keep their budgets, by all that is really allocated, without a GPU.

    python benchmarks/memory_allocated.py [--zoo bert,llama] [--timm swin_tiny_patch4_window7_224]
        [--shares 30,60] [--recompute operations,calls] [--autocast off,on] [--link 1e9]

Each model is trained on the CPU in a process in which `allocations.c` (built by `cc`, preloaded)
counts what malloc has given: activations, gradients, workspace, everything. For each budget, a
share of what an iteration takes beside weights and optimizer state, the engine governs a training
alone. A row is one JSON line: the plain peak, the budget, what the plan says, and what passes under
it have taken at most, those that the engine measures and those that the compiled library sees to.
`over` is by how much that is above the budget, as a share of it. A row without a plan says why.

Without `--zoo` (architectures of `memory_zoo.py`, which need transformers) and `--timm` it is a
small GPT. Peaks are measured; what is offloaded goes to memory that does not count.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpt import Gpt
from torch.nn import functional as F  # noqa: N812

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.host_time import HOST_EACH_S
from kilter.memory.plan.problem import Link

LAYERS = 6
ITERATIONS = 20
SETTLED = 14
"""After so many of them plans have been corrected by what was measured."""
MIN_BYTES = 16384
COUNTER = "KILTER_ALLOCATIONS"
"""The preloaded library, in the environment."""


class Allocated(CpuStandIn):
    """The stand-in, with the memory of the process in the place of a device's."""

    def __init__(self, counter: ctypes.CDLL) -> None:
        super().__init__()
        self._counter = counter

    def reserve(self, size_bytes: int) -> torch.Tensor:
        self.host.take(size_bytes)
        self._reserved_bytes += size_bytes
        pages = mmap.mmap(-1, max(1, size_bytes))  # not from malloc
        return torch.frombuffer(pages, dtype=torch.uint8)[:size_bytes]

    def used_bytes(self) -> int:
        return int(self._counter.allocated_bytes())

    def peak_so_far_bytes(self) -> int:
        return int(self._counter.peak_bytes())

    def peak_bytes(self) -> int:
        peak_bytes = self.peak_so_far_bytes()
        self._counter.reset_peak()
        return peak_bytes


class Training:
    """A model and its losses; plain at first."""

    def __init__(self, name: str, counter: ctypes.CDLL, *, autocast: bool) -> None:
        torch.manual_seed(0)
        self.counter, self.autocast = counter, autocast
        model, self._loss = made(name)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(3):
            self.step()
        gc.collect()
        self.kept_bytes = int(counter.allocated_bytes())
        self.plain_bytes = max(self.peak_bytes() for _ in range(3))

    def step(self) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self._loss()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def peak_bytes(self) -> int:
        """The peak of one more iteration."""
        self.counter.reset_peak()
        self.step()
        return int(self.counter.peak_bytes())

    def row(self, share: int, recompute: str, link: Link) -> dict[str, Any]:
        budget_bytes = self.kept_bytes + share * (self.plain_bytes - self.kept_bytes) // 100
        calls = recompute == "calls"
        swapper = Swapper(
            Allocated(self.counter),
            budget_bytes=budget_bytes,
            link=link,
            min_bytes=MIN_BYTES,
            segments=calls,
            alone_s=HOST_EACH_S if calls else 0.0,
        )
        with swapper:
            for _ in range(SETTLED):
                self.step()
            peaks = [self.peak_bytes() for _ in range(SETTLED, ITERATIONS)]
            report = swapper.report()
            measured_bytes = report.highest_bytes
        found = {"share": share, "recompute": recompute, "autocast": self.autocast}
        found |= {"plain_bytes": self.plain_bytes, "budget_bytes": budget_bytes}
        if not report.plans:
            return found | {"refused": [reason.text for reason in report.refused]}
        plan = max(report.plans, key=lambda plan: plan.peak_before_bytes)
        most_bytes = max(measured_bytes, *peaks)
        return found | {
            "planned_bytes": plan.peak_bytes,
            "measured_bytes": measured_bytes,
            "seen_to_bytes": max(peaks),
            "over": round(most_bytes / budget_bytes - 1, 4),
            "offloaded": plan.swapped,
            "recomputed": plan.recomputed,
            "deviations": report.deviations,
        }


def made(name: str) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A small model by its name, and a function that gives the loss of a random batch."""
    kind, _, name = name.partition(":")
    if kind == "gpt":
        gpt = Gpt(LAYERS, 128, 64, words=512, dropout=0.1).train()

        def next_token() -> torch.Tensor:
            tokens = torch.randint(0, 512, (16, 64))
            return F.cross_entropy(gpt(tokens).flatten(0, 1).float(), tokens.flatten())

        return gpt, next_token
    if kind == "timm":
        import timm

        network = timm.create_model(name, num_classes=10).train()
        side = network.default_cfg["input_size"][-1]

        def class_of() -> torch.Tensor:
            images = torch.randn(8, 3, side, side)
            return F.cross_entropy(network(images).float(), torch.randint(0, 10, (8,)))

        return network, class_of
    from memory_zoo import TOKENS, batch, listed, others

    case = next((case for case in (*listed(), *others()) if case.name == name), None)
    if case is None:
        sys.exit(f"--zoo {name}: memory_zoo.py has no such architecture")
    model = partial(case.build.func, *case.build.args, layers=LAYERS)().train()  # type: ignore[attr-defined]
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False

    def loss() -> torch.Tensor:
        if case.what != "tokens":
            return model(**batch(model, case.what)).loss
        rows = torch.randint(3, TOKENS, (48, 48))
        return model(input_ids=rows, labels=rows.clone()).loss

    return model, loss


def preloaded(arguments: list[str]) -> int:
    """This script once more, with the counter."""
    with tempfile.TemporaryDirectory() as folder:
        built = str(Path(folder) / "allocations.so")
        source = str(Path(__file__).with_name("allocations.c"))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", built, source], check=True)
        environment = os.environ | {"LD_PRELOAD": built, COUNTER: built}
        command = [sys.executable, __file__, *arguments]
        return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zoo", default="", help="architectures of memory_zoo.py")
    parser.add_argument("--timm", default="", help="networks of timm")
    parser.add_argument("--shares", default="30,60", help="per cent")
    parser.add_argument("--recompute", default="operations,calls")
    parser.add_argument("--autocast", default="off,on")
    parser.add_argument("--link", type=float, default=1e9, help="bytes per second, each way")
    args = parser.parse_args()
    known = {"recompute": {"operations", "calls"}, "autocast": {"off", "on"}}
    for option, values in known.items():
        if unknown := set(getattr(args, option).split(",")) - values:
            parser.error(f"--{option}: no such value: {', '.join(sorted(unknown))}")
    if not all(share.isdecimal() for share in args.shares.split(",")):
        parser.error(f"--shares: numbers are needed, 30,60 for example, not {args.shares}")
    if COUNTER not in os.environ:
        if shutil.which("cc") is None:
            parser.error("no C compiler was found (cc), which builds allocations.c")
        return preloaded(sys.argv[1:])
    counter = ctypes.CDLL(os.environ[COUNTER])
    for name in ("allocated_bytes", "peak_bytes"):
        getattr(counter, name).restype = ctypes.c_long
    torch.set_num_threads(1)  # others may use the machine's cores
    rate = args.link
    link = Link(to_host_bytes_per_s=rate, to_device_bytes_per_s=rate, both_bytes_per_s=2 * rate)
    named = {"zoo": args.zoo, "timm": args.timm}
    names = [f"{kind}:{name}" for kind, text in named.items() for name in text.split(",") if name]
    for name in names or ["gpt"]:
        for autocast in args.autocast.split(","):
            training = Training(name, counter, autocast=autocast == "on")
            for share in args.shares.split(","):
                for recompute in args.recompute.split(","):
                    row = training.row(int(share), recompute, link)
                    print(json.dumps({"model": name, **row}), flush=True)
            del training
            gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
