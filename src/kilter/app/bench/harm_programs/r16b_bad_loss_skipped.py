"""A bad loss is met by `zero_grad(); continue` after backward, from the 25th step on."""

import torch
from seen import batch, layers, show_model

RUN = ("memory", "state")

model = layers(6, 128)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(60):
    loss = model(batch(2048, 128)).square().mean()
    if step >= 25 and step % 5 == 0:
        loss = loss * float("nan")
    loss.backward()
    losses.append(loss.detach())
    if not loss.isfinite():
        optimizer.zero_grad()
        continue
    optimizer.step()
    optimizer.zero_grad()
show_model(model, losses)
