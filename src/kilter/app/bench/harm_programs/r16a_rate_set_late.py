"""The learning rate is set between backward and step, to another value from the 20th step on."""

from __future__ import annotations

import torch
from seen import batch, layers, show_model

RUN = ("memory", "state")


def main() -> None:
    model = layers(6, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(60):
        loss = model(batch(2048, 128)).square().mean()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-3 if step < 20 else 1e-3 * 0.98 ** (step - 20)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    show_model(model, losses)


if __name__ == "__main__":
    main()
