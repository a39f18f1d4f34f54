"""Runs with standard input, output and error closed."""

from __future__ import annotations

import torch
from seen import batch, layers, show_model

RUN = ("energy", "memory")
CLOSE = (0, 1, 2)


def main() -> None:
    model = layers(4)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(30):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with open("notes.txt", "w") as file:
        print("the contents of the program's own file", file=file)
    show_model(model, losses)


if __name__ == "__main__":
    main()
