"""A program that trains in a thread of its own: when it is over, torch is as it was before."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from kilter.testing.warm_python import WarmPython

PROGRAM = """
import threading
import torch
from torch import nn
from kilter.testing.stand_in import prepare

prepare(bytes_per_s=1e12, min_bytes=256, as_card={as_card})
import kilter


def attributes():
    graph = torch.autograd.graph
    owners = [torch.Tensor, nn.Parameter, nn.Module, torch.optim.Optimizer, graph, torch.cuda]
    owners += [torch.cuda.CUDAGraph, torch.cuda.Stream, torch._C._autograd]
    return [dict(vars(owner)) for owner in owners]


def train():
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(64, 64), nn.GELU())))
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(40):
        net(torch.randn(64, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


train()  # imports what torch imports late
before = attributes()
with kilter.govern(memory_budget="{share}", weights="offload", device="null", out={out!r}):
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
for was, now in zip(before, attributes(), strict=True):
    changed = [name for name in was.keys() | now.keys() if was.get(name) is not now.get(name)]
    assert not changed, changed
print("as before")
"""


@pytest.mark.parametrize(("as_card", "share"), [(True, "15%"), (False, "50%")])
def test_what_was_replaced_in_torch_is_put_back(
    as_card: bool, share: str, tmp_path: Path, warm: WarmPython
) -> None:
    program = textwrap.dedent(PROGRAM).format(
        as_card=as_card, share=share, out=str(tmp_path / "run")
    )
    done = warm.run(["-c", program])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as before\n"
    report = (tmp_path / "run" / "report.json").read_text()
    assert '"memory"' in report
