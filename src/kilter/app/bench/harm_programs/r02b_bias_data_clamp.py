"""Biases are clamped through `.data` between forward and backward, from the tenth step on."""

from __future__ import annotations

import torch
from branches import Branches
from seen import batch, show_model

RUN = ("recompute", "all")


def main() -> None:
    model = Branches()
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(30):
        loss = model(batch()).square().mean()
        if step >= 10:
            for bias in biases:
                bias.data.clamp_(-0.05, 0.05)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    show_model(model, losses)


if __name__ == "__main__":
    main()
