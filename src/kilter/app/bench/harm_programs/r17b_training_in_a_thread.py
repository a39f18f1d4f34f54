"""The training runs in a thread, and the main thread waits for it."""

import threading

import torch
from seen import layers, show_model, train

RUN = ("energy", "memory", "govern")

model = layers(4)
losses: list[torch.Tensor] = []
thread = threading.Thread(target=lambda: losses.extend(train(model)))
thread.start()
thread.join()
show_model(model, losses)
