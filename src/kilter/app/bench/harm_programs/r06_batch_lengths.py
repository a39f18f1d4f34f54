"""100 iterations whose batches all have other lengths."""

from __future__ import annotations

import random

import torch
from seen import batch, layers, show_model

MMAP = True
RUN = ("memory", "all")
WITHIN_S = 500


def main() -> None:
    model = layers(4)
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = random.Random(0)
    losses = []
    for _ in range(100):
        loss = model(batch(lengths.randrange(4096, 12_000))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    show_model(model, losses)


if __name__ == "__main__":
    main()
