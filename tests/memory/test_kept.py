"""Tensors that nothing is done to: autograd holds them by hooks of ours, and the program sees no
difference, in what it computes and in what it is told about changes in place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from kilter.memory.engine.store import kept, read_kept


def change_of_a_leaf(x: Tensor) -> Tensor:
    y = (x * x).sum()
    with torch.no_grad():
        x.add_(1.0)
    return y


def change_of_a_result(x: Tensor) -> Tensor:
    y = x.exp()
    loss = y.sum()
    y.detach().mul_(2.0)
    return loss


def change_of_an_input(x: Tensor) -> Tensor:
    y = x * 2.0
    loss = y.square().sum()
    with torch.no_grad():
        y.mul_(3.0)
    return loss


@pytest.mark.parametrize("change", [change_of_a_leaf, change_of_a_result, change_of_an_input])
def test_a_change_in_place_is_told_in_the_frameworks_words(
    change: Callable[[Tensor], Tensor],
) -> None:
    told = []
    for hooks in (nullcontext(), saved_tensors_hooks(kept, read_kept)):
        x = torch.randn(4, 3, requires_grad=True)
        with hooks:
            loss = change(x)
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
        told.append((raised.type, str(raised.value)))
    assert told[0] == told[1]


def test_without_a_change_gradients_are_the_same() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    (plain,) = torch.autograd.grad((x.exp() * x).sum(), x)
    with saved_tensors_hooks(kept, read_kept):
        loss = (x.exp() * x).sum()
    (ours,) = torch.autograd.grad(loss, x)
    assert torch.equal(plain, ours)
