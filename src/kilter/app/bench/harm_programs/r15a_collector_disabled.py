"""Switches the garbage collector off and on in the middle of forward."""

import gc

import torch
from seen import batch, layers, show, show_model

RUN = ("memory", "state")

model = layers()
optimizer = torch.optim.AdamW(model.parameters())
losses = []
enabled: list[bool] = []
for step in range(30):
    x = batch()
    for number, block in enumerate(model):
        x = block(x)
        if number == 3 and step % 3 == 1:
            gc.disable()
        if number == 3 and step % 3 == 2:
            gc.enable()
    loss = x.square().mean()
    enabled.append(gc.isenabled()) if step % 3 else None
    loss.backward()
    enabled.append(gc.isenabled()) if step % 3 == 1 else None
    optimizer.step()
    optimizer.zero_grad()
    del x
    enabled.append(gc.isenabled())
    losses.append(loss.detach())
show(enabled=enabled, thresholds=gc.get_threshold())
show_model(model, losses)
