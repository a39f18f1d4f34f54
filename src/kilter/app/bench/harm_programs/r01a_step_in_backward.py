"""Each parameter's own optimizer steps inside backward (PyTorch's recipe)."""

import torch
from seen import batch, layers, show_model
from torch import Tensor

RUN = ("energy", "dry-run", "memory", "recompute", "state", "all", "govern")

model = layers()
optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}


def step(parameter: Tensor) -> None:
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
losses = []
for _ in range(20):
    loss = model(batch()).square().mean()
    loss.backward()
    losses.append(loss.detach())
show_model(model, losses)
print("trained for 20 iterations")
