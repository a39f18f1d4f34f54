"""Batched gradients (vmap over backward) in every third iteration."""

import torch
from seen import DEVICE, batch, bits, layers, show, show_model, train
from torch import Tensor

RUN = ("recompute", "state")


def main() -> None:
    model = layers(4)
    seen = []

    def loss_of(step: int) -> Tensor:
        x = batch().requires_grad_()
        out = model(x)
        if step % 3 == 2:
            directions = torch.zeros(3, *out.shape, device=DEVICE)
            directions[0, 0], directions[1, 1], directions[2] = 1.0, 2.0, 0.1
            (found,) = torch.autograd.grad(
                out, x, directions, is_grads_batched=True, retain_graph=True
            )
            seen.append(bits(found))
        return out.square().mean()

    losses = train(model, loss_of)
    show(batched=seen)
    show_model(model, losses)


if __name__ == "__main__":
    main()
