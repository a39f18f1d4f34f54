"""Trains on a memory-mapped file that it may write to."""

import numpy as np
import torch
from seen import DEVICE, layers, show_model, train
from torch import Tensor

RUN = ("memory", "recompute")

made = np.random.default_rng(0).standard_normal((4, 4096, 64), dtype=np.float32)
made.tofile("data.bin")
data = np.memmap("data.bin", dtype=np.float32, mode="r+", shape=made.shape)
model = layers(1)


def loss_of(step: int) -> Tensor:
    return model(torch.from_numpy(data)[step % 4].to(DEVICE)).square().mean()


losses = train(model, loss_of, steps=40)
data.flush()
show_model(model, losses)
