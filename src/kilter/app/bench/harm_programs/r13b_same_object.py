"""A custom Function gets the very tensors that it saved, while the program holds them."""

from typing import Any

import torch
from seen import batch, layers, show, show_model, train
from torch import Tensor

RUN = ("memory", "recompute")
held: list[Tensor] = []
same: list[bool] = []


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        held.append(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        same.append(x is held.pop())
        return gradients[0] * x.cos()


model = layers(4)


def loss_of(step: int) -> Tensor:
    x = batch()
    for block in model:
        x = Held.apply(block(x))
    return x.square().mean()


losses = train(model, loss_of)
show(same=same)
show_model(model, losses)
