"""Tensors that are saved for a backward that never comes: they leave on demand, and nothing else
has to make room for them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.plan.problem import H200_PCIE5
from kilter.testing.warm_python import WarmPython

WIDTH, ROWS = 64, 128
LARGEST_BYTES = 2 * ROWS * 2 * WIDTH * 4

PROGRAM = """
import sys
import torch
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm({width}), nn.Linear({width}, 2 * {width})
        self.down = nn.Linear(2 * {width}, {width})

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


net = nn.Sequential(*(Block() for _ in range(8)))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(40):
    loss = net(torch.randn({rows}, {width})).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
    del loss
    print(net(torch.randn(2 * {rows}, {width})).square().mean().item())  # no_grad() was forgotten
print(sum(parameter.double().sum() for parameter in net.parameters()).item())
"""


def test_an_evaluation_that_has_forgotten_no_grad(tmp_path: Path, warm: WarmPython) -> None:
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM).format(width=WIDTH, rows=ROWS))
    plain = warm.run([str(program)])
    own = ("-m", "kilter.testing.stand_in", "--card", "--min-bytes", "4096", "--bytes-per-s", "3e7")
    options = (
        "--memory-budget",
        "50%",
        "--recompute",
        "operations",
        "--out",
        str(tmp_path / "run"),
    )
    done = warm.run([*own, "run", *options, str(program)])
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())["memory"]
    # The stand-in lets a tensor leave when the next one is saved.
    assert report["peak_bytes"] <= report["budget_bytes"] + LARGEST_BYTES
    assert report["state"] == ""
    assert "cannot be met" not in done.stderr
    assert "passes save tensors that their own backward does not need" in done.stderr


def test_a_job_with_passes_that_have_no_backward_settles() -> None:
    """Else no line says that the plan is in force, and no other way is compared."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with Swapper(
        CpuStandIn(), budget_bytes=4 * ROWS * WIDTH * 4, link=H200_PCIE5, min_bytes=1024
    ) as swapper:
        for _ in range(16):
            net(torch.randn(ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            net(torch.randn(ROWS // 2, WIDTH))
        report = swapper.report()
    assert len(report.plans) == 2
    assert report.settled


def beside_a_kept_graph(rows: int, swapper: Swapper | None) -> tuple[list[torch.Tensor], int]:
    """Parameters and gradients. Each sixth iteration keeps the graph of so many rows, and goes back
    through it before the next one is kept; passes under a plan since the 30th."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    # Its steps end passes, and change nothing that the kept graph has read.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    kept, found, before = [], [], 0
    for number in range(60):
        net(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        found += [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        if number % 6 == 4 and kept:
            kept.pop().backward()
            found += [p.grad.clone() for p in net.parameters()]
            net.zero_grad()
        if number % 6 == 5:
            kept.append(net(torch.randn(rows, WIDTH)).square().mean())
            optimizer.step()
        if swapper is not None and number == 30:
            before = swapper.report().planned
    return found, 0 if swapper is None else swapper.report().planned - before


@pytest.mark.parametrize("rows", [2 * ROWS, ROWS])
def test_passes_beside_a_kept_graph_keep_their_plan_where_its_tensors_lie_elsewhere(
    rows: int,
) -> None:
    """Those of one as large as the others lie in the host memory of the plans."""
    plain, _ = beside_a_kept_graph(rows, None)
    with Swapper(
        CpuStandIn(), budget_bytes=6 * ROWS * WIDTH * 4, link=H200_PCIE5, min_bytes=1024
    ) as swapper:
        governed, planned = beside_a_kept_graph(rows, swapper)
        reasons = [reason.code for reason in swapper.report().refused]
    assert all(map(torch.equal, plain, governed))
    assert (planned >= 24) == (rows != ROWS)
    assert ("older_graph" in reasons) == (rows == ROWS)


def test_a_retained_graph_that_is_back_on_the_device_keeps_no_pass_from_its_plan() -> None:
    """As in a loop whose variable for the loss lives until the next one."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with Swapper(
        CpuStandIn(), budget_bytes=12 * ROWS * WIDTH * 4, link=H200_PCIE5, min_bytes=1024
    ) as swapper:
        for _ in range(30):
            loss = net(torch.randn(ROWS, WIDTH)).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        report = swapper.report()
    assert report.planned > 15
    assert report.out_bytes > 0
