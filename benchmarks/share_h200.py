"""Fair sharing on real GPUs: every figure of it in one bounded run, each printed once it is known.

    python benchmarks/share_h200.py --gpus 0-1 --out share.json           GPUs (needs torchvision)
    python benchmarks/share_h200.py --gpus 0-1 --tiny --out share.json    a CPU, in a few minutes

Nothing is set on a GPU; NVML is only read. In order:

`alone`: each network alone, one rank for each GPU: step time without kilter; overhead of an elastic
   job with a daemon, in `--pairs` of blocks that alternate with plain ones (median and its 95 %
   interval), while the split has always been even, so that DDP reduces the gradients, and with
   `--weighted` also after other ratios, so that they are weighted; the GPU of an idle rank, watched
   by that rank, and the kernels that it launches; step times at three ratios, from which the costs
   of the time model are fitted.
`slices`: how networks share GPUs in time, without kilter (`share_slices.py`).
`policies`: all networks at once, started as users start them (`kilter share run`), and trained
   through one placement after the other while daemons (`kilter share serve`) replace each other:
   the skewed start, an even split, and each policy from the skewed start. Slow-down: time of a
   step, from the samples that were done in a window, over that of the network alone. The time
   model's predictions stand beside what was measured: from the costs of `alone`, and from what a
   daemon sees in the skewed placement.
`losses`: loss curves against the plain run (`share_losses.py`), on the GPUs.

Parts that do not fit into `--budget` seconds any more are left out, and named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kilter.sharing.board import Board
from kilter.sharing.messages import JobStatus, RankStatus, RatioTarget, Summary
from kilter.sharing.model import JobCost, Observation, fit, jain, predict
from kilter.sharing.plan.policies import SHARING_POLICIES
from kilter.sharing.plan.snapshot import Ratios, shards
from kilter.sharing.store import Channel, living

NETWORKS = {
    "densenet121": 64,
    "resnet50": 64,
    "alexnet": 256,
    "resnext50_32x4d": 64,
    "shufflenet_v2_x1_0": 128,
}
"""Name in torchvision -> global batch."""
TINY = {"tiny512": 64, "tiny256": 64, "tiny128": 64}
SKEWED: dict[int, list[Ratios]] = {
    2: [(10, 0), (10, 0), (10, 0), (5, 5), (0, 10)],
    4: [(10, 0, 0, 0), (10, 0, 0, 0), (0, 5, 5, 0), (5, 5, 0, 0), (0, 0, 0, 10)],
}
STEPS_OF_PASS = 400
BLOCK_S = 0.2
"""How long a block of a network without or with kilter is about."""
LOSSES_S = 50.0
"""Kept for the loss curves."""
IDLE_NETWORKS = ("resnet50", "tiny256")
"""On which the GPU of an idle rank is watched."""
IDLE_S = 9.0
KILTER = (sys.executable, "-m", "kilter", "share")
Costs = dict[str, JobCost]


# One network of one rank.


class Network:
    """A network under DDP with its data: samples are indices into a pool on the device."""

    def __init__(self, name: str, batch: int, rank: int) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        self.cuda = not name.startswith("tiny")
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            import torchvision

            net = getattr(torchvision.models, name)(num_classes=1000)
            self.pool = torch.randn(batch, 3, 224, 224, device=self.device)
        else:
            width = int(name.removeprefix("tiny"))
            layers = [torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 1000)]
            net, self.pool = torch.nn.Sequential(*layers), torch.randn(batch, 64)
        self.batch = batch
        self.labels = torch.randint(1000, (batch,), device=self.device)
        self.model = DistributedDataParallel(
            net.to(self.device), device_ids=[rank] if self.cuda else None
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def loader(self, steps: int) -> Any:
        import torch.distributed as dist
        from torch.utils.data import DataLoader, DistributedSampler

        data: Any = range(self.batch * steps)
        sampler: Any = DistributedSampler(data)
        size = self.batch // dist.get_world_size()
        return DataLoader(data, size, sampler=sampler, drop_last=True)

    def step(self, index: Any, model: Any = None) -> float:
        """The time in which the host launches the step, after its wait for the step before."""
        import torch

        rows = index.to(self.device) % self.batch
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        output = (model or self.model)(self.pool[rows])
        torch.nn.functional.cross_entropy(output, self.labels[rows]).backward()
        self.optimizer.step()
        return time.perf_counter() - begun

    def timed(self, batches: Iterator[Any], steps: int) -> float:
        """Seconds of each step after the first of a pass; 0 on a rank without the last step."""
        begun = took = 0.0
        for done, index in enumerate(batches, start=1):
            self.step(index)
            if done in (1, steps):
                self.wait()
                took = time.perf_counter() - begun
                begun = time.perf_counter() if done == 1 else begun
        return took / (steps - 1)

    def wait(self) -> None:
        import torch

        if self.cuda:
            torch.cuda.synchronize()


def begin_rank(cuda: bool) -> tuple[int, int]:
    """This rank and how many there are."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return rank, world


