"""The training runs in a thread, and the main thread waits for it."""

from __future__ import annotations

import threading

import torch
from seen import batch, layers, show_model

RUN = ("energy", "memory", "govern")


def main() -> None:
    model = layers(4)
    losses = []

    def train() -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(30):
            loss = model(batch()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    show_model(model, losses)


if __name__ == "__main__":
    main()
