"""A script with the three lines of `kilter.share`; no daemon is there."""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import kilter
from kilter.core.errors import UsageError
from kilter.testing.ratio_plan import RatioPlan

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--ratios")
parser.add_argument("--two-nodes", action="store_true", help="each rank is on a node of its own")
args = parser.parse_args()
if args.two_nodes:
    os.environ["LOCAL_WORLD_SIZE"] = "1"

torch.manual_seed(0)
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(90, 4), torch.randn(90, 1))
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
refused = []


def refuses(model, **numbers):
    try:
        kilter.share(model, optimizer, **numbers)
    except UsageError as error:
        refused.append(str(error))


refuses(net, global_batch=16)
dist.init_process_group("gloo")
model = DistributedDataParallel(net)
refuses(net, global_batch=16)
refuses(model, global_batch=1)
refuses(model, global_batch=16, ratios=(9, 9))
refuses(model, global_batch=16, ratios=(10, 0))
refuses(fully_shard(torch.nn.Linear(4, 1)), global_batch=16, idle_ranks=True)
ratios = None if args.ratios is None else tuple(map(int, args.ratios.split(",")))
share = kilter.share(
    model,
    optimizer,
    global_batch=16,
    total_steps=40,
    ratios=ratios,
    endpoint=args.out / "none.json",
)
loader = share.loader(data)
plan = RatioPlan([] if ratios is None else [ratios])
shapes = []
for _ in range(20):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        shapes.append(len(x))
        plan.keep_pace(share.job)
found = {
    "parameters": [p.flatten().tolist() for p in net.parameters()],
    "shapes": shapes,
    "refused": refused,
    "host": share.job.share.address[0],
}
(args.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
dist.destroy_process_group()
