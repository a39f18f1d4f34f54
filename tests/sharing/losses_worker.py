"""Jobs with losses of many kinds, and with accumulated gradients: without kilter and at changing
shares. `losses_worker.py OUT` writes, by kind: the largest difference of a loss of a global batch
and of a parameter, how often the ratio changed, and what kilter said."""

import itertools
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, kl_div, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kilter.session.fence import Fence
from kilter.sharing.elastic.job import ElasticJob
from kilter.testing import forked
from kilter.testing.ratio_plan import RatioPlan

PLAN = [(7, 3), (4, 6), (9, 1)]
PASSES = 3


def of_parameters(net):
    return sum(parameter.pow(2).sum() for parameter in net.parameters())


LOSSES = {
    "sum": lambda out, y, net: mse_loss(out, y, reduction="sum"),
    "sum by a constant": lambda out, y, net: mse_loss(out, y, reduction="sum") / 8,
    "sum by samples": lambda out, y, net: mse_loss(out, y, reduction="none").sum() * (1 / len(y)),
    "batchmean": lambda out, y, net: kl_div(
        out.log_softmax(1), y.softmax(1), reduction="batchmean"
    ),
    "mean and sum": lambda out, y, net: mse_loss(out, y) + 0.1 * out.pow(2).sum() / 8,
    "mean, then sum": lambda out, y, net: mse_loss(out, y, reduction="none").mean(0).sum(),
    "weight decay": lambda out, y, net: mse_loss(out, y) + 1e-2 * of_parameters(net),
    "smoothed": lambda out, y, net: cross_entropy(out, y.argmax(1), label_smoothing=0.1),
    "weighted": lambda out, y, net: cross_entropy(
        out, y.argmax(1), weight=torch.tensor([0.1, 1.0, 5.0])
    ),
    "largest": lambda out, y, net: (out - y).abs().max(),
    "norm": lambda out, y, net: (out - y).norm(),
    "contrastive": lambda out, y, net: cross_entropy(out @ out.T, torch.arange(len(y))),
    "negatives from the batch": lambda out, y, net: cross_entropy(out @ y.T, torch.arange(len(y))),
}
WITHIN = ("in the model, beside outputs", "in the model, alone")
"""The loss is computed, and returned, by the model."""
ACCUMULATED = {
    # How many batches make a step, from which on, and whether the others are not summed up.
    "accumulated": (2, 0, True),
    "accumulated later": (3, 17, True),
    "accumulated later, summed up each time": (3, 17, False),
    "sharded, accumulated later": (2, 17, True),
}


class WithLoss(torch.nn.Module):
    def __init__(self, net, alone):
        super().__init__()
        self.net, self.alone = net, alone

    def forward(self, x, y):
        out = self.net(x)
        loss = mse_loss(out, y)
        return loss if self.alone else {"logits": out, "loss": loss}


def train(kind, shared):
    """Parameters and, for each step, loss and samples of this rank; changes; what was said."""
    torch.manual_seed(0)
    said = []
    data = TensorDataset(torch.randn(220, 4), torch.randn(220, 3))
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    sharded = kind.startswith("sharded")
    if kind in WITHIN:
        whole = WithLoss(net, kind.endswith("alone"))
        model = DistributedDataParallel(whole, find_unused_parameters=True)
    else:
        model = fully_shard(net) if sharded else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-3 if kind == "sum" else 0.02, momentum=0.9
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    plan, steps = RatioPlan(PLAN), []
    job = ElasticJob(guard=Fence, may_idle=False, attached=plan.attached, say=said.append)
    if shared:
        job.watch(model)
        optimizer.register_step_post_hook(lambda *_: job.guard.run(job.stepped, optimizer))
    of_step, begin, unsynced = ACCUMULATED.get(kind, (1, 0, False))
    number = itertools.count()
    for epoch in range(PASSES):
        sampler.set_epoch(epoch)
        for x, y in job.batches(loader, lambda: iter(loader)) if shared else loader:
            batch = next(number)
            last = batch < begin or (batch - begin) % of_step == of_step - 1
            if sharded:
                model.set_requires_gradient_sync(last)
            waits = unsynced and not last and not sharded
            with model.no_sync() if waits else nullcontext():
                if kind in WITHIN:
                    out = model(x, y)
                    loss = out["loss"] if isinstance(out, dict) else out
                else:
                    loss = LOSSES.get(kind, lambda out, y, net: mse_loss(out, y))(model(x), y, net)
                torch.autograd.backward([loss if batch < begin else loss / of_step])
            if last:
                optimizer.step()
                optimizer.zero_grad()
            plan.keep_pace(job)
            steps.append((loss.item(), len(x)))
    plan.end()
    changes = len(job.share.schedule.ratios()) if job.share is not None else 0
    whole = [p.full_tensor() if sharded else p for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]), steps, changes, said


def curve(steps):
    """The loss of each global batch, as a mean over its samples."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, steps)
    for of_ranks in zip(*everyone, strict=True):
        yield sum(loss * n for loss, n in of_ranks) / sum(n for _, n in of_ranks)


def worker(rank, out):
    found = {}
    for kind in (*LOSSES, *WITHIN, *ACCUMULATED):
        alone, steps_alone, _, _ = train(kind, False)
        parameters, steps, changes, said = train(kind, True)
        pairs = zip(curve(steps_alone), curve(steps), strict=True)
        found[kind] = {
            "loss": max(abs(a - b) for a, b in pairs),
            "parameter": (alone - parameters).abs().max().item(),
            "changes": changes,
            "said": said,
        }
    if rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    codes = forked.ForkedRanks(2, worker, sys.argv[1]).wait()
    sys.exit(max(map(abs, codes)))
