"""Some parameters updated by themselves end where the optimizer's step on all of them does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kilter.memory.engine.update import update

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1, fused=True),
    "maximized": lambda groups: torch.optim.AdamW(groups, lr=1e-2, maximize=True, fused=True),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True, fused=True),
    "tensor rate": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), fused=True),
    "not fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
}


def job(make: Make) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Two groups with rates of their own."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(7, i + 1)) for i in range(6)]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:4]},
        {"params": parameters[4:], "lr": 0.1},
    ]
    return parameters, make(groups)


def values(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [v for p in parameters for _, v in sorted(optimizer.state[p].items())]
    return [*(p.detach() for p in parameters), *(v for v in state if isinstance(v, torch.Tensor))]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_come_to_the_whole_step_bit_for_bit(kind: str) -> None:
    parameters, optimizer = job(KINDS[kind])
    pieces, other = job(KINDS[kind])
    groups = other.param_groups
    group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
    seen: list[str] = []
    other.register_step_post_hook(lambda *_: seen.append("a step"))
    for step in range(4):
        torch.manual_seed(step)
        gradients = [torch.randn_like(p) for p in parameters]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        for chosen in ((5, 3), (4, 1, 2), (0,)):  # the first two cross the groups
            for i in chosen:
                pieces[i].grad = gradients[i].clone()
            some = [pieces[i] for i in chosen]
            update(other, group_of, some, [p.grad for p in some])
            for p in some:
                p.grad = None
    assert other.param_groups is groups
    assert not seen
    found = zip(values(parameters, optimizer), values(pieces, other), strict=True)
    assert all(torch.equal(a, b) for a, b in found)
