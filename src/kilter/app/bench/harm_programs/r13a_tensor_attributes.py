"""A custom Function reads attributes of its tensors from `ctx.saved_tensors` in backward."""

from typing import Any

import torch
from seen import layers, show, show_model, train
from torch import Tensor, nn

RUN = ("memory", "recompute", "govern")
notes: list[str] = []


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        x.note = f"mean {x.mean().item():.6f}"
        out = x * scale
        ctx.save_for_backward(x, scale, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, out = ctx.saved_tensors
        notes.append(str(getattr(x, "note", None)))
        notes.append(f"{x.requires_grad} {x.is_leaf} {type(x.grad_fn).__name__}")
        notes.append(f"{out.requires_grad} {type(out.grad_fn).__name__} {x._version}")
        return gradients[0] * scale, (gradients[0] * x).sum(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = layers(4)
        self.scale = nn.Parameter(torch.ones(64, device=next(self.blocks.parameters()).device))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Noted.apply(block(x), self.scale)
        return x


model = Net()
losses = train(model)
show(notes=notes)
show_model(model, losses)
