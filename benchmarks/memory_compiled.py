"""Compiled models under a memory budget, beside the best fraction of the compiler found by hand.

    python benchmarks/memory_compiled.py --out DIR [--cases gpt03,vit,gpt16] [--shares 75,60,50]
        [--fractions 0.8,0.6,0.4,0.2] [--regions blocks] [--limit-s 540]

For each case: the compiled plain run, a sweep of `activation_memory_budget` by hand (one process,
everything compiled anew for each), and `kilter run --memory-budget` for each share of the compiled
plain peak. Each row is printed as soon as it is there, as one JSON line, and kept in
DIR/memory_compiled.jsonl; at the end of a case there is one line for people for each budget. bf16
autocast, fused AdamW, one batch of random data; each of the last iterations is waited for.
`--regions blocks` compiles block by block (one compilation for all blocks), `whole` the model.
Peaks are the allocator's, in the last iterations. No row begins after `--limit-s`.

This file is also the training script, which knows nothing of kilter. Without a GPU it runs tiny
models with `--backend aot_eager`, to test this script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpt import Block, Gpt, train_step
from memory_models import TIMED, Timed
from torch import nn
from torch._functorch import config
from torch.optim.optimizer import register_optimizer_step_post_hook


class Vit(nn.Module):
    def __init__(self, layers: int, width: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.zeros((size // 16) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


CASES: dict[str, tuple[Any, Any]] = {
    "gpt03": ((Gpt, 24, 1024, 1024, 50304, 8), (Gpt, 2, 128, 128, 256, 16)),
    "vit": ((Vit, 24, 1024, 224, 128), (Vit, 2, 128, 64, 64)),
    "gpt16": ((Gpt, 48, 1600, 1024, 50304, 8), (Gpt, 3, 128, 256, 512, 8)),
}
"""The model, its sizes, and the batch: on a GPU, and to test this script without one."""


def job(case: str, device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    kind, *sizes, batch = CASES[case][device.type == "cpu"]
    torch.manual_seed(0)
    with device:
        model = kind(*sizes)
        if kind is Gpt:
            words = torch.randint(0, sizes[3], (batch, sizes[2] + 1))
            return model, words[:, :-1].contiguous(), words[:, 1:].contiguous()
        images = torch.randn(batch, 3, sizes[2], sizes[2])
        return model, images, torch.randint(0, 1000, (batch,))


def train(args: argparse.Namespace) -> None:
    """One JSON line for each fraction; a fraction of 1 is the compiler's default."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    model, inputs, targets = job(args.case, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    called: Any = model
    if args.regions == "whole":
        called = torch.compile(model, backend=args.backend)
    else:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend=args.backend)
    for fraction in args.fractions:
        if fraction != 1:
            torch.compiler.reset()
            config.activation_memory_budget = fraction
        timed, losses = Timed(args.steps, cuda), []
        handle = register_optimizer_step_post_hook(timed)
        begin_s = time.perf_counter()
        for step in range(args.steps):
            losses.append(train_step(called, optimizer, inputs, targets))
            if step == 0:
                losses[0].item()
                first_s = time.perf_counter() - begin_s
        handle.remove()
        times = [b - a for a, b in zip(timed.ends_s, timed.ends_s[1:], strict=False)]
        row = {
            "fraction": fraction,
            "iteration_s": statistics.median(times),
            "compile_s": max(0.0, first_s - statistics.median(times)),
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
            "losses": [float(losses[0]), float(losses[-1])],
        }
        print(json.dumps(row), flush=True)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin_s = time.monotonic()
        self.file = (args.out / "memory_compiled.jsonl").open("a")

    def left_s(self) -> float:
        return float(self.args.limit_s - (time.monotonic() - self.begin_s))

    def tell(self, row: dict[str, Any]) -> None:
        for file in (sys.stdout, self.file):
            print(json.dumps(row), file=file, flush=True)

    def run(self, case: str, arm: str, fractions: str, steps: int, *verb: str) -> list[Any]:
        """The rows of one process, told as they come; fewer where it fails or time is up."""
        args = self.args
        command = [sys.executable, *verb, str(Path(__file__).resolve()), "--role", "train"]
        command += ["--out", str(args.out), "--case", case, "--fractions", fractions]
        command += ["--regions", args.regions, "--backend", args.backend, "--steps", str(steps)]
        rows: list[Any] = []
        if self.left_s() <= 0:
            return rows
        log = args.out / f"{case}-{arm}.log"
        with log.open("w") as errors:
            child = subprocess.Popen(
                ["timeout", str(int(self.left_s() + args.grace_s)), *command],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    rows.append({"case": case, "arm": arm, **json.loads(line)})
                    if not verb:
                        self.tell(rows[-1])
            if child.wait():
                last = log.read_text().splitlines()[-4:]
                self.tell({"case": case, "arm": arm, "rc": child.returncode, "stderr": last})
        return rows

    def governed(self, case: str, share: int, plain: dict[str, Any]) -> dict[str, Any] | None:
        args = self.args
        out = args.out / f"{case}-{share}"
        budget_bytes = share * plain["peak_bytes"] // 100
        budget = f"{budget_bytes // 2**20}MiB" if budget_bytes else f"{share}%"
        verb = ("-m", "kilter", "run", "--memory-budget", budget, "--out", str(out))
        found = self.run(case, f"kilter-{share}", "1", args.steps, *verb)
        if not found:
            return None
        memory = json.loads((out / "report.json").read_bytes())["memory"]
        row = {
            **found[0],
            "share": share,
            "budget_bytes": budget_bytes,
            "kept": found[0]["peak_bytes"] <= budget_bytes,
            "over_plain": found[0]["iteration_s"] / plain["iteration_s"],
            "memory": memory,
            "said": [
                line[:300]
                for line in (args.out / f"{case}-kilter-{share}.log").read_text().splitlines()
                if line.startswith("kilter: ")
            ][:9],
        }
        self.tell(row)
        return row

    def case(self, case: str) -> list[str]:
        args = self.args
        plain = self.run(case, "plain", "1", TIMED + 6)
        if not plain:
            return [f"{case}: no plain row"]
        hand = [plain[0], *self.run(case, "by-hand", args.fractions_by_hand, TIMED + 4)]
        lines = []
        for share in args.shares:
            row = self.governed(case, share, plain[0])
            if row is None:
                lines.append(f"{case} {share} %: no row")
                continue
            within = [one for one in hand if one["peak_bytes"] <= row["budget_bytes"]]
            best = min(within, key=lambda one: one["iteration_s"], default=None)
            by_hand = "none keeps it"
            if best is not None:
                over = best["iteration_s"] / plain[0]["iteration_s"]
                by_hand = f"{over:.3f} at {best['fraction']:g}"
            lines.append(
                f"{case} {share} %: {row['peak_bytes'] / 2**30:.2f} of "
                f"{row['budget_bytes'] / 2**30:.2f} GiB, {'kept' if row['kept'] else 'OVER'}; "
                f"time over compiled plain {row['over_plain']:.3f}, by hand {by_hand}"
            )
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--role", choices=("all", "train"), default="all")
    parser.add_argument("--cases", default="gpt03,vit,gpt16")
    parser.add_argument("--case", default="gpt03")
    parser.add_argument("--shares", default="75,60,50")
    parser.add_argument("--fractions", default="0.8,0.6,0.4,0.2")
    parser.add_argument("--regions", choices=("blocks", "whole"), default="blocks")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=56)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no new row after that")
    parser.add_argument("--grace-s", type=float, default=60.0, help="for the row that runs then")
    args = parser.parse_args()
    if args.role == "train":
        args.fractions = [float(one) for one in args.fractions.split(",")]
        train(args)
        return
    args.fractions_by_hand = args.fractions
    args.shares = [int(share) for share in args.shares.split(",")]
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    for case in args.cases.split(","):
        print("\n".join(bench.case(case)), flush=True)


if __name__ == "__main__":
    main()
