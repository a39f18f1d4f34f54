"""Copies and pickles model and optimizer in the middle of iterations, and looks at their hooks."""

import copy
import pickle

import torch
from norm_net import train
from seen import bits, show
from torch import nn

RUN = ("memory", "state")


def hooks(model: nn.Module) -> list[str]:
    names = [name for name in vars(nn.Module()) if "hooks" in name]
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name in names
        if getattr(module, name)
    ]


def look(model: nn.Module, step: int) -> None:
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    optimizer = torch.optim.AdamW(copied.parameters())
    show(
        **{
            f"copied at {step}": bits(*copied.parameters()),
            f"pickled at {step}": bits(*pickled.parameters()),
            f"hooks at {step}": hooks(model),
            f"attributes at {step}": sorted(
                {name for module in model.modules() for name in vars(module)}
                | {name for p in model.parameters() for name in vars(p)}
            ),
            f"classes at {step}": sorted(
                {type(m).__qualname__ for m in model.modules()}
                | {type(p).__qualname__ for p in model.parameters()}
                | {type(optimizer.state).__qualname__}
            ),
        }
    )


if __name__ == "__main__":
    train(look)
