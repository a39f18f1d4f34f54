"""The training of the rows that read optimizer state as a dictionary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from seen import batch, bits, layers, show, show_model
from torch import Tensor

State = dict[str, Any]


def train(read: Callable[[State], State]) -> None:
    """40 iterations; from the 25th on, `read` is given the state of each parameter in turn."""
    model = layers(6, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    losses = []
    found: list[Tensor] = []
    for step in range(40):
        loss = model(batch(2048, 128)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step >= 25:
            parameter = parameters[step % len(parameters)]
            state = read(optimizer.state[parameter])
            found += [value.clone() for name, value in sorted(state.items()) if name != "step"]
    show(state=bits(*found))
    show_model(model, losses)
