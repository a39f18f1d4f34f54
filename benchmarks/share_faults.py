"""Faults of a shared machine: jobs and daemons that come, go, hang and are killed.

    python benchmarks/share_faults.py --minutes 5            real jobs, gloo on a CPU
    python benchmarks/share_faults.py --simulated-hours 10   30 jobs in virtual time

The real part forks a daemon, which draws a new data ratio for each job every second, and jobs of
two ranks (`kilter.share`, ranks may be idle). At random moments a rank, a job or the daemon is
killed, or a job is stopped for a time or for good. As torchrun does, the other ranks of a job that
has lost one are ended. Checked: every other job ends by itself, with each sample of each pass used
exactly once and the same parameters on all ranks. The simulated part checks each decision (ten
tenths, on GPUs of the machine, memory kept) and that every job has done all of its samples.
Prints one JSON object; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import kilter
from kilter.core.reasons import Reason
from kilter.sharing.daemon import Daemon
from kilter.sharing.model import JobCost
from kilter.sharing.plan.policies import SHARING_POLICIES
from kilter.sharing.plan.snapshot import (
    Decision,
    JobMemory,
    Snapshot,
    allowed,
    compositions,
    shards,
)
from kilter.sharing.simulate import PLACEMENT_SCHEMA, JobSpec, Machine, simulate
from kilter.testing import forked

GPUS = (0, 1)
SAMPLES, BATCH = 240, 16
MOST_JOBS, JOBS = 3, 30
FAULTS = ("none", "none", "kill-rank", "kill-job", "kill-daemon", "pause", "hang")
GRACE_S, END_S = 10.0, 180.0


def job(rank: int, file: Path, out: Path, passes: int, pause_s: float) -> None:
    """One rank of a job. Writes what it has trained on."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 1), torch.arange(SAMPLES))
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    share = kilter.share(
        model, optimizer, global_batch=BATCH, idle_ranks=True, name=out.name, endpoint=file
    )
    loader = share.loader(data)
    seen: list[int] = []
    for _ in range(passes):
        for x, y, index in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            seen += index.tolist()
            time.sleep(pause_s)
    elastic = share.job.share
    found = {
        "seen": seen,
        "parameters": [p.flatten().tolist() for p in net.parameters()],
        "ratios": [] if elastic is None else elastic.schedule.ratios(),
    }
    out.with_suffix(f".{rank}").write_text(json.dumps(found))


