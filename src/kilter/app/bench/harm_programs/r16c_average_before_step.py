"""An average of the weights is taken between backward and step."""

import torch
from seen import batch, bits, layers, show, show_model, train

RUN = ("memory", "state")

model = layers(6, 128)
average = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def take_average(step: int) -> None:
    if step >= 20:
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)


losses = train(
    model,
    lambda step: model(batch(2048, 128)).square().mean(),
    optimizer=optimizer,
    steps=60,
    before_step=take_average,
)
show(average=bits(*average))
show_model(model, losses)
