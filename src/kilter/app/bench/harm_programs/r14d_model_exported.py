"""Exports the model with `torch.export` in the middle of iterations."""

import copy

import torch
from norm_net import train
from seen import DEVICE, bits, show
from torch import nn

RUN = ("memory", "recompute")


def export(model: nn.Module, step: int) -> None:
    if step not in (12, 30):  # it takes seconds
        return
    x = torch.ones(16, 64, device=DEVICE)
    exported = torch.export.export(copy.deepcopy(model), (x,))
    names = [node.name for node in exported.graph.nodes]
    show(**{f"graph at {step}": names})
    with torch.no_grad():
        show(**{f"result at {step}": bits(exported.module()(x))})


if __name__ == "__main__":
    train(export)
