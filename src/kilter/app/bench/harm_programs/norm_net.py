"""A network with layer norms of all kinds, which the rows about pickles and copies train."""

from collections.abc import Callable

import seen
import torch
from torch import Tensor, nn

AT = (0, 3, 7, 12, 20)
"""In the middle of these iterations, between forward and backward, the program does its thing."""


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norms = nn.ModuleList(
            nn.LayerNorm(64, elementwise_affine=number % 2 == 0) for number in range(4)
        )
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.to(seen.DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = nn.functional.gelu(linear(norm(x)))
        return x


def train(do: Callable[[nn.Module, int], None]) -> None:
    """30 iterations; `do` is called in the middle of some, and after the last."""
    model = NormNet()
    losses = seen.train(model, middle=lambda step: do(model, step) if step in AT else None)
    do(model, 30)
    seen.show_model(model, losses)
