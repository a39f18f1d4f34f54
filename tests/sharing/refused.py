"""Scripts whose ratio cannot be changed, by name: each has to train on as without kilter."""

import argparse
import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from ranks import ENDED

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("kind")
kind = parser.parse_args().kind
ACCUMULATE = ("no-sync", "accumulation")
LATE = ("no-sync-late", "several-loaders-late", "wrapped-late")
PASSES = 2 if kind in LATE else 1

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.barrier()  # a rank that trains by itself could be over before the other one has connected
rank = dist.get_rank()
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data)


class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        while True:
            yield from range(64)


class Reversed(torch.utils.data.Sampler):
    """An own sampler, which is fine: every rank has its half."""

    def __iter__(self):
        return iter(range(63 - rank, -1, -2))

    def __len__(self):
        return 32


net = torch.nn.Linear(4, 1)
if kind == "ignored-params":
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net, ignored_params={net.bias})
elif kind == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
else:
    model = net if kind == "no-ddp" else DistributedDataParallel(net)
if kind == "comm-hook":
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model.register_comm_hook(None, allreduce_hook)
if kind == "an-error-of-ours":
    from kilter.sharing.elastic import job

    def broken(*_, **__):
        raise ValueError("no state")

    job.RankState = broken
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
another = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.01)
if kind == "ranks-disagree" and rank == 1:
    torch.optim.lr_scheduler.StepLR(optimizer, 5)
if kind == "iterable-dataset":
    loader = DataLoader(Stream(), 4)
elif kind == "endless-sampler":
    loader = DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(Endless(), 4, True))
elif kind == "own-sampler":
    loader = DataLoader(data, 4, sampler=Reversed())
elif kind == "small-batch":
    loader = DataLoader(data, 1)
else:
    loader = DataLoader(data, 4)


def ahead(batches):
    """Draws each batch before the one before it is trained on."""
    batches = iter(batches)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


def beside(batches):
    for batch, other in zip(batches, DataLoader(data, 4), strict=True):
        yield [torch.cat(both) for both in zip(batch, other, strict=True)]


batches = loader
if kind == "drawn-ahead":
    batches = ahead(loader)
elif kind == "several-loaders":
    batches = beside(loader)
elif kind == "cycle":
    batches = itertools.islice(itertools.cycle(loader), 16)


def passes():
    global model
    for number in range(PASSES):
        if number and kind == "wrapped-late":
            model = DistributedDataParallel(net)
        yield from batches


loss_of = torch.nn.MSELoss()
source, drawn = passes(), []
steps = 0
for step, (x, y) in enumerate(iter(lambda: drawn.pop() if drawn else next(source, None), None)):
    if kind == "several-loaders-late" and step == 8:
        x, y = next(iter(DataLoader(data, 4)))
    waits = (kind in ACCUMULATE and step % 2 == 0) or (kind == "no-sync-late" and step == 8)
    if waits and kind != "accumulation":
        with model.no_sync():
            loss_of(model(x), y).backward()
    else:
        loss = loss_of(model(x), y)
        if kind == "drawn-before-backward":
            drawn.append(next(source, None))
        loss.backward()
    if waits:
        continue
    if kind == "drawn-ahead":
        another.step()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if step == 16 * PASSES - 1:
        break
steps += kind == "no-sync-late"
assert steps == (8 if kind in (*ACCUMULATE, "own-sampler") else 16 * PASSES)
dist.destroy_process_group()
print(ENDED, file=sys.stderr, flush=True)
