"""How near `maxmin` comes to the best of all placements: five jobs on two simulated GPUs.

    python benchmarks/share_search.py [--draws 20] [--first 100]

Costs are those of five networks on an H100 ("Five networks on two GPUs" in
docs/measurements/sharing.md), each part times a random factor (a fifth, one standard deviation, of
its logarithm). The policy sees the true costs and decides from the skewed start until it moves
nothing; all 161,051 placements in tenths are the comparison. Label: simulated.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys

import msgspec
import numpy as np

from kilter.sharing.model import JobCost, alone_s, predict
from kilter.sharing.plan import maxmin
from kilter.sharing.plan.snapshot import SharedGpu, SharedJob, Snapshot, compositions, shards

NETWORKS = {
    "densenet121": (64, 50.0, 69.0, 1.0),
    "resnet50": (64, 36.2, 30.0, 2.0),
    "alexnet": (256, 15.6, 4.0, 1.5),
    "resnext50_32x4d": (64, 50.7, 30.0, 1.0),
    "shufflenet_v2_x1_0": (128, 19.4, 29.0, 1.0),
}
"""Global batch; ms of its kernels on one GPU, of the host, and of communication."""
SKEWED = [(10, 0), (10, 0), (10, 0), (5, 5), (0, 10)]


def drawn(seed: int) -> tuple[SharedJob, ...]:
    random = np.random.default_rng(seed)
    jobs = []
    for (name, (batch, *ms)), ratios in zip(NETWORKS.items(), SKEWED, strict=True):
        kernels, host, comm = 1e-3 * np.array(ms) * np.exp(0.2 * random.standard_normal(3))
        cost = JobCost(0.93 * kernels / batch, 0.07 * kernels, host, comm, on_gpu=True)
        alone = alone_s(cost, shards(batch, (5, 5)))
        jobs.append(SharedJob(name, batch, ratios, cost=cost, alone_s=alone))
    return tuple(jobs)


def largest(jobs: tuple[SharedJob, ...], placements: np.ndarray) -> np.ndarray:
    """Largest slow-down of each placement; they are indices into all ratios, by job."""
    table = np.array([[shards(j.global_batch, r) for r in compositions(2)] for j in jobs])
    samples = table[np.arange(len(jobs)), placements]
    steps = predict([job.cost for job in jobs if job.cost], samples).step_s
    return (steps / np.array([job.alone_s for job in jobs])).max(axis=1)


def found(jobs: tuple[SharedJob, ...]) -> tuple[tuple[SharedJob, ...], int]:
    """The jobs where the policy leaves them, and after how many decisions."""
    for decisions in range(10):
        made = {d.job: d.after for d in maxmin.policy(Snapshot((SharedGpu(),) * 2, jobs))}
        if not made:
            return jobs, decisions
        jobs = tuple(
            msgspec.structs.replace(job, ratios=made.get(job.name, job.ratios)) for job in jobs
        )
    raise SystemExit("the policy does not come to rest")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--first", type=int, default=100, help="seed of the first")
    args = parser.parse_args()
    every = np.array(list(itertools.product(range(11), repeat=len(NETWORKS))))
    gaps = []
    for seed in range(args.first, args.first + args.draws):
        jobs = drawn(seed)
        best = min(largest(jobs, part).min() for part in np.array_split(every, 20))
        at_end, decisions = found(jobs)
        places = [compositions(2).index(job.ratios) for job in at_end]
        mine = largest(jobs, np.array([places]))[0]
        gaps.append(mine / best - 1.0)
        print(f"{seed}: best {best:.2f}, maxmin {mine:.2f} ({100 * gaps[-1]:+.1f} %), "
              f"{decisions} decisions", flush=True)  # fmt: skip
    print(f"above the best: mean {100 * statistics.mean(gaps):.1f} %, median "
          f"{100 * statistics.median(gaps):.1f} %, largest {100 * max(gaps):.1f} %")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
