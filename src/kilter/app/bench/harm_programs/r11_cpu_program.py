"""Trains on the CPU only, on a machine that has a GPU: the GPU's settings are left alone."""

import time

import torch
from seen import bits, show
from torch import nn

RUN = ("nvml",)

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(300):
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
show(parameters=bits(*model.parameters()))
