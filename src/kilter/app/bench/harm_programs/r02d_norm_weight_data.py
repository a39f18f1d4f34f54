"""The shift of layer norms is changed through `.data` between forward and backward."""

import torch
from seen import DEVICE, show_model, train
from torch import nn

RUN = ("recompute", "all")

torch.manual_seed(1)
blocks = (nn.Sequential(nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)) for _ in range(5))
model = nn.Sequential(*blocks).to(DEVICE)
norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


def shift(step: int) -> None:
    if step >= 10:
        for norm in norms:
            norm.bias.data.add_(0.1)


optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
show_model(model, train(model, optimizer=optimizer, middle=shift))
