"""Shapes change in every iteration, in 100 of them."""

from __future__ import annotations

import torch
from seen import batch, layers, show_model

MMAP = True
RUN = ("memory", "all")


def main() -> None:
    model = layers(4)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(100):
        loss = model(batch(4096 + 8 * step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    show_model(model, losses)


if __name__ == "__main__":
    main()
