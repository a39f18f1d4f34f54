"""An average of the weights is taken between backward and step."""

from __future__ import annotations

import torch
from seen import batch, bits, layers, show, show_model

RUN = ("memory", "state")


def main() -> None:
    model = layers(6, 128)
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(60):
        loss = model(batch(2048, 128)).square().mean()
        loss.backward()
        if step >= 20:
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    show(average=bits(*average))
    show_model(model, losses)


if __name__ == "__main__":
    main()
