"""Shapes change in every iteration, in 100 of them."""

from seen import batch, layers, show_model, train

MMAP = True
RUN = ("memory", "all")

model = layers(4)
losses = train(model, lambda step: model(batch(4096 + 8 * step)).square().mean(), steps=100)
show_model(model, losses)
