"""The learning rate is set between backward and step, to another value from the 20th step on."""

import torch
from seen import batch, layers, show_model, train

RUN = ("memory", "state")

model = layers(6, 128)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def set_rate(step: int) -> None:
    optimizer.param_groups[0]["lr"] = 1e-3 if step < 20 else 1e-3 * 0.98 ** (step - 20)


losses = train(
    model,
    lambda step: model(batch(2048, 128)).square().mean(),
    optimizer=optimizer,
    steps=60,
    before_step=set_rate,
)
show_model(model, losses)
