"""The thesis's experiment on real GPUs: five networks share them, from a skewed start.

    python benchmarks/share_h200.py --gpus 0-1 --out share.json           GPUs (needs torchvision)
    python benchmarks/share_h200.py --gpus 0-1 --tiny --out share.json    a CPU, in a few minutes

For each policy the daemon and the jobs are started as a user starts them (`kilter share serve`,
`kilter share run`). Nothing is set on a GPU; NVML is only read. First every job runs alone on all
GPUs, which gives its step time and its number of steps. Recorded: slow-down of each job (its time
in steps over its run-alone time), utilisation while two or more jobs train, images per second, all
decisions, the fitted costs, and, for the static placement, what the time model predicts from costs
that were fitted in the other runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from kilter.sharing.messages import Summary
from kilter.sharing.model import JobCost, jain, predict
from kilter.sharing.plan.snapshot import shards
from kilter.sharing.store import living

NETWORKS = {
    "densenet121": 128,
    "resnet50": 128,
    "alexnet": 256,
    "resnext50_32x4d": 128,
    "shufflenet_v2_x1_0": 256,
}
"""Name in torchvision -> global batch."""
TINY = {"tiny512": 64, "tiny256": 64, "tiny128": 64, "tiny384": 64, "tiny64": 64}
SKEWED = {
    2: [(10, 0), (10, 0), (10, 0), (5, 5), (0, 10)],
    4: [(10, 0, 0, 0), (10, 0, 0, 0), (0, 5, 5, 0), (5, 5, 0, 0), (0, 0, 0, 10)],
}
WARM_UP_STEPS = 10
"""At the start of each job, alone and beside others, which no figure contains."""
KILTER = (sys.executable, "-m", "kilter", "share")


def train(args: argparse.Namespace) -> None:
    """One rank of one job: what `kilter share run` starts."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    class Indices(Dataset):
        def __len__(self) -> int:
            return args.global_batch * args.steps

        def __getitem__(self, index: int) -> int:
            return index

    torch.manual_seed(0)
    cuda = not args.model.startswith("tiny")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if cuda:
        import torchvision

        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        net = getattr(torchvision.models, args.model)(num_classes=1000)
        pool = torch.randn(args.global_batch, 3, 224, 224, device=device)
    else:
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        device, width = torch.device("cpu"), int(args.model.removeprefix("tiny"))
        layers = [torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 1000)]
        net, pool = torch.nn.Sequential(*layers), torch.randn(args.global_batch, 64)
    labels = torch.randint(1000, (args.global_batch,), device=device)
    model = DistributedDataParallel(net.to(device), device_ids=[rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = Indices()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.global_batch // world, sampler=sampler, drop_last=True)
    dist.barrier()
    begun = time.monotonic()
    for step, index in enumerate(loader):
        if step == WARM_UP_STEPS:  # kernels are loaded and chosen
            if cuda:
                torch.cuda.synchronize()
            begun = time.monotonic()
        rows = index.to(device) % args.global_batch
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pool[rows]), labels[rows]).backward()
        optimizer.step()
    if cuda:
        torch.cuda.synchronize()
    took = time.monotonic() - begun
    if rank == 0:
        steps = args.steps - WARM_UP_STEPS
        result = {"began_s": begun, "took_s": took, "steps": steps}
        Path(args.result).write_text(json.dumps(result | {"samples": steps * args.global_batch}))
    dist.destroy_process_group()


class Machine:
    """A daemon, its jobs, and readings of utilisation."""

    def __init__(self, args: argparse.Namespace, policy: str, folder: Path) -> None:
        self.args, self.folder, self.endpoint = args, folder, folder / "endpoint.json"
        serve = ["serve", "--gpus", args.gpus, "--policy", policy, "--period", f"{args.period}s"]
        where = ["--endpoint", str(self.endpoint), "--out", str(folder)]
        self._daemon = subprocess.Popen([*KILTER, *serve, *where])
        while living(self.endpoint) is None:
            if self._daemon.poll() is not None:
                raise SystemExit("the daemon did not start")
            time.sleep(0.2)
        self.seen: list[tuple[float, list[float] | None, Summary]] = []
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._stopped.wait(1.0):
            if (found := living(self.endpoint)) is not None:
                self.seen.append((time.monotonic(), nvml_busy(self.args.gpus), found[1]))

    def job(self, model: str, batch: int, steps: int, ratios: tuple[int, ...] | None):
        result = self.folder / f"{model}.json"
        share = ["run", "--endpoint", str(self.endpoint), "--name", model, "--idle-ranks"]
        share += ["--total-steps", str(steps)]
        if ratios is not None:
            share += ["--ratios", ",".join(map(str, ratios))]
        own = ["--train", model, "--global-batch", str(batch), "--steps", str(steps)]
        own += ["--result", str(result)]
        return subprocess.Popen([*KILTER, *share, __file__, *own]), result

    def end(self) -> None:
        self._stopped.set()
        self._watcher.join()
        self._daemon.send_signal(signal.SIGINT)
        self._daemon.wait()


