"""Scripts layer norms and a whole model with `torch.jit.script` in the middle of iterations."""

import warnings

import torch
from norm_net import train
from seen import DEVICE, bits, show
from torch import nn

RUN = ("memory", "recompute")


def script(model: nn.Module, step: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(model.norms[0], model.norms[1]))
    with torch.no_grad():
        found = scripted(torch.ones(4, 64, device=DEVICE))
    show(**{f"scripted at {step}": bits(found)})


if __name__ == "__main__":
    train(script)
