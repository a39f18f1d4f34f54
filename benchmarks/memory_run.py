"""`kilter run --memory-budget` on a GPT that does not fit its card, as a user would start it.

    python benchmarks/memory_run.py --out DIR [--layers 48 --width 1600 --batch 8 --length 1024]

Cases, one JSON line each: `plain` and `auto` under a real cap of the allocator; `start` and `start
plain` under one that weights, gradients and optimizer state together exceed, so that the plain run
dies in its first step; `75%` and `40%` without one (which also measure the plain run); `identity`:
losses and parameters of a smaller model under a budget against the plain ones, bit for bit, with
deterministic kernels. This file is also the training script, which knows nothing of kilter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

CASES = ("auto", "start", "75%", "40%", "identity", "plain", "start plain")
START = "--layers 48 --width 1600 --batch 2 --length 1024 --cap 0.157"
"""1.64 B parameters take 24.4 GiB before any activation: too much for 22 GiB."""

TOLD = ("memory", "time", "budget", "the rest", "passes", "refused", "an error", "stepped")


def train(args: argparse.Namespace) -> tuple[list[str], str]:
    """Losses, and a digest of the parameters."""
    import torch
    from gpt import Block, digest, train_step
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, length = args.width, args.length

    if args.cap and device == "cuda":
        torch.cuda.set_per_process_memory_fraction(args.cap)
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(
            nn.Embedding(args.vocabulary, width),
            *(Block(width) for _ in range(args.layers)),
            nn.LayerNorm(width),
            nn.Linear(width, args.vocabulary, bias=False),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses, times = [], []
    for step in range(args.steps):
        begin = time.perf_counter()
        torch.manual_seed(step)
        tokens = torch.randint(args.vocabulary, (args.batch, length), device=device)
        losses.append(train_step(model, optimizer, tokens, tokens).item().hex())
        times.append(time.perf_counter() - begin)
    print(json.dumps({"last_s": times[-4:], "all_s": [round(t, 3) for t in times]}))
    return losses, digest(model, losses)


def identity(args: argparse.Namespace) -> dict[str, Any]:
    """Plain, then governed, in this process."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    args.layers, args.width, args.length, args.batch = args.small
    args.deterministic, args.steps = True, 14
    import kilter

    plain = train(args)
    with kilter.govern(memory_budget="60%", history="off", out=args.out / "identity") as job:
        governed = train(args)
    assert job.run is not None
    report = json.loads((job.run / "report.json").read_bytes())
    peaks = [report["memory"][key] for key in ("peak_before_bytes", "peak_bytes", "budget_bytes")]
    return {"same": plain == governed, "planned": report["memory"]["planned"], "peaks": peaks}


def case(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One case in a process of its own."""
    begin = time.perf_counter()
    own = [str(Path(__file__).resolve()), *sys.argv[1:]]
    run = args.out / name.strip("%").replace(" ", "_")
    if name == "identity":
        command = [sys.executable, *own, "--role", "identity"]
    elif name.endswith("plain"):
        command = [sys.executable, *own, "--role", "train"]
    else:
        budget = "auto" if name == "start" else name
        governed = ["kilter", "run", "--memory-budget", budget, "--history", "off"]
        governed += ["--out", str(run)]
        command = [sys.executable, "-m", *governed, *own, "--role", "train"]
    if name.endswith("%") or name == "identity":
        command += ["--cap", "0"]
    if name.startswith("start"):
        command += args.start.split()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    report = run / "report.json"
    return {
        "case": name,
        "rc": done.returncode,
        "wall_s": round(time.perf_counter() - begin, 1),
        "stdout": [line[:300] for line in done.stdout.splitlines()[-2:]],
        "stderr": [line[:300] for line in done.stderr.splitlines()[-12:]],
        "memory": json.loads(report.read_bytes())["memory"] if report.exists() else None,
    }


def name_of(found: dict[str, Any]) -> str:
    return f"{found['case']} (exit {found['rc']}, {found['wall_s']} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--role", choices=("all", "train", "identity"), default="all")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--cap", type=float, default=0.25, help="share of the card; 0 for none")
    parser.add_argument("--start", default=START, help="the model and cap of `start`")
    parser.add_argument("--small", type=int, nargs=4, default=(12, 1024, 1024, 4), metavar="N")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--together", action="store_true", help="all at once: times mean nothing")
    args = parser.parse_args()
    args.out = args.out.absolute()
    if args.role == "train":
        train(args)
    elif args.role == "identity":
        print(json.dumps(identity(args)))
    else:
        names = args.cases.split(",")
        args.out.mkdir(parents=True, exist_ok=True)
        with (
            ThreadPoolExecutor(len(names) if args.together else 1) as pool,
            open(args.out / "memory_run.jsonl", "a") as lines,
        ):
            for done in as_completed([pool.submit(case, name, args) for name in names]):
                found = done.result()
                print(json.dumps(found), file=lines, flush=True)
                said = [line.removeprefix("kilter: ")[:170] for line in found["stderr"]]
                told = [x for x in said if x.startswith(TOLD)] or said[-1:]
                told += [line[:110] for line in found["stdout"][-1:]]
                print(f"{name_of(found)}: " + "\n  ".join(told), flush=True)


if __name__ == "__main__":
    main()
