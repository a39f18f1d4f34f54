"""A training on the CPU whose iteration has a long stretch that computes and one that moves memory.

    kilter run --operations --device sim:h200 examples/operations.py

Matrix products first, then Adam. It prints a hash of its losses and parameters.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn

WIDTH, LAYERS, SAMPLES = 1200, 10, 1024
"""14.4 million parameters."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    samples = torch.randn(SAMPLES, WIDTH)
    seen = hashlib.sha256()
    for _ in range(args.iterations):
        optimizer.zero_grad()
        loss = model(samples).square().mean()
        loss.backward()
        optimizer.step()
        seen.update(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        seen.update(parameter.detach().numpy().tobytes())
    print(seen.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