def nvml_busy(gpus: str) -> list[float] | None:
    """Utilisation of each GPU as NVML tells it; None without NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in indices(gpus)]
        return [pynvml.nvmlDeviceGetUtilizationRates(h).gpu / 100 for h in handles]
    except pynvml.NVMLError:
        return None


def indices(gpus: str) -> list[int]:
    first, _, last = gpus.partition("-")
    return list(range(int(first), int(last or first) + 1))


def alone(args: argparse.Namespace, networks: dict[str, int], folder: Path) -> dict[str, float]:
    """Step time of each job with all GPUs to itself, at an even split."""
    folder.mkdir()
    machine, found = Machine(args, "fixed", folder), {}
    for model, batch in networks.items():
        process, result = machine.job(model, batch, args.probe_steps, None)
        if process.wait():
            raise SystemExit(f"{model} failed alone")
        read = json.loads(result.read_text())
        found[model] = read["took_s"] / read["steps"]
    machine.end()
    return found


def together(args, networks, steps, alone_s, policy, folder) -> dict:
    """All jobs at once under a policy, from the skewed start (`even`: from an even one)."""
    folder.mkdir()
    machine = Machine(args, policy, folder)
    starts = SKEWED[len(indices(args.gpus))]
    jobs = {}
    for (model, batch), ratios in zip(networks.items(), starts, strict=True):
        start = None if policy == "even" else ratios
        jobs[model] = machine.job(model, batch, steps[model], start)
    codes = {model: process.wait() for model, (process, _) in jobs.items()}
    machine.end()
    if any(codes.values()):
        raise SystemExit(f"a job failed under {policy}: {codes}")
    read = {model: json.loads(result.read_text()) for model, (_, result) in jobs.items()}
    slow = {m: r["took_s"] / (r["steps"] * alone_s[m]) for m, r in read.items()}
    begin = min(r["began_s"] for r in read.values())
    end = max(r["began_s"] + r["took_s"] for r in read.values())
    shared = [(busy, s) for t, busy, s in machine.seen if len(s.jobs) > 1]
    nvml = [statistics.mean(busy) for busy, _ in shared if busy]
    costs = {j.name.partition("#")[0]: j.cost for _, _, s in machine.seen for j in s.jobs if j.cost}
    return {
        "policy": policy,
        "jobs": [{"name": m, "slowdown": slow[m], **read[m]} for m in networks],
        "max_slowdown": max(slow.values()),
        "jain": jain(list(slow.values())),
        "makespan_s": end - begin,
        "images_per_s": sum(r["samples"] for r in read.values()) / (end - begin),
        "utilisation_nvml": statistics.mean(nvml) if nvml else None,
        "utilisation_by_jobs": statistics.mean(np.mean(s.utilisation) for _, s in shared)
        if shared
        else None,
        "instant_slowdowns": medians(machine.seen, len(networks)),
        "decisions": list(dict.fromkeys(d for _, _, s in machine.seen for d in s.decisions)),
        "costs": msgspec.to_builtins(costs),
    }


def medians(seen, count: int) -> dict[str, float]:
    """Median step time of each job while all jobs are there: what the time model predicts."""
    steps: dict[str, list[float]] = {}
    for _, _, summary in seen:
        if len(summary.jobs) == count:
            for job in summary.jobs:
                if job.step_s:
                    steps.setdefault(job.name.partition("#")[0], []).append(job.step_s)
    return {name: statistics.median(values) for name, values in steps.items()}


def predicted(networks: dict[str, int], rows: list[dict], gpus: int) -> dict[str, object]:
    """Step times on the static placement from costs fitted in the other runs, and as measured."""
    static = next(row for row in rows if row["policy"] == "fixed")
    costs = {}
    for row in rows:
        if row["policy"] not in ("fixed", "even"):
            costs |= row["costs"]
    names = [name for name in networks if name in costs and name in static["instant_slowdowns"]]
    if len(names) < len(networks):
        return {"error": "not every job was observed at more than one ratio"}
    samples = [shards(networks[n], r) for n, r in zip(names, SKEWED[gpus], strict=True)]
    model = predict([msgspec.convert(costs[n], JobCost) for n in names], np.array(samples)).step_s
    measured = [static["instant_slowdowns"][n] for n in names]
    return {
        n: {"predicted_s": float(p), "measured_s": m, "error": float(p) / m - 1}
        for n, p, m in zip(names, model, measured, strict=True)
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gpus", default="0-1", help="0-1 or 0-3")
    parser.add_argument("--tiny", action="store_true", help="small networks, on a CPU")
    parser.add_argument("--policies", default="fixed,even,thesis,maxmin")
    parser.add_argument("--alone-s", type=float, default=20.0, help="length of each job alone")
    parser.add_argument("--probe-steps", type=int, default=60)
    parser.add_argument("--period", type=float, default=3.0, help="of the daemon, in seconds")
    parser.add_argument("--out", type=Path, default=Path("share.json"))
    parser.add_argument("--train", dest="model", help=argparse.SUPPRESS)
    parser.add_argument("--global-batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model:
        train(args)
        return 0
    networks = TINY if args.tiny else NETWORKS
    folder = Path(tempfile.mkdtemp(prefix="kilter-share-"))
    alone_s = alone(args, networks, folder / "alone")
    steps = {m: WARM_UP_STEPS + max(20, round(args.alone_s / alone_s[m])) for m in networks}
    rows: list[dict] = []
    for policy in args.policies.split(","):
        rows.append(together(args, networks, steps, alone_s, policy, folder / policy))
        row = rows[-1]
        print(f"{policy}: largest slow-down {row['max_slowdown']:.2f}, Jain {row['jain']:.3f}")
        document = {"schema": "kilter.share-benchmark/1", "label": "measured", "gpus": args.gpus}
        document |= {"alone_step_s": alone_s, "steps": steps, "rows": rows}
        if any(r["policy"] == "fixed" for r in rows) and len(rows) > 2:
            document["model_against_reality"] = predicted(networks, rows, len(indices(args.gpus)))
        args.out.write_text(json.dumps(document, indent=1))
    print(f"wrote {args.out}; pages in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
