"""A rank of two that asks, at the very end, for the interpreter's lock in a thread, as threads of
gloo do: `last_thread_worker.py STORE RANK`. Prints whether the thread had it."""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kilter.session.fence import Fence
from kilter.sharing.elastic.job import ElasticJob
from kilter.sharing.elastic.scripts import find_in_script

store, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
job = ElasticJob(guard=Fence, may_idle=False)
find_in_script(job)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(10, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(32, 10))
for (x,) in DataLoader(data, 4, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
assert job.share is not None
dist.destroy_process_group()

released = threading.Lock()
released.acquire()


def drop():
    with released:
        time.sleep(0.003)  # and to ask for it again
        os.write(1, b"the thread had the lock\n")


threading.Thread(target=drop, daemon=True).start()
sys.setswitchinterval(1000.0)  # a thread gets the lock only where another waits
released.release()
