"""Two processes that share gradients: state streams in each, and the numbers are plain's."""

from __future__ import annotations

from pathlib import Path

from kilter.testing.warm_python import WarmPython

PROGRAM = """
import os, sys, warnings
from contextlib import nullcontext
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from kilter.memory.engine import CpuStandIn
from kilter.memory.engine.state import StateMover
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

def local(value):
    return getattr(value, "_local_tensor", value).detach().clone()

def trained(sharded, governed):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(33, 33) for _ in range(5)))
    if sharded:
        for layer in net:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(net, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with governed or nullcontext():
        for number in range(7):
            torch.manual_seed(2 * number + rank)
            model(torch.randn(4, 33)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if governed is not None:
            assert governed.report().offloaded_bytes > 0
            assert not governed.report().consuming
    found = [local(p) for p in net.parameters()]
    for state in optimizer.state.values():
        found += [local(state["exp_avg"]), local(state["exp_avg_sq"])]
    return found

for sharded in (False, True):
    sizes = dict(room_bytes=12_000, bucket_bytes=2000, min_bytes=256)
    mover = StateMover(CpuStandIn(), link=LINK, gradients="consume", **sizes)
    assert all(map(torch.equal, trained(sharded, None), trained(sharded, mover)))
dist.destroy_process_group()
"""


def test_two_processes(tmp_path: Path, warm: WarmPython) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    ranks = warm.run_ranks(2, (str(file), str(tmp_path / "store")), cwd=tmp_path)
    assert [rank.returncode for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
