"""Shapes change in every iteration, and a budget that is a share: is the share ever decided?"""

import sys

import torch
from seen import batch, layers, show

EXPECT = {"exit": 0, "share decided": True}


def train() -> None:
    model = layers(4)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(120):
        model(batch(4096 + 8 * step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    import jobs

    from kilter.core.events import Moved

    done = jobs.governed(__file__, "--memory-budget", "60%")
    moved = [event for event in jobs.events() if isinstance(event, Moved)][-1]
    show(**{"exit": done.returncode, "share decided": moved.budget_bytes is not None})


if __name__ == "__main__":
    train() if sys.argv[1:] else main()
