"""The loss curve of a job whose data ratio changes, against the same job without kilter.

    python benchmarks/share_losses.py [--ranks 3] [--epochs 6] [--json] a CPU, gloo
    python benchmarks/share_losses.py --ranks 2 --cuda [--json]         GPUs, NCCL (torchvision)

Forked ranks. The ratio changes about every seven steps; ranks are idle and come back.
The loss of a step is the mean over the global batch. Models: without BatchNorm under Adam and
gradient clipping with a learning rate by step, under SGD with momentum and a gradient scaler, with
a learning rate by epoch; and with BatchNorm, where the curve differs by construction, because each
rank normalises with the statistics of its own samples. On GPUs also AlexNet (without dropout, whose
masks belong to shards) and ResNet-18 (with BatchNorm) on images, in full single precision: TF32
rounds by how a shard is computed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kilter.session.fence import Fence
from kilter.sharing.elastic.job import ElasticJob
from kilter.testing import forked
from kilter.testing.ratio_plan import RatioPlan

PLANS = {
    2: [(7, 3), (10, 0), (2, 8), (0, 10), (5, 5), (9, 1)],
    3: [(4, 3, 3), (6, 4, 0), (0, 5, 5), (10, 0, 0), (2, 2, 6), (0, 0, 10), (3, 4, 3)],
}
CASES = ("adam, clipping, by step", "sgd, scaler", "adamw, layernorm, by epoch", "batchnorm")
CUDA_CASES = ("alexnet", "resnet18, batchnorm")
SAMPLES = 576


def problem(case: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor, Any]:
    """Network, inputs, targets, loss."""
    if case in CUDA_CASES:
        from torchvision import models

        small = {"alexnet": lambda: models.alexnet(num_classes=10, dropout=0.0)}
        net = small.get(case, lambda: models.resnet18(num_classes=10))()
        x, y = torch.randn(SAMPLES, 3, 224, 224), torch.randint(10, (SAMPLES,))
        return net, x, y, torch.nn.functional.cross_entropy
    x = torch.randn(SAMPLES, 16)
    y = torch.tanh(x @ torch.randn(16, 4)) + 0.1 * torch.randn(SAMPLES, 4)
    return network(case), x, y, torch.nn.functional.mse_loss


def network(case: str) -> torch.nn.Module:
    norm: torch.nn.Module = torch.nn.Identity()
    if "layernorm" in case:
        norm = torch.nn.LayerNorm(32)
    if "batchnorm" in case:
        norm = torch.nn.BatchNorm1d(32)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), norm, torch.nn.Tanh(), torch.nn.Linear(32, 4)
    )


def train(
    case: str, plan: list[tuple[int, ...]], device: torch.device, epochs: int
) -> tuple[dict[int, float], int, int]:
    """This rank's part of the loss of each step, how often the ratio changed, and the steps in
    which this rank was idle. Without a plan, as without kilter."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    net, x, y, loss_of = problem(case)
    x, y = x.to(device), y.to(device)
    model = DistributedDataParallel(net.to(device))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if "sgd" in case or case in CUDA_CASES:
        rate = 0.05 if "sgd" in case else 0.005
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if "adamw" in case:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 17 if "by step" in case else 2, 0.7)
    scaler = torch.amp.GradScaler(device.type, 256.0, growth_interval=9, enabled="scaler" in case)
    batch = 24 // world
    data = TensorDataset(torch.arange(SAMPLES))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader: DataLoader[Any] = DataLoader(data, batch, sampler=sampler)
    ratios = RatioPlan(plan)
    job = ElasticJob(
        guard=Fence, may_idle=True, release=True, attached=ratios.attached, say=sys.exit
    )
    if plan:
        job.watch(model)
        job.others += [scheduler, scaler]
        optimizer.register_step_post_hook(lambda *_: job.guard.run(job.stepped, optimizer))
    losses: dict[int, float] = {}
    steps = offset = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (index,) in job.batches(loader, lambda: iter(loader)) if plan else loader:
            inputs, targets = x[index.to(device)], y[index.to(device)]
            if job.share is not None and not offset:
                offset = steps
            step = steps if job.share is None else job.share.iteration + offset
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if "clipping" in case:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            ratios.keep_pace(job)
            if "by step" in case:
                scheduler.step()
            losses[step] = loss.item() * len(inputs) / (batch * world)
            steps += 1
        if "by step" not in case:
            scheduler.step()
    ratios.end()
    changes = 0 if job.share is None else len(job.share.schedule.ratios())
    return losses, changes, epochs * SAMPLES // (batch * world) - steps


def curve(
    case: str, plan: list[tuple[int, ...]], device: torch.device, epochs: int
) -> tuple[list[float], int, int]:
    """The loss of the global batch, step by step; changes of the ratio; idle steps of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, train(case, plan, device, epochs))
    steps = epochs * SAMPLES // 24
    whole = [sum(losses.get(step, 0.0) for losses, _, _ in found) for step in range(steps)]
    return whole, found[0][1], sum(idle for _, _, idle in found)


def rank(number: int, out: Path, cuda: bool, epochs: int) -> None:
    rows, plan = [], PLANS[dist.get_world_size()]
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False
    for case in (*CASES, *CUDA_CASES) if cuda else CASES:
        solo, _, _ = curve(case, [], device, epochs)
        again, _, _ = curve(case, [], device, epochs)
        shared, changes, idle = curve(case, plan, device, epochs)
        rows.append(
            {
                "case": case,
                "steps": len(solo),
                "changes": changes,
                "idle_steps": idle,
                "first_loss": solo[0],
                "last_loss": solo[-1],
                "repeats_within": max(abs(a - b) for a, b in zip(solo, again, strict=True)),
                "max_difference": max(abs(a - b) for a, b in zip(solo, shared, strict=True)),
                "mean_difference": sum(b - a for a, b in zip(solo, shared, strict=True))
                / len(solo),
            }
        )
    if number == 0:
        out.write_text(json.dumps({"schema": "kilter.bench-share-losses/1", "rows": rows}))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=PLANS, default=3, help="(3)")
    parser.add_argument("--cuda", action="store_true", help="on GPUs, one for each rank")
    parser.add_argument("--epochs", type=int, default=6, help="of 24 steps each (6)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    backend = "cpu:gloo,cuda:nccl" if args.cuda else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        given = out, args.cuda, args.epochs
        if any(forked.ForkedRanks(args.ranks, rank, *given, backend=backend).wait()):
            return 1
        text = out.read_text()
    if args.json:
        print(text)
        return 0
    print(f"{'job':<28} steps  changes  idle  loss first, last  largest difference  mean")
    for row in json.loads(text)["rows"]:
        print(
            f"{row['case']:<28} {row['steps']:>5}  {row['changes']:>7}  {row['idle_steps']:>4}  "
            f"{row['first_loss']:.4f}, {row['last_loss']:.4f}    {row['max_difference']:.1e}"
            f"             {row['mean_difference']:+.1e}"
        )
    print(f"[measured, {'GPUs, NCCL' if args.cuda else 'CPU, gloo'}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
