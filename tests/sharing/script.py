"""A training script as users write them, for tests: DDP or FSDP2 on gloo, some data, Adam.

The ranks print nothing; rank 0 writes the losses of the global batches and the final parameters.
"""

import argparse
import json
import os
import pickle

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--sampler", default="distributed")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=230)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--drop-last", action="store_true")
parser.add_argument("--batch-norm", action="store_true")
parser.add_argument("--sharded", action="store_true", help="by fully_shard instead of DDP")
parser.add_argument("--halves", action="store_true", help="two models, each in a DDP of its own")
parser.add_argument("--zero", action="store_true", help="optimizer state divided among the ranks")
parser.add_argument("--break-after", type=int)
parser.add_argument("--loader-per-epoch", action="store_true")
parser.add_argument("--sleep", type=float, default=0.0)
args = parser.parse_args()


class Data(TensorDataset):
    """Notes which samples were trained on."""

    def __getitem__(self, index):
        return (*super().__getitem__(index), index)


torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
data = Data(torch.randn(args.samples, 10), torch.randn(args.samples, 3))
norm = torch.nn.BatchNorm1d(16) if args.batch_norm else torch.nn.Identity()
net = torch.nn.Sequential(torch.nn.Linear(10, 16), norm, torch.nn.Tanh(), torch.nn.Linear(16, 3))
if args.sharded:
    from torch.distributed.fsdp import fully_shard

    fully_shard(net[0])
    model = fully_shard(net)
elif args.halves:
    model = torch.nn.Sequential(*(DistributedDataParallel(half) for half in (net[:2], net[2:])))
else:
    model = DistributedDataParallel(net)


def whole(parameter):
    return parameter.full_tensor() if args.sharded else parameter.detach()


if args.zero:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
averaged = net if args.sharded else AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.7)
if args.sampler == "distributed":
    sampler = DistributedSampler(data, shuffle=True, drop_last=args.drop_last)
    loader = DataLoader(
        data, args.batch, sampler=sampler, num_workers=args.workers, drop_last=args.drop_last
    )
else:
    sampler = None
    loader = DataLoader(data, args.batch, shuffle=True, drop_last=args.drop_last)
losses, seen, stale = [], [], []
for epoch in range(args.epochs):
    if sampler is not None:
        sampler.set_epoch(epoch)
    if args.loader_per_epoch:
        loader = DataLoader(data, args.batch, sampler=sampler)
    for step, (x, y, index) in enumerate(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if not args.sharded:
            averaged.update_parameters(net)
        losses.append(loss.item())
        seen.append(index.tolist())
        if args.sleep:
            __import__("time").sleep(args.sleep)
        if args.break_after is not None and step + 1 == args.break_after:
            break
    if not args.sharded:
        pickle.dumps(net)  # nothing of kilter's stays in a module
    # As a validation would, between the passes, on every rank.
    vector = torch.cat([whole(p).reshape(-1) for p in model.parameters()])
    everyone = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, vector)
    stale.append(max((other - vector).abs().max().item() for other in everyone))

result = {
    "parameters": torch.cat([whole(p).reshape(-1) for p in net.parameters()]).tolist(),
    "averaged": torch.cat([whole(p).reshape(-1) for p in averaged.parameters()]).tolist(),
    "buffers": [b.flatten().tolist() for b in net.buffers()],
    "lr": optimizer.param_groups[0]["lr"],
    "losses": losses,
    "seen": seen,
    "stale": stale,
    "rank": rank,
}
with open(os.path.join(args.out, f"rank{rank}.json"), "w") as file:
    json.dump(result, file)
dist.destroy_process_group()
