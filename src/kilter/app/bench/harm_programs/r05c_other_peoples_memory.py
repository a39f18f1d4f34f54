"""Trains on memory of a bytearray, of shared memory, and of a file that torch maps."""

import numpy as np
import torch
from seen import DEVICE, layers, show, show_model, train
from torch import Tensor

RUN = ("memory", "recompute")

made = np.random.default_rng(0).standard_normal((3, 4 * 4096, 64), dtype=np.float32)
raw = bytearray(made[0].tobytes())
made[1].tofile("data.bin")


def data(which: int, step: int) -> Tensor:
    if which == 0:
        return torch.frombuffer(raw, dtype=torch.float32).reshape(4, 4096, 64)[step % 4].to(DEVICE)
    if which == 1:
        mapped = torch.from_file("data.bin", shared=True, size=4 * 4096 * 64)
        return mapped.reshape(4, 4096, 64)[step % 4].to(DEVICE)
    return shared.view(4, 4096, 64)[step % 4].to(DEVICE)


shared = torch.from_numpy(made[2].copy()).share_memory_()
model = layers(1)
losses = train(model, lambda step: model(data(step % 3, step)).square().mean(), steps=42)
show(bytearray_unharmed=bytes(raw) == made[0].tobytes())
show(shared_unharmed=bool((shared.numpy() == made[2]).all()))
show_model(model, losses)