def train(args: argparse.Namespace) -> None:
    """One rank of one job, which trains until it is ended: what `kilter share run` starts. Writes
    the moment of each step and its samples."""
    rank, _ = begin_rank(not args.model.startswith("tiny"))
    network = Network(args.model, args.global_batch, rank)
    loader = network.loader(STEPS_OF_PASS)
    with Path(f"{args.result}.{rank}").open("w", buffering=1) as marks:
        while True:
            for index in loader:
                network.step(index)
                marks.write(f"{time.monotonic()} {len(index)}\n")


# Each network alone.


def examine(args: argparse.Namespace) -> None:
    """One rank of all networks alone; rank 0 tells and writes after each network."""
    rank, _ = begin_rank(not args.tiny)
    found: dict[str, Any] = {}
    for name in args.networks:
        batch = networks_of(args)[name]
        row = Alone(args, name, batch, rank).row()
        if rank == 0:
            found[name] = row
            Path(args.result).write_text(json.dumps(found))
            tell(
                args,
                f"{name} alone: {1e3 * row['step_s']:.2f} ms a step; busy on one GPU "
                f"{shown(row['busy_on_one'])}",
            )
            for state, found_s in row["overheads"].items():
                tell(
                    args,
                    f"  overhead of kilter, {state}, {len(found_s)} pairs: "
                    f"{100 * statistics.median(found_s):+.2f} % "
                    f"({' to '.join(percent(median_interval(found_s)))})",
                )
            if row["idle"] is not None:
                tell(args, f"idle rank of {name}: {row['idle']}")
    if not args.tiny:
        found = reductions(rank)
        if rank == 0:
            tell(args, f"gradients of AlexNet, ms: {found}")


