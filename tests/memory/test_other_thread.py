"""Programs that train in threads of their own."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

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


TWO = """
import threading
import torch
from torch import nn


def train(net, first, then):
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(40):
        first.acquire()
        loss = net(torch.ones(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        then.release()
        if first is engine:
            print(loss.item())


torch.manual_seed(0)
nets = [
    nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(64, 64), nn.GELU()))) for _ in range(2)
]
engine, other = threading.Semaphore({ahead}), threading.Semaphore(0)
threads = [
    threading.Thread(target=train, args=(net, *pair))
    for net, pair in zip(nets, ((engine, other), (other, engine)))
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def governed(source: str, tmp_path: Path, warm: WarmPython) -> dict[str, Any]:
    """What the report says of the memory of a program that prints what it prints plainly."""
    program = tmp_path / "train.py"
    program.write_text(source)
    plain = warm.run([str(program)])
    own = ("-m", "kilter.testing.stand_in", "--card", "--min-bytes", "4096", "--bytes-per-s", "3e9")
    options = ("--memory-budget", "60%", "--out", str(tmp_path / "run"))
    done = warm.run([*own, "run", *options, str(program)])
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    memory: dict[str, Any] = json.loads((tmp_path / "run" / "report.json").read_text())["memory"]
    return memory


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_engine_decides_where_iterations_end_in_another_thread(
    ahead: int, tmp_path: Path, warm: WarmPython
) -> None:
    """The thread with the engine is always ahead of another one that trains as well."""
    report = governed(TWO.format(ahead=ahead), tmp_path, warm)
    assert report["planned"] > 10
    assert report["within"] is not False


TRIALS = """
import threading
import torch
from torch import nn


def train(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(64, 64), nn.GELU())))
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(40):
        loss = net(torch.randn(64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())


for seed in range(3):
    thread = threading.Thread(target=train, args=(seed,))
    thread.start()
    thread.join()
"""


def test_a_thread_that_trains_after_another_has_ended_is_governed_as_well(
    tmp_path: Path, warm: WarmPython
) -> None:
    report = governed(TRIALS, tmp_path, warm)
    assert report["passes"] > 110  # of the first thread there are 40
    assert report["planned"] > 60
    assert report["within"] is not False
