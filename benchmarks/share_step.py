"""What a shared job's step costs the host beside plain DDP, by part: two ranks, gloo, a small net.

    python benchmarks/share_step.py [--buckets 6] [--passes 12] [--weighted]

Processor time of the rank's own thread, in which a backward pass on a CPU runs as well: what other
programs do hardly counts. Plain and shared passes alternate in one process. The figures are medians
over steps; the parts are from passes of their own, less the time of taking the time. With
`--weighted` the ratio has been 7/3 and is 5/5 again, so that gradients go through kilter's hook.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import threading
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from kilter.session.fence import Fence
from kilter.sharing.elastic import groups, job, meter, share, state
from kilter.sharing.elastic.agreement import Listener, propose
from kilter.testing.forked import ForkedRanks

STEPS = 60
PARTS: dict[str, list[tuple[Any, str]]] = {
    "samples of the rank": [(job._Pass, "_next")],
    "  of which: looking for a proposal": [(Listener, "before")],
    "beginning of a step": [(job._Pass, "_advance")],
    "end of a step": [(job._Pass, "_end")],
    "  of which: running statistics": [(state.Buffers, "average")],
    "times of the step, with reports": [
        (meter.Meter, name) for name in ("begin", "work_done", "reduced", "end")
    ],
    "gradient hook, all buckets": [(groups.Reduction, "__call__"), (groups.Reduction, "_wait")],
    "optimizer hook": [(job.ElasticJob, "stepped")],
    "(plain DDP: running statistics)": [(DistributedDataParallel, "_sync_buffers")],
}


class Timer:
    """Time spent in functions, while it is on."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.own_s = min(self._pair() for _ in range(1000))

    def _pair(self) -> float:
        begun = time.thread_time()
        return time.thread_time() - begun

    def watch(self, part: str, holder: Any, name: str) -> None:
        function = getattr(holder, name, None)
        if function is None:
            return

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[part] += time.thread_time() - begun - self.own_s

        setattr(holder, name, timed)


class Job:
    def __init__(self, buckets: int) -> None:
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(buckets):
            layers += [torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU()]
        net = torch.nn.Sequential(*layers)
        self.model = DistributedDataParallel(net, bucket_cap_mb=0.02)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        data: Any = range(256 * STEPS)
        self.loader = DataLoader(data, 128, sampler=DistributedSampler(data), drop_last=True)
        self.pool = torch.randn(8, 64)

    def run(self, batches: Any, ended: Any = lambda: None) -> list[float]:
        steps, begun = [], time.thread_time()
        for _ in batches:
            self.optimizer.zero_grad()
            self.model(self.pool).sum().backward()
            self.optimizer.step()
            now = time.thread_time()
            steps.append(now - begun)
            begun = now
            ended()
        return steps[5:]


def worker(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    plain, shared = Job(args.buckets), Job(args.buckets)
    stores: list[Any] = []

    def attached(found: job.ElasticJob) -> None:
        assert found.share is not None
        stores.append(share.connect(found.share.address))

    elastic = job.ElasticJob(guard=Fence, may_idle=False, attached=attached, say=sys.exit)
    elastic.watch(shared.model)
    shared.optimizer.register_step_post_hook(
        lambda *_: elastic.guard.run(elastic.stepped, shared.optimizer)
    )

    def divided() -> Any:
        return elastic.batches(shared.loader, lambda: iter(shared.loader))

    shared.run(divided())
    for number, ratios in enumerate([(7, 3), (5, 5)] if args.weighted else [], start=1):
        if rank == 0:
            proposal = stores[0], number, ratios, 2
            threading.Thread(target=propose, args=proposal, daemon=True).start()
        in_force = [False]
        while not in_force[0]:
            shared.run(divided())
            in_force = [elastic.share.schedule.ratios()[-1:] == [ratios]]
            dist.broadcast_object_list(in_force)
        shared.run(divided())
    steps: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(args.passes):
        for kilter in (turn % 2 == 0, turn % 2 != 0):
            one = shared.run(divided()) if kilter else plain.run(iter(plain.loader))
            steps[kilter] += one
    medians = {kilter: statistics.median(each) for kilter, each in steps.items()}
    timer = Timer()
    for part, places in PARTS.items():
        for place in places:
            timer.watch(part, *place)
    rows: list[dict[str, float]] = []

    def ended() -> None:
        rows.append(dict(timer.spent))
        timer.spent.clear()

    for _ in range(args.passes // 2):
        shared.run(divided(), ended)
        plain.run(iter(plain.loader), ended)
    if rank == 0:
        more = medians[True] - medians[False]
        print(f"plain {1e6 * medians[False]:.0f} us, shared {1e6 * medians[True]:.0f} us a step")
        print(f"more: {1e6 * more:+.0f} us, {100 * more / medians[False]:+.1f} %")
        for part in PARTS:
            seen = [row[part] for row in rows if part in row]
            if seen:
                print(
                    f"{part}: median {1e6 * statistics.median(seen):.1f} us, "
                    f"mean {1e6 * statistics.mean(seen):.1f} us"
                )
    dist.barrier()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=int, default=6)
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--weighted", action="store_true")
    args = parser.parse_args()
    return max(map(abs, ForkedRanks(2, worker, args).wait()))


if __name__ == "__main__":
    sys.exit(main())
