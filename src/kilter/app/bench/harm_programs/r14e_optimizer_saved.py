"""Pickles and copies the optimizer and its state in the middle of iterations."""

import copy
import pickle

import torch
from seen import batch, bits, layers, show, show_model, train

RUN = ("memory", "state")

model = layers(6, 128)
optimizer = torch.optim.AdamW(model.parameters())


def save(step: int) -> None:
    if step in (5, 15, 30, 35, 40):
        whole = pickle.dumps(optimizer)
        copied = copy.deepcopy(optimizer)
        for name, found in (("pickled", pickle.loads(whole)), ("copied", copied)):
            states = [found.state[p] for group in found.param_groups for p in group["params"]]
            show(**{f"{name} at {step}": bits(*(s["exp_avg_sq"] for s in states))})
        show(**{f"kilter in the pickle {step}": b"kilter" in whole})
        show(**{f"type of state at {step}": type(next(iter(optimizer.state.values()))).__name__})


losses = train(
    model,
    lambda step: model(batch(2048, 128)).square().mean(),
    optimizer=optimizer,
    steps=45,
    after=save,
)
show_model(model, losses)