def reductions(rank: int) -> dict[str, list[float]]:
    """Milliseconds of the reduction of 244 MB of gradients in buckets, in ways to weight them."""
    import torch
    import torch.distributed as dist

    buckets = [torch.randn(6_100_000, device=f"cuda:{rank}") for _ in range(10)]
    weighted = dist._make_nccl_premul_sum(0.5)
    ways: dict[str, Any] = {
        "sum": lambda b: dist.all_reduce(b, async_op=True),
        "product, sum": lambda b: dist.all_reduce(b.mul_(0.5), async_op=True),
        "average": lambda b: dist.all_reduce(b, dist.ReduceOp.AVG, async_op=True),
        "premultiplied sum": lambda b: dist.all_reduce(b, weighted, async_op=True),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(4):
        for way, reduce in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(20):
                for work in [reduce(bucket) for bucket in buckets]:
                    work.wait()
            end.record()
            torch.cuda.synchronize()
            found[way].append(begin.elapsed_time(end) / 20)
    return found


class Alone:
    """One network, twice in the same process: plain, and as an elastic job with a daemon."""

    def __init__(self, args: argparse.Namespace, name: str, batch: int, rank: int) -> None:
        import torch.distributed as dist

        from kilter.session.fence import Fence
        from kilter.sharing.elastic.job import ElasticJob
        from kilter.sharing.elastic.share import connect
        from kilter.sharing.link import DaemonLink
        from kilter.sharing.messages import Identity

        self.args, self.name, self.rank, self.world = args, name, rank, dist.get_world_size()
        self.plain, self.elastic = Network(name, batch, rank), Network(name, batch, rank)
        self.plain.timed(iter(self.plain.loader(5)), 5)  # kernels are loaded
        step_s = self.plain.timed(iter(self.plain.loader(10)), 10)
        self.steps = self._same(min(max(round(BLOCK_S / step_s), 8), 200))
        self.proposals = 0

        def attached(job: ElasticJob) -> None:
            assert job.share is not None
            assert job.facts is not None
            if rank == 0:
                self.store = connect(job.share.address)
                identity = Identity(name, tuple(range(self.world)))
                endpoint = Path(args.endpoint)
                self.link = DaemonLink(endpoint, job.share, job.facts, identity, job.guard)
                self.link.start()

        self.job = ElasticJob(
            guard=Fence, may_idle=True, release=True, attached=attached, say=sys.exit
        )
        self.job.watch(self.elastic.model)
        self.elastic.optimizer.register_step_post_hook(
            lambda *_: self.job.guard.run(self.job.stepped, self.elastic.optimizer)
        )
        self.loader = self.elastic.loader(self.steps)
        self.pass_with_kilter()

    def _same(self, value: Any, root: int = 0) -> Any:
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, root)
        return box[0]

    def pass_with_kilter(self, loader: Any = None, steps: int = 0) -> float:
        loader = loader or self.loader
        batches = self.job.batches(loader, lambda: iter(loader))
        return self.elastic.timed(batches, steps or self.steps)

    def pairs(self) -> tuple[list[float], list[float]]:
        """Plain step times, and the overhead of the block with kilter beside each."""
        plain_s, elastic_s = [], []
        plain_loader = self.plain.loader(self.steps)
        for pair in range(self.args.pairs):
            for kilter in (pair % 2 == 0, pair % 2 != 0):
                if kilter:
                    elastic_s.append(self.pass_with_kilter())
                else:
                    plain_s.append(self.plain.timed(iter(plain_loader), self.steps))
        return plain_s, [b / a - 1 for a, b in zip(plain_s, elastic_s, strict=True)]

    def row(self) -> dict[str, Any]:
        overheads = {}
        plain_s, overheads["always even"] = self.pairs()
        observations = [self.observed()]
        rest = [0] * (self.world - 2)
        observations.append(self.observed((7, 3, *rest)))
        with Busy(self.args.gpus) as busy:
            observations.append(self.observed((10, 0, *rest)))
        idle = self.idle(statistics.median(plain_s)) if self.name in IDLE_NETWORKS else None
        if self.args.weighted:
            self.change(shards(10, (1,) * self.world))
            overheads["weighted"] = self.pairs()[1]
        if self.rank == 0:
            self.link.leave()
        return {
            "step_s": statistics.median(plain_s),
            "overheads": overheads,
            "plain_s": plain_s,
            "busy_on_one": busy.mean(0),
            "idle": idle,
            "observations": msgspec.to_builtins(observations),
            "cost": msgspec.to_builtins(self.cost(observations)),
        }

    def observed(self, ratios: Ratios | None = None) -> Observation:
        """What the meters of the ranks tell of passes at a ratio (None: as the script has it)."""
        if ratios is not None:
            self.change(ratios)
        self.pass_with_kilter()
        self.pass_with_kilter()
        return self._same(self._observation() if self.rank == 0 else None)

    def cost(self, observations: list[Observation]) -> JobCost:
        found = fit(observations, self.plain.cuda)
        assert found is not None
        return found

    def change(self, ratios: Ratios) -> None:
        """Within the next pass."""
        from kilter.sharing.elastic.agreement import propose

        self.proposals += 1
        thread = None
        if self.rank == 0:
            proposal = (self.store, self.proposals, ratios, self.world)
            thread = threading.Thread(target=propose, args=proposal)
            thread.start()
        while not self._same(self.job.share.schedule.at(self.job.share.iteration) == ratios):
            self.pass_with_kilter()
        if thread is not None:
            thread.join()

    def _observation(self) -> Observation:
        read = [
            msgspec.json.decode(self.store.get(f"status/{r}"), type=RankStatus)
            for r in range(self.world)
        ]
        return Observation(
            tuple(r.samples for r in read),
            tuple(max(r.step_s - r.comm_s, 0.0) for r in read),
            max(r.step_s for r in read if r.samples),
            (0.0,) * self.world,
        )

    def idle(self, step_s: float) -> dict[str, Any]:
        """What the last rank, which is idle, sees of its own GPU while it waits for the others: the
        utilisation, and the kernels that it launches itself in a pass and in one twice as long."""
        import torch

        steps = self._same(max(round(IDLE_S / step_s / 2), 40))
        with Busy(self.args.gpus) as busy:
            self.pass_with_kilter(self.elastic.loader(steps), steps)
        found: dict[str, Any] = {
            "waited_s": busy.ended_s - busy.begun_s,
            # NVML's readings are means of up to a second; all ranks meet at both ends of a pass.
            "busy": busy.readings(self.world - 1, after_s=2.0, before_end_s=0.5),
        }
        kind = torch.profiler.ProfilerActivity
        activities = [kind.CUDA if self.plain.cuda else kind.CPU]
        for part in (8, 4) if self.rank == self.world - 1 else ():
            with torch.profiler.profile(activities=activities) as profile:
                self.pass_with_kilter(self.elastic.loader(steps // part), steps // part)
            launched = [e for e in profile.events() if e.device_type.name != "CPU"]
            found[f"kernels_in_{steps // part}_steps"] = len(launched)
        for part in (8, 4) if self.rank != self.world - 1 else ():
            self.pass_with_kilter(self.elastic.loader(steps // part), steps // part)
        return self._same(found, self.world - 1)


class Busy:
    """Readings of the utilisation of all GPUs, five a second, while the block runs."""

    def __init__(self, gpus: str) -> None:
        self._gpus, self.seen = gpus, list[tuple[float, list[float]]]()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Busy:
        self.begun_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.ended_s = time.monotonic()

    def _watch(self) -> None:
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in indices(self._gpus)]
            while not self._stopped.wait(0.2):
                rates = [pynvml.nvmlDeviceGetUtilizationRates(h).gpu / 100 for h in handles]
                self.seen.append((time.monotonic(), rates))

    def readings(self, gpu: int, after_s: float, before_end_s: float) -> list[float] | None:
        first, last = self.begun_s + after_s, self.ended_s - before_end_s
        return [rates[gpu] for at, rates in self.seen if first < at < last] or None

    def mean(self, gpu: int) -> float | None:
        read = self.readings(gpu, 0.0, 0.0)
        return statistics.mean(read) if read else None


# All at once.


class Machine:
    """The jobs, which train all the time, and the daemon of the moment."""

    def __init__(self, args: argparse.Namespace, alone_s: dict[str, float], folder: Path) -> None:
        self.args, self.folder, self.endpoint = args, folder, folder / "endpoint.json"
        self.networks, self.alone_s = networks_of(args), alone_s
        self.gpus = indices(args.gpus)
        self.skewed = dict(zip(self.networks, SKEWED[len(self.gpus)], strict=False))
        self.jobs: list[subprocess.Popen[bytes]] = []
        self.daemon: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The jobs, in the skewed placement."""
        self.serve("fixed")
        for name, batch in self.networks.items():
            share = ["run", "--endpoint", str(self.endpoint), "--name", name, "--idle-ranks"]
            share += ["--ratios", ",".join(map(str, self.skewed[name]))]
            share += ["--alone-step", f"{1e3 * self.alone_s[name]}ms"]
            own = ["--train", name, "--global-batch", str(batch)]
            own += ["--result", str(self.folder / name)]
            with (self.folder / f"{name}.log").open("wb") as log:
                command = [*KILTER, *share, __file__, *own]
                self.jobs.append(subprocess.Popen(command, stdout=log, stderr=log))
        self.until(lambda: self.at(self.skewed), "every job trains at its ratio", 150.0)

    def serve(self, policy: str) -> None:
        """A daemon in place of the one before; the jobs find it."""
        self.end_daemon()
        serve = ["serve", "--gpus", self.args.gpus, "--policy", policy]
        serve += ["--period", f"{self.args.period}s", "--endpoint", str(self.endpoint)]
        with (self.folder / f"{policy}-daemon.log").open("wb") as log:
            self.daemon = subprocess.Popen([*KILTER, *serve], stdout=log, stderr=log)
        self.until(lambda: living(self.endpoint), f"the daemon ({policy}) answers", 60.0)

    def end_daemon(self) -> None:
        if self.daemon is not None:
            self.daemon.send_signal(signal.SIGINT)
            self.daemon.wait()

    def place(self, wanted: dict[str, Ratios]) -> None:
        """Put every job at a ratio, in the part of a daemon."""
        self.end_daemon()
        self.daemon = None
        channel = Channel.open("127.0.0.1", self.endpoint)
        channel.summarise(Summary(1, os.getpid(), "fixed", 1.0, tuple(self.gpus), (), (), ()))
        done: set[str] = set()

        def placed() -> bool:
            for slot in range(1, channel.slots() + 1):
                status = channel.status(slot)
                if status is None:
                    continue
                channel.want(slot, RatioTarget(1, wanted[status.name], "the start"))
                if status.ratios == wanted[status.name]:
                    done.add(status.name)
            return len(done) == len(wanted)

        self.until(placed, "every job is at its ratio", 90.0)

    def statuses(self) -> dict[str, JobStatus]:
        found = living(self.endpoint)
        if found is None:
            return {}
        read = [found[0].status(slot) for slot in range(1, found[0].slots() + 1)]
        return {status.name: status for status in read if status is not None}

    def at(self, wanted: dict[str, Ratios]) -> bool:
        """Whether every job has settled at these ratios."""
        seen = self.statuses()
        return all(
            (status := seen.get(name)) is not None
            and status.ratios == ratios
            and all(r.steps >= 3 for r, part in zip(status.ranks, ratios, strict=True) if part)
            for name, ratios in wanted.items()
        )

    def until(self, condition: Any, what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = [process for process in (*self.jobs, self.daemon) if process and process.poll()]
            if ended or time.monotonic() > deadline:
                for log in self.folder.glob("*.log"):
                    print(f"--- {log.name}\n{log.read_text()[-1500:]}", file=sys.stderr)
                raise SystemExit(f"never after {timeout_s:.0f} s: {what}")
            time.sleep(0.2)

    def end(self) -> None:
        for process in self.jobs:
            process.terminate()
        for process in self.jobs:
            process.wait()
        self.end_daemon()

    def window(self, policy: str, length_s: float) -> dict[str, Any]:
        """What is done in a time from now on."""
        begin = time.monotonic()
        with Busy(self.args.gpus) as busy:
            time.sleep(length_s)
        end = time.monotonic()
        found = living(self.endpoint)
        summary = None if found is None else found[1]
        step_s, rate = {}, 0.0
        for name, batch in self.networks.items():
            pace = self.pace(name, begin, end)
            step_s[name], rate = batch / pace, rate + pace
        slow = {name: step_s[name] / self.alone_s[name] for name in step_s}
        used = [busy.mean(gpu) for gpu in range(len(self.gpus))]
        return {
            "policy": policy,
            "window_s": end - begin,
            "jobs": [{"name": n, "slowdown": slow[n], "step_s": step_s[n]} for n in slow],
            "max_slowdown": max(slow.values()),
            "jain": jain(list(slow.values())),
            "images_per_s": rate,
            "busy": used,
            "utilisation": None if None in used else statistics.mean(used),
            "statuses": msgspec.to_builtins(self.statuses()),
            "summary": msgspec.to_builtins(summary),
        }

    def pace(self, name: str, begin: float, end: float) -> float:
        """Samples a second of all ranks of a job: the slope of the samples done against the time,
        so that a step that lies across the edge of the window counts little."""
        marks = []
        for file in self.folder.glob(f"{name}.[0-9]*"):
            for line in file.read_text().splitlines()[:-1]:
                at, samples = line.split()
                if begin < float(at) <= end:
                    marks.append((float(at), int(samples)))
        marks.sort()
        if len(marks) < 4:
            raise SystemExit(f"{name} did {len(marks)} steps in {end - begin:.0f} s")
        return pace(*np.array(marks).T)


def pace(at: Any, samples: Any) -> float:
    """Samples a second, from the moments at which steps have ended and the samples of each."""
    done = np.array(samples)
    # A step's samples are done at its end: half before and half after the mark, on average.
    return float(np.polyfit(at, np.cumsum(done) - done / 2, 1)[0])


def compare(networks: dict[str, int], costs: Costs, row: dict[str, Any], ratios: dict[str, Ratios]):
    """Predicted and measured step times at a static placement."""
    names = [name for name in networks if name in costs]
    samples = [shards(networks[name], ratios[name]) for name in names]
    model = predict([costs[name] for name in names], np.array(samples)).step_s
    measured = {job["name"]: job["step_s"] for job in row["jobs"]}
    return {
        name: {
            "predicted_s": float(p),
            "measured_s": measured[name],
            "error": float(p) / measured[name] - 1,
        }
        for name, p in zip(names, model, strict=True)
    }


def share(args: argparse.Namespace, document: dict[str, Any], folder: Path) -> None:
    """All networks at once, told step by step."""
    networks, alone = networks_of(args), document["alone"]
    costs = {"alone": {name: msgspec.convert(row["cost"], JobCost) for name, row in alone.items()}}
    machine = Machine(args, {name: row["step_s"] for name, row in alone.items()}, folder)
    rows: list[dict[str, Any]] = document.setdefault("rows", [])
    try:
        machine.start()
        tell(args, "all jobs train")
        for policy in args.policies.split(","):
            need_s = args.window + 8 + (args.adapt if policy not in ("fixed", "even") else 0)
            if left_s(args) < need_s + LOSSES_S * ("losses" in args.parts):
                tell(args, f"{policy}: left out, no time is left")
                continue
            static = {"fixed": machine.skewed, "even": dict.fromkeys(networks, even(machine))}
            if rows:
                machine.place(static.get(policy, machine.skewed))
                machine.serve("fixed" if policy in static else policy)
            begun_s = time.monotonic()
            if policy in static:
                machine.until(
                    lambda wanted=static[policy]: machine.at(wanted), "the jobs are found", 60.0
                )
                time.sleep(2.0)
            else:
                time.sleep(args.adapt)
            row = machine.window(policy, args.window)
            rows.append(row | {"settled_after_s": time.monotonic() - begun_s - args.window})
            tell_row(args, rows)
            if policy in static:
                rows[-1]["model"] = tell_model(args, row, costs, static[policy])
            if policy == "fixed":
                costs["as seen in the skewed placement"] = costs_seen(machine)
            write(args, document)
    finally:
        machine.end()


def costs_seen(machine: Machine) -> Costs:
    """What a daemon fits to the jobs as they run now, and to their run-alone times."""
    board = Board(machine.gpus, SHARING_POLICIES["fixed"], 1.0)
    for slot, status in enumerate(machine.statuses().values()):
        board.report(slot, status, 0.0)
    board.tick(0.0)
    return {job.name.partition("#")[0]: job.cost for job in board.snapshot(0.0).jobs if job.cost}


def tell_model(
    args: argparse.Namespace,
    row: dict[str, Any],
    costs: dict[str, Costs],
    ratios: dict[str, Ratios],
) -> dict[str, Any]:
    """The model's error, by what its costs are from."""
    found = {}
    for source, which in costs.items():
        found[source] = compare(networks_of(args), which, row, ratios)
        errors = [part["error"] for part in found[source].values()]
        tell(
            args,
            f"  model, costs from jobs {source}: step times off by "
            f"{' '.join(percent(errors))}; largest {100 * max(map(abs, errors)):.0f} % (bar 15 %)",
        )
    return found


def even(machine: Machine) -> Ratios:
    return shards(10, (1,) * len(machine.gpus))


def tell_row(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    row = rows[-1]
    slow = " ".join(f"{job['slowdown']:.2f}" for job in row["jobs"])
    tell(
        args,
        f"{row['policy']}: slow-downs {slow}; largest {row['max_slowdown']:.2f}, Jain "
        f"{row['jain']:.3f}, busy {shown(row['busy'])}, {row['images_per_s']:.0f} images/s",
    )
    by_policy = {row["policy"]: row for row in rows}
    start = by_policy.get("fixed")
    if start is not None and row is not start:
        used = ""
        if row["utilisation"] is not None and start["utilisation"] is not None:
            points = 100 * (row["utilisation"] - start["utilisation"])
            used = f", utilisation {points:+.0f} points (bar +25)"
        split = by_policy.get("even", row)
        tell(
            args,
            f"  against the skewed start: largest slow-down "
            f"{100 * (row['max_slowdown'] / start['max_slowdown'] - 1):+.0f} % (bar -53 %){used}; "
            f"against an even split {100 * (row['max_slowdown'] / split['max_slowdown'] - 1):+.1f}"
            " % (bar +3 %)",
        )


# All of it.


def tell(args: argparse.Namespace, text: str) -> None:
    print(f"[{time.time() - args.begun:5.0f} s] {text}", flush=True)


def median_interval(values: list[float]) -> list[float]:
    """95 % interval of the median, from the order of the values."""
    ordered, n = sorted(values), len(values)
    low = max(math.floor((n - 1.96 * math.sqrt(n)) / 2), 0)
    return [ordered[low], ordered[n - 1 - low]]


def percent(values: Any) -> list[str]:
    return [f"{100 * value:+.1f}" for value in values]


def shown(busy: Any) -> str:
    if busy is None or (isinstance(busy, list) and None in busy):
        return "unknown (no NVML)"
    parts = busy if isinstance(busy, list) else [busy]
    return " ".join(f"{100 * part:.0f}" for part in parts) + " %"


def left_s(args: argparse.Namespace) -> float:
    return float(args.begun + args.budget - time.time())


def indices(gpus: str) -> list[int]:
    first, _, last = gpus.partition("-")
    return list(range(int(first), int(last or first) + 1))


def networks_of(args: argparse.Namespace) -> dict[str, int]:
    return TINY if args.tiny else NETWORKS


def write(args: argparse.Namespace, document: dict[str, Any]) -> None:
    args.out.write_text(json.dumps(document, indent=1))


def alone(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Each network alone, in processes of its own beside a daemon that does nothing."""
    machine = Machine(args, {}, folder)
    machine.serve("fixed")
    result = folder / "alone.json"
    own = ["--examine", "--gpus", args.gpus, "--result", str(result), "--begun", str(args.begun)]
    own += ["--endpoint", str(machine.endpoint), *(["--tiny"] if args.tiny else [])]
    own += ["--pairs", str(args.pairs), *(["--weighted"] if args.weighted else [])]
    own += ["--networks", *(args.networks or machine.networks)]
    launch = ["-m", "torch.distributed.run", "--standalone"]
    launch.append(f"--nproc-per-node={len(machine.gpus)}")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, machine.gpus))}
    environment.setdefault("OMP_NUM_THREADS", "4")
    process = subprocess.Popen([sys.executable, *launch, __file__, *own], env=environment)
    try:
        process.wait(args.alone_budget)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks
        process.wait(20.0)
    finally:
        machine.end()
    if process.returncode:
        tell(args, "the networks alone were not measured to the end")
    return json.loads(result.read_text()) if result.exists() else {}


def slices(args: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    """How networks share GPUs in time, in processes of their own; None if that failed."""
    script, result = Path(__file__).with_name("share_slices.py"), folder / "slices.json"
    command = [sys.executable, str(script), "--gpus", args.gpus, "--out", str(result)]
    command += ["--begun", str(args.begun), "--window", str(args.pair_window)]
    command += ["--budget", str(time.time() - args.begun + args.slices_budget)]
    done = subprocess.run([*command, *(["--tiny"] if args.tiny else [])])
    if done.returncode:
        tell(args, "the sharing of GPUs in time was not measured to its end")
    return json.loads(result.read_text()) if result.exists() else None


def losses(args: argparse.Namespace, document: dict[str, Any]) -> None:
    """Loss curves."""
    script = Path(__file__).with_name("share_losses.py")
    command = [sys.executable, str(script), "--ranks", str(len(indices(args.gpus))), "--json"]
    try:
        found = subprocess.run(
            [*command, *([] if args.tiny else ["--cuda"])],
            stdout=subprocess.PIPE,
            timeout=max(left_s(args), 1.0),
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        tell(args, f"loss curves: {type(error).__name__}")
        return
    document["losses"] = json.loads(found.stdout)["rows"]
    for row in document["losses"]:
        tell(
            args,
            f"loss curve, {row['case']}: largest difference to the plain run "
            f"{row['max_difference']:.1e} in {row['steps']} steps, {row['changes']} changes",
        )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gpus", default="0-1", help="0-1 or 0-3")
    parser.add_argument("--tiny", action="store_true", help="small networks, on a CPU")
    parser.add_argument("--parts", default="slices,policies,losses", help="besides alone")
    parser.add_argument("--networks", nargs="+", help="instead of all")
    parser.add_argument("--pairs", type=int, default=6, help="of blocks, for the overhead (6)")
    parser.add_argument("--weighted", action="store_true", help="overhead after uneven ratios, too")
    parser.add_argument("--policies", default="fixed,even,maxmin,thesis")
    parser.add_argument("--alone-budget", type=float, default=180.0, help="seconds for alone")
    parser.add_argument("--pair-window", type=float, default=2.5, help="seconds, in slices")
    parser.add_argument("--slices-budget", type=float, default=120.0, help="seconds for slices")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of each measurement")
    parser.add_argument("--adapt", type=float, default=30.0, help="seconds of a policy before that")
    parser.add_argument("--period", type=float, default=3.0, help="of the daemon, in seconds")
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("share.json"))
    for internal in ("--result", "--endpoint"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--train", dest="model", help=argparse.SUPPRESS)
    parser.add_argument("--global-batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--examine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, default=time.time(), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parsed()
    if args.model:
        train(args)
        return 0
    if args.examine:
        examine(args)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="kilter-share-"))
    label = "measured, CPU" if args.tiny else "measured"
    document = {"schema": "kilter.share-benchmark/2", "label": label, "gpus": args.gpus}
    parts = args.parts.split(",")
    document["alone"] = alone(args, folder)
    write(args, document)
    if "slices" in parts:
        document["slices"] = slices(args, folder)
        write(args, document)
    if "policies" in parts and document["alone"].keys() == networks_of(args).keys():
        share(args, document, folder)
    if "losses" in parts:
        losses(args, document)
    write(args, document)
    tell(args, f"wrote {args.out}; logs in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
