"""A memory budget on several GPUs: the same job under DDP and FSDP2, plain and governed.

    python benchmarks/memory_ranks.py --out DIR [--ranks 2] [--budget 70%]
    python benchmarks/memory_ranks.py --out DIR --model opt --steps 120 [--recompute segments]

With `--model` one of those of `memory_libraries.py`, also under its own checkpointing, whose peak
is kilter's budget then. Each case is started as a user would start it (`kilter run --standalone
--nproc-per-node N`), with deterministic kernels. One JSON line each: peak of every rank, median
iteration, and whether losses and parameters equal the plain run's bit for bit. This file is also
the training script, which knows nothing of kilter. Without GPUs it runs on gloo, to test this
script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO


def train(args: argparse.Namespace) -> None:
    """Writes what this rank found to OUT/RANK.json."""
    import torch
    from gpt import Gpt, digest, train_step
    from memory_libraries import JOBS, losses_of, model_of

    rank = int(os.environ["RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    job = JOBS.get(args.model)
    with device:
        if job is None:
            model: Any = Gpt(args.layers, args.width, args.length)
        else:
            model = model_of(job, not cuda, args.checkpoint)
    if args.parallel == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
        for block in max(lists, key=len):
            fully_shard(block)
        fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss_of = None if job is None else losses_of(job, model, args.batch, device)

    def step_on(tokens: Any) -> Any:
        if loss_of is None:
            return train_step(model, optimizer, tokens, tokens)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses, times = [], []
    for step in range(args.steps):  # by count: all ranks run the same collectives
        torch.manual_seed(100 * step + rank)
        tokens = torch.randint(args.vocabulary, (args.batch, args.length), device=device)
        if cuda:
            torch.cuda.synchronize()
            if step == args.steps - 8:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses.append(step_on(tokens).item().hex())
        times.append(time.perf_counter() - begin)
    found = {
        "digest": digest(model, losses),
        "iteration_s": statistics.median(times[-8:]),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
    }
    (args.out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    if cuda:
        torch.distributed.destroy_process_group()
    else:
        os._exit(0)  # gloo may abort in its own end


def case(parallel: str, arm: str, budget: str, args: argparse.Namespace) -> dict[str, Any]:
    out = args.out / f"{parallel}-{arm}"
    governed = arm == "governed"
    out.mkdir(parents=True, exist_ok=True)
    ranks = ["--standalone", "--nproc-per-node", str(args.ranks)]
    verb = ["kilter", "run", "--memory-budget", budget, "--out", str(out / "run")]
    verb += ["--history", "off", "--recompute", args.recompute, *ranks]
    sizes = ("layers", "width", "length", "batch", "steps", "vocabulary")
    done = subprocess.run(
        [sys.executable, "-m", *(verb if governed else ["torch.distributed.run", *ranks])]
        + [str(Path(__file__).resolve()), "--role", "train", "--parallel", parallel]
        + ["--out", str(out), "--model", args.model, *["--checkpoint"] * (arm == "checkpoint")]
        + [text for name in sizes for text in (f"--{name}", str(getattr(args, name)))],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"},
    )
    found = [json.loads(p.read_text()) for p in sorted(out.glob("[0-9]*.json"))]
    report = out / "run" / "report.json"
    return {
        "case": out.name,
        "rc": done.returncode,
        "ranks": found,
        "stderr": [line[:200] for line in done.stderr.splitlines()[-14:]],
        "memory": json.loads(report.read_bytes())["memory"] if report.exists() else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--role", choices=("all", "train"), default="all")
    parser.add_argument("--parallel", default="ddp,fsdp2")
    parser.add_argument("--model", default="", help="one of those of memory_libraries.py")
    parser.add_argument("--checkpoint", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--recompute", default="auto", help="as for kilter run")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=28)
    args = parser.parse_args()
    args.out = args.out.absolute()
    if args.role == "train":
        train(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "memory_ranks.jsonl", "a") as lines:
        for parallel in args.parallel.split(","):
            plain = run_case(parallel, "plain", "", args, lines)
            budget = args.budget
            if args.model:
                own = run_case(parallel, "checkpoint", "", args, lines)
                budget = f"{max((r['peak_bytes'] for r in own['ranks']), default=0) // 2**20}MiB"
            governed = run_case(parallel, "governed", budget, args, lines)
            digests = [[r["digest"] for r in each["ranks"]] for each in (plain, governed)]
            same = len(digests[0]) == args.ranks and digests[1] == digests[0]
            print(f"{parallel}: {'the same bits' if same else 'DIFFERENT'}", flush=True)


def run_case(
    parallel: str, arm: str, budget: str, args: argparse.Namespace, lines: TextIO
) -> dict[str, Any]:
    """A case, written and printed as soon as it is over."""
    found = case(parallel, arm, budget, args)
    print(json.dumps(found), file=lines, flush=True)
    peaks = [round(r["peak_bytes"] / 2**30, 2) for r in found["ranks"]]
    times = [round(r["iteration_s"] * 1e3, 1) for r in found["ranks"]]
    print(f"{found['case']} (exit {found['rc']}): {peaks} GiB, {times} ms", flush=True)
    for line in found["stderr"] if found["rc"] or arm == "governed" else ():
        print("  ", line[:160], flush=True)
    return found


if __name__ == "__main__":
    main()
