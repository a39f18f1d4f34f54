"""A DDP job on gloo in which rank 1 comes late to every exchange, so that rank 0 waits.

    torchrun --standalone --nproc-per-node 2 tests/session/gloo_program.py --late-s 0.25

Every rank prints a hash of its losses and parameters. `--more-from N` has a second exchange in
every iteration from N on; with `--busy` the late rank computes for as long as it would else have
slept.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--late-s", type=float, default=0.25)
    parser.add_argument("--more-from", type=int)
    parser.add_argument("--busy", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
    matrix = torch.eye(256)

    seen = hashlib.sha256()
    torch.manual_seed(rank)
    for step in range(args.iterations):
        optimizer.zero_grad()
        loss = parallel(torch.randn(64, 256)).square().mean()
        if rank == 1 and args.busy:
            until_s = time.monotonic() + args.late_s
            while time.monotonic() < until_s:
                torch.mm(matrix, matrix)
        elif rank == 1:
            time.sleep(args.late_s)
        loss.backward()
        if args.more_from is not None and step >= args.more_from:
            dist.all_reduce(torch.ones(1024))
        optimizer.step()
        seen.update(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        seen.update(parameter.detach().numpy().tobytes())
    print(f"rank {rank}: {seen.hexdigest()}", flush=True)
    # DDP's reducer, as the last to hold the process group, would free it under Python's lock, for
    # which the group's own thread may be waiting: PyTorch then hangs, now and then.
    del parallel
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
