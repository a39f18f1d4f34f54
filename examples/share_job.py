"""A small training job for `examples/share.py`: unmodified DDP, as a user writes it.

Every rank stays on one CPU core, which stands for one GPU: jobs on the same core slow each other
down, as jobs on the same GPU do.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})

data = TensorDataset(torch.randn(4096, 64), torch.randn(4096, 8))
net = torch.nn.Sequential(
    torch.nn.Linear(64, args.width),
    torch.nn.Tanh(),
    torch.nn.Linear(args.width, args.width),
    torch.nn.Tanh(),
    torch.nn.Linear(args.width, 8),
)
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=128, sampler=sampler)
epochs = max(1, args.steps // len(loader))
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
