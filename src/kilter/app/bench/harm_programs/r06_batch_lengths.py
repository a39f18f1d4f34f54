"""100 iterations whose batches all have other lengths."""

import random

from seen import batch, layers, show_model, train
from torch import Tensor

MMAP = True
RUN = ("memory", "all")
WITHIN_S = 500

model = layers(4)
lengths = random.Random(0)


def loss_of(step: int) -> Tensor:
    return model(batch(lengths.randrange(4096, 8192))).square().mean()


show_model(model, train(model, loss_of, steps=100))
