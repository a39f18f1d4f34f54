"""The training of the rows that read optimizer state as a dictionary."""

from collections.abc import Callable
from typing import Any

import seen
import torch
from torch import Tensor

State = dict[str, Any]


def train(read: Callable[[State], State]) -> None:
    """40 iterations; from the 25th on, `read` is given the state of each parameter in turn."""
    model = seen.layers(6, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    found: list[Tensor] = []

    def look(step: int) -> None:
        if step >= 25:
            state = read(optimizer.state[parameters[step % len(parameters)]])
            found.extend(value.clone() for name, value in sorted(state.items()) if name != "step")

    losses = seen.train(
        model,
        lambda step: model(seen.batch(2048, 128)).square().mean(),
        optimizer=optimizer,
        steps=40,
        after=look,
    )
    seen.show(state=seen.bits(*found))
    seen.show_model(model, losses)
