"""How networks share GPUs in time: each alone, every pair and all of them, on one GPU and on two.

    python benchmarks/share_slices.py --gpus 0-1 --out slices.json          GPUs (torchvision)
    python benchmarks/share_slices.py --gpus 0-1 --tiny --out slices.json   a CPU, in two minutes

One process for each network and GPU, as jobs have them; no kilter in them. The processes are told
by a file in memory which of them train: a whole batch on one GPU, half a batch, or the batch on
both GPUs under DDP. For each combination: step times, and how long the host takes to launch a step;
at last, from a profile of each network alone, the kernels of a step. Nothing is set on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from share_h200 import Network, begin_rank, indices, networks_of, pace

IDLE, WHOLE, HALF, BOTH, PROFILE_WHOLE, PROFILE_BOTH, END = range(7)
NAMES = {WHOLE: "whole", HALF: "half", BOTH: "both", PROFILE_WHOLE: "whole", PROFILE_BOTH: "both"}
COMMAND, LIMIT, STEPS = range(3)
"""Columns of the file in memory: what to do, the step at which to stop, the steps done."""
FOREVER = 2**60
PROFILED_STEPS = 5
READY, LOADING, STOPPED = 0, -1, -2
Kernel = tuple[str, float, float]


def work(args: argparse.Namespace) -> None:
    """One process."""
    import torch

    cuda = not args.network.startswith("tiny")
    rank, _ = begin_rank(cuda)
    batch = networks_of(args)[args.network]
    network = Network(args.network, batch, rank)
    row = board(args, "r+")[list(networks_of(args)).index(args.network), rank]
    lines = (args.folder / f"{args.network}.{rank}").open("w", buffering=1)
    whole, half = torch.arange(batch), torch.arange(batch // 2)

    def step(command: int) -> float:
        both = command in (BOTH, PROFILE_BOTH)
        shard = half if command == HALF or both else whole
        return network.step(shard, network.model if both else network.model.module)

    for command in (WHOLE, HALF, BOTH):  # kernels are loaded
        for _ in range(3):
            step(command)
    network.wait()
    row[STEPS] = READY
    while (command := int(row[COMMAND])) != END:
        if command == IDLE:
            row[STEPS] = READY
        if command == IDLE or row[STEPS] == STOPPED:
            time.sleep(0.001)
            continue
        marks, found = [], {}
        if command in (PROFILE_WHOLE, PROFILE_BOTH):
            found = profiled(lambda command=command: step(command), network)
        else:
            while row[STEPS] < row[LIMIT]:
                launched_s = step(command)
                marks.append((time.monotonic(), launched_s))
                row[STEPS] += 1
            network.wait()
        lines.write(json.dumps({"marks": marks, "profile": found}) + "\n")
        row[STEPS] = STOPPED


def profiled(step: Any, network: Network) -> dict[str, Any]:
    """The kernels of a step alone."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA] if network.cuda else None
    with torch.profiler.profile(activities=activities) as profile:
        begun_s = time.monotonic()
        for _ in range(PROFILED_STEPS):
            step()
        network.wait()
        took_s = time.monotonic() - begun_s
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = [
        (event["name"], 1e-6 * event["ts"], 1e-6 * event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    found = {"step_s": took_s / PROFILED_STEPS}
    for part, chosen in (
        ("all", kernels),
        ("nccl", [k for k in kernels if "nccl" in k[0].lower()]),
        ("other", [k for k in kernels if "nccl" not in k[0].lower()]),
    ):
        lengths = [length for _, _, length in chosen]
        found[part] = {
            "kernels": len(chosen) / PROFILED_STEPS,
            "sum_s": sum(lengths) / PROFILED_STEPS,
            "busy_s": covered_s(chosen) / PROFILED_STEPS,
            "mean_s": statistics.fmean(lengths) if lengths else None,
            "longest_s": max(lengths, default=None),
        }
    return found


def covered_s(kernels: list[Kernel]) -> float:
    """The time in which at least one runs."""
    covered, end = 0.0, 0.0
    for _, begin, length in sorted(kernels, key=lambda kernel: kernel[1]):
        covered += max(begin + length - max(begin, end), 0.0)
        end = max(end, begin + length)
    return covered


def board(args: argparse.Namespace, mode: str) -> Any:
    shape = (len(networks_of(args)), 2, 3)
    return np.memmap(args.folder / "board", dtype=np.int64, mode=mode, shape=shape)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.names = args, list(networks_of(args))
        self.gpus = indices(args.gpus)
        self.board = board(args, "w+")
        self.board[..., STEPS] = LOADING
        self.processes = [
            self._process(name, port, rank)
            for name, port in zip(self.names, free_ports(len(self.names)), strict=True)
            for rank in range(2)
        ]
        self.rows: list[dict[str, Any]] = []
        self.document: dict[str, Any] = {"rows": self.rows, "left_out": []}

    def _process(self, name: str, port: int, rank: int) -> subprocess.Popen[bytes]:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}
        where |= {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 2}
        where["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        command = [sys.executable, __file__, "--network", name, "--folder", str(self.args.folder)]
        command += ["--tiny"] if self.args.tiny else []
        environment = os.environ | {key: str(value) for key, value in where.items()}
        with (self.args.folder / f"{name}.{rank}.log").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def run(self) -> None:
        try:
            self.until(lambda: (self.board[..., STEPS] == READY).all(), 90.0)
            print(f"[{self.spent_s():5.0f} s] every process is ready", flush=True)
            for combination, length_s in self.combinations():
                if self.spent_s() + length_s + 3.0 > self.args.budget:
                    self.document["left_out"].append(str(combination))
                    continue
                self.measure(combination, length_s)
                self.args.out.write_text(json.dumps(self.document))
        finally:
            self.board[..., COMMAND] = END
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)
                process.kill()

    def combinations(self) -> Any:
        """Which processes (network, rank) do what, and for how long."""
        names, short_s, long_s = self.names, self.args.window / 2, self.args.window
        for name in names:
            yield {(name, 0): WHOLE, (name, 1): WHOLE}, short_s  # a reading on each GPU
        for name in names:
            yield {(name, 0): BOTH, (name, 1): BOTH}, short_s
        pairs = list(itertools.combinations(names, 2))
        half = (len(pairs) + 1) // 2
        for first, second in itertools.zip_longest(pairs[:half], pairs[half:]):
            both = [(pair, gpu) for gpu, pair in enumerate((first, second)) if pair is not None]
            yield {(name, gpu): WHOLE for pair, gpu in both for name in pair}, long_s
        for pair in pairs:
            yield {(name, rank): BOTH for name in pair for rank in range(2)}, long_s
        yield {(name, rank): WHOLE for name in names for rank in range(2)}, 2 * long_s
        yield {(name, rank): BOTH for name in names for rank in range(2)}, 2 * long_s
        for name in names:
            yield {(name, 0): HALF, (name, 1): HALF}, short_s
        for command in (PROFILE_WHOLE, PROFILE_BOTH):
            for name in names:
                yield {(name, 0): command, (name, 1): command}, 0.0

    def measure(self, combination: dict[tuple[str, int], int], length_s: float) -> None:
        rows = {
            (name, rank): self.board[self.names.index(name), rank] for name, rank in combination
        }
        for key, row in rows.items():
            row[LIMIT], row[COMMAND] = FOREVER, combination[key]
        if length_s:
            self.until(lambda: all(row[STEPS] >= 3 for row in rows.values()), 30.0)
        begin, seen_us = time.monotonic(), time.time_ns() // 1000
        time.sleep(length_s)
        end = time.monotonic()
        if length_s:
            for name in {name for name, _ in rows}:  # both ranks of a job stop at the same step
                mine = [rows[key] for key in rows if key[0] == name]
                last = max(int(row[STEPS]) for row in mine) + 5
                for row in mine:
                    row[LIMIT] = last
        self.until(lambda: all(row[STEPS] == STOPPED for row in rows.values()), 60.0)
        used = process_utilisation(self.gpus, seen_us) if length_s and not self.args.tiny else None
        for row in rows.values():
            row[COMMAND] = IDLE
        self.until(lambda: all(row[STEPS] == READY for row in rows.values()), 10.0)
        jobs = [self._job(key, combination[key], begin, end) for key in combination]
        self.rows.append({"jobs": jobs, "window_s": end - begin, "process_utilisation": used})
        tell = " ".join(f"{j['name']}/{j['gpu']}:{1e3 * j['step_s']:.2f}" for j in jobs)
        print(f"[{self.spent_s():5.0f} s] {jobs[0]['mode']} {tell} ms", flush=True)

    def _job(self, key: tuple[str, int], command: int, begin: float, end: float) -> dict[str, Any]:
        name, rank = key
        said = (self.args.folder / f"{name}.{rank}").read_text().splitlines()[-1]
        line = json.loads(said)
        job = {"name": name, "gpu": rank, "mode": NAMES[command]}
        if command in (PROFILE_WHOLE, PROFILE_BOTH):
            return job | {"profile": line["profile"], "step_s": line["profile"]["step_s"]}
        inside = [(at, launch) for at, launch in line["marks"] if begin < at <= end]
        gaps = np.diff([at for at, _ in inside])
        quantiles = np.quantile(gaps, (0.1, 0.5, 0.9)).tolist() if len(gaps) else None
        return job | {
            "step_s": 1.0 / pace([at for at, _ in inside], [1.0] * len(inside)),
            "launch_s": statistics.median(launch for _, launch in inside),
            "steps": len(inside),
            "step_quantiles_s": quantiles,
        }

    def spent_s(self) -> float:
        return time.time() - self.args.begun

    def until(self, condition: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = any(process.poll() for process in self.processes)
            if ended or time.monotonic() > deadline:
                for log in self.args.folder.glob("*.log"):
                    print(f"--- {log.name}\n{log.read_text()[-1500:]}", file=sys.stderr)
                raise SystemExit("a process has ended, or does not answer")
            time.sleep(0.001)


def process_utilisation(gpus: list[int], since_us: int) -> Any:
    """Of each GPU, by process: the mean of NVML's samples since a time, and how many."""
    import pynvml

    try:
        pynvml.nvmlInit()
        found = []
        for gpu in gpus:
            handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
            by_process: dict[int, list[int]] = {}
            for sample in pynvml.nvmlDeviceGetProcessUtilization(handle, since_us):
                by_process.setdefault(sample.pid, []).append(sample.smUtil)
            found.append({p: (statistics.fmean(s), len(s)) for p, s in by_process.items()})
    except pynvml.NVMLError as error:
        return str(error)
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in held]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gpus", default="0-1", help="two of them")
    parser.add_argument("--tiny", action="store_true", help="small networks, on a CPU")
    parser.add_argument("--window", type=float, default=3.0, help="seconds of each measurement")
    parser.add_argument("--budget", type=float, default=130.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("slices.json"))
    parser.add_argument("--begun", type=float, default=time.time(), help=argparse.SUPPRESS)
    parser.add_argument("--network", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.network:
        work(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="kilter-slices-") as folder:
        args.folder = Path(folder)
        Bench(args).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
