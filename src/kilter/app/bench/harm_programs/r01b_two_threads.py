"""Two threads train a model each, with another model in the main thread."""

import threading

import torch
from seen import DEVICE, layers, show_model
from torch import Tensor, nn

RUN = ("energy", "memory", "all", "govern")


def train(model: nn.Module, seed: int, losses: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(30):
        loss = model(torch.randn(4096, 64, generator=generator).to(DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.detach())


models = [layers(4) for _ in range(3)]
losses: list[list[Tensor]] = [[], [], []]
jobs = list(zip(models, range(3), losses, strict=True))
threads = [threading.Thread(target=train, args=job) for job in jobs[1:]]
for thread in threads:
    thread.start()
train(*jobs[0])
for thread in threads:
    thread.join()
show_model(nn.ModuleList(models), [loss for each in losses for loss in each])
