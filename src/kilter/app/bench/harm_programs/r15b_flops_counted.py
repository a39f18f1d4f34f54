"""Counts the FLOPs of every iteration with `FlopCounterMode`."""

import torch
from seen import batch, layers, show, show_model
from torch.utils.flop_counter import FlopCounterMode

RUN = ("memory", "recompute")

model = layers()
optimizer = torch.optim.AdamW(model.parameters())
losses = []
flops = []
for _ in range(30):
    with FlopCounterMode(display=False) as counter:
        loss = model(batch()).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    flops.append(counter.get_total_flops())
    losses.append(loss.detach())
show(flops=flops)
show_model(model, losses)