class Churn:
    """Jobs and a daemon, and what has happened to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.file = folder / "endpoint.json"
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._started = 0
        self._jobs: dict[Path, tuple[forked.ForkedRanks, int]] = {}
        self._ended: dict[int, int] = {}
        self._doomed: dict[Path, float] = {}
        self._paused: dict[Path, float] = {}
        self._daemon = self._serve()

    def _serve(self) -> int:
        return forked.fork(_serve, self.file)

    def turn(self, starts: bool) -> bool:
        """A moment of the machine. Whether anything still runs."""
        self._reap()
        now = time.monotonic()
        for out, due in list(self._doomed.items()):
            if now > due:
                self._signal(out, signal.SIGKILL)
        for out, due in list(self._paused.items()):
            if now > due:
                self._signal(out, signal.SIGCONT)
                del self._paused[out]
        if starts and len(self._jobs) < MOST_JOBS and self._started < JOBS:
            self._start()
        elif starts and self._jobs:
            self._fault(self.random.choice(FAULTS))
        return bool(self._jobs)

    def _start(self) -> None:
        out = self.folder / f"job{self._started}"
        self._started += 1
        passes, pause_s = self.random.randint(4, 16), self.random.uniform(0.005, 0.03)
        ranks = forked.ForkedRanks(len(GPUS), job, self.file, out, passes, pause_s)
        self._jobs[out] = ranks, passes
        self.counts["jobs"] += 1

    def _fault(self, fault: str) -> None:
        out = self.random.choice(list(self._jobs))
        pids = [pid for pid in self._jobs[out][0].pids if pid not in self._ended]
        if fault == "kill-daemon":
            os.kill(self._daemon, signal.SIGKILL)
            os.waitpid(self._daemon, 0)
            self._daemon = self._serve()
        elif fault == "none" or out in self._doomed or out in self._paused or not pids:
            return
        elif fault == "kill-job":
            self._doomed[out] = 0.0
        elif fault == "pause":
            self._signal(out, signal.SIGSTOP)
            self._paused[out] = time.monotonic() + 3.0
        else:
            kills = fault == "kill-rank"
            os.kill(self.random.choice(pids), signal.SIGKILL if kills else signal.SIGSTOP)
            self._doomed[out] = time.monotonic() + GRACE_S
        self.counts[fault] += 1

    def _signal(self, out: Path, number: int) -> None:
        for pid in self._jobs[out][0].pids if out in self._jobs else ():
            if pid not in self._ended:
                os.kill(pid, number)

    def _reap(self) -> None:
        for out, (ranks, passes) in list(self._jobs.items()):
            for pid in ranks.pids:
                if pid not in self._ended and os.waitpid(pid, os.WNOHANG)[0]:
                    self._ended[pid] = 1
            if all(pid in self._ended for pid in ranks.pids):
                del self._jobs[out]
                if self._doomed.pop(out, None) is None:
                    self._check(out, passes)

    def _check(self, out: Path, passes: int) -> None:
        files = [out.with_suffix(f".{rank}") for rank in range(len(GPUS))]
        if not all(file.exists() for file in files):
            self.wrong.append(f"{out.name}: ended early")
            return
        found = [json.loads(file.read_text()) for file in files]
        used = collections.Counter(index for rank in found for index in rank["seen"])
        if used != dict.fromkeys(range(SAMPLES), passes):
            self.wrong.append(f"{out.name}: samples lost or used twice")
        if found[0]["parameters"] != found[1]["parameters"]:
            self.wrong.append(f"{out.name}: parameters differ between the ranks")
        ratios = found[0]["ratios"]
        self.counts["ended whole"] += 1
        self.counts["samples"] += used.total()
        self.counts["changes of a ratio"] += len(ratios)
        self.counts["times with an idle rank"] += sum(0 in each for each in ratios)

    def end(self) -> None:
        """Whatever still runs hangs."""
        for out in list(self._jobs):
            if out not in self._doomed:
                self.wrong.append(f"{out.name}: hangs")
            self._signal(out, signal.SIGKILL)
        os.kill(self._daemon, signal.SIGKILL)


def _serve(file: Path) -> None:
    """A daemon that gives every job another ratio each second: many more changes than a policy
    makes that means well."""
    draw = random.Random(os.getpid())

    def anything(snapshot: Snapshot) -> tuple[Decision, ...]:
        decisions = []
        for job in snapshot.jobs:
            ratios = draw.choice(compositions(len(GPUS)))
            if ratios != job.ratios and allowed(snapshot, job, ratios):
                reason = Reason("random", job.name, "drawn")
                decisions.append(Decision(job.name, job.ratios, ratios, reason))
        return tuple(decisions)

    SHARING_POLICIES["fixed"] = anything
    Daemon(file, GPUS, "fixed", 1.0).serve(lambda: False)


def real(minutes: float, seed: int) -> dict[str, object]:
    """Jobs and faults at random for some minutes."""
    __import__("torch.nn.parallel")  # once, for all that are forked
    with tempfile.TemporaryDirectory() as folder:
        churn = Churn(Path(folder), seed)
        deadline = time.monotonic() + minutes * 60
        while time.monotonic() < deadline:
            churn.turn(starts=True)
            time.sleep(churn.random.uniform(0.5, 3.0))
        deadline = time.monotonic() + END_S
        while churn.turn(starts=False) and time.monotonic() < deadline:
            time.sleep(0.2)
        churn.end()
    return {"label": "measured", "minutes": minutes, **churn.counts, "wrong": churn.wrong}


def simulated(hours: float, seed: int, policy: str) -> dict[str, object]:
    """Jobs that join and leave at random on 4 simulated GPUs."""
    draw = random.Random(seed)
    room = 80 * 2**30
    jobs = []
    for i in range(JOBS):
        cost = JobCost(
            draw.uniform(2e-4, 3e-3), draw.uniform(0, 0.02), draw.uniform(0, 0.02),
            draw.uniform(0, 0.02),
        )  # fmt: skip
        steps = int(draw.uniform(0.1, 1.0) * 3600 / (cost.sample_s * 32 + 0.03))
        memory = JobMemory(draw.randint(1, 16) * 2**30, draw.randint(10, 100) * 2**20)
        arrival_s = draw.uniform(0, hours * 3600)
        jobs.append(JobSpec(f"job{i}", 128, steps, cost, arrival_s, memory=memory))
    machine = Machine(PLACEMENT_SCHEMA, 4, tuple(jobs), room, 60.0, 0.02, seed)
    outcome = simulate(machine, SHARING_POLICIES[policy])
    wrong = [
        f"{made.decision.job} at {made.t_s:.0f} s: {made.decision.after}"
        for made in outcome.decisions
        if sum(made.decision.after) != 10 or min(made.decision.after) < 0
    ]
    memory_of = {job.name: job.memory for job in jobs}
    for stretch in outcome.stretches:
        for g in range(machine.gpus):
            need = sum(
                memory.bytes_at(shards(128, ratios)[g])
                for name, ratios in stretch.ratios.items()
                if ratios[g] and (memory := memory_of[name]) is not None
            )
            if need > room:
                wrong.append(f"GPU {g} at {stretch.begin_s:.0f} s: {need} bytes")
    done = {result.name: result.samples for result in outcome.jobs}
    wrong += [job.name for job in jobs if done.get(job.name) != job.total_steps * job.global_batch]
    return {
        "label": "simulated",
        "hours": outcome.makespan_s / 3600,
        "policy": policy,
        "jobs": len(done),
        "decisions": len(outcome.decisions),
        "max_slowdown": max(outcome.slowdowns),
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, metavar="N", help="of real jobs")
    parser.add_argument("--simulated-hours", type=float, metavar="N")
    parser.add_argument("--policy", choices=SHARING_POLICIES, default="maxmin")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args()
    if args.minutes is None and args.simulated_hours is None:
        parser.error("give --minutes, --simulated-hours, or both")
    rows = []
    if args.minutes is not None:
        rows.append(real(args.minutes, args.seed))
    if args.simulated_hours is not None:
        rows.append(simulated(args.simulated_hours, args.seed, args.policy))
    print(json.dumps({"schema": "kilter.bench-share-faults/1", "rows": rows}))
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
