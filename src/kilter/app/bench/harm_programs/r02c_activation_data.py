"""Activations are scaled through `.data` between forward and backward."""

from __future__ import annotations

import torch
from seen import batch, layers, show_model
from torch import Tensor, nn
from torch.nn import functional

RUN = ("recompute", "all")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers(4)
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.held.clear()
        for block in self.inner:
            assert isinstance(block, nn.Sequential)
            x = block[0](x)
            self.held.append(x)
            x = functional.gelu(x) * 1.5
        return x


def main() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    for step in range(30):
        loss = net(batch()).square().mean()
        if step >= 10:
            for held in net.held:
                held.data.mul_(0.5)
        net.held.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    show_model(net, losses)


if __name__ == "__main__":
    main()
