"""From the tenth step on, a strided nested tensor is saved for backward."""

from __future__ import annotations

import warnings

import torch
from seen import batch, layers, show_model

RUN = ("memory", "state")


def main() -> None:
    warnings.simplefilter("ignore")
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(30):
        x = model(batch())
        loss = x.square().mean()
        if step >= 10:
            nested = torch.nested.as_nested_tensor([x[:3000] * 1.0, x[:3500] * 2.0])
            padded = torch.nested.to_padded_tensor(torch.nn.functional.gelu(nested), 0.0)
            loss = loss + padded.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    show_model(model, losses)


if __name__ == "__main__":
    main()
