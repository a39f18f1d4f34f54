"""Forward-mode derivatives beside backward in every iteration."""

import warnings

import torch
from seen import batch, bits, layers, show, show_model
from torch.autograd import forward_ad

RUN = ("recompute", "state")


def main() -> None:
    warnings.simplefilter("ignore")
    model = layers(4)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    seen = []
    for _ in range(30):
        x = batch()
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(x, torch.ones_like(x)))
            loss = out.square().mean()
            tangent = forward_ad.unpack_dual(loss).tangent
            seen.append(bits(tangent))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(forward_ad.unpack_dual(loss).primal.detach())
    show(tangents=seen)
    show_model(model, losses)


if __name__ == "__main__":
    main()
