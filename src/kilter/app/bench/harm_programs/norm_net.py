"""A network with layer norms of all kinds, which the rows about pickles and copies train."""

from __future__ import annotations

from collections.abc import Callable

import torch
from seen import DEVICE, batch, show_model
from torch import Tensor, nn

AT = (0, 3, 7, 12, 20)
"""Iterations in whose middle, between forward and backward, the program does its thing."""


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norms = nn.ModuleList(
            nn.LayerNorm(64, elementwise_affine=number % 2 == 0) for number in range(4)
        )
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.to(DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = nn.functional.gelu(linear(norm(x)))
        return x


def train(do: Callable[[nn.Module, int], None]) -> None:
    """30 iterations; `do` is called in the middle of some, and after the last."""
    model = NormNet()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(30):
        loss = model(batch()).square().mean()
        if step in AT:
            do(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    do(model, 30)
    show_model(model, losses)
