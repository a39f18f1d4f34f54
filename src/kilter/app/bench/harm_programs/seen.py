"""What a program saw, written where the bench reads it: one line of JSON for each fact."""

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable
from types import FrameType

import torch
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_SPEC = importlib.util.find_spec("kilter")  # does not import it: a plain program does not, either
KILTER = os.path.join(os.path.dirname(str(_SPEC and _SPEC.origin)), "")


def show(**facts: object) -> None:
    """Note facts that have to be the same with and without kilter."""
    with open(os.environ["HARM_SEEN"], "a") as file:
        for name, value in facts.items():
            file.write(json.dumps([name, value]) + "\n")


def bits(*tensors: Tensor | None) -> str:
    """A hash of the very bits of tensors, with their types and shapes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
            continue
        found = tensor.detach().cpu().contiguous()
        digest.update(f"{found.dtype} {tuple(found.shape)}".encode())
        digest.update(found.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def layers(depth: int = 6, width: int = 64) -> nn.Sequential:
    """A small network; with 4096 rows each of its activations has a MiB."""
    torch.manual_seed(1)
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
    return nn.Sequential(*blocks).to(DEVICE)


def batch(rows: int = 4096, width: int = 64) -> Tensor:
    return torch.randn(rows, width).to(DEVICE)


def train(
    model: nn.Module,
    loss_of: Callable[[int], Tensor] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 30,
    middle: Callable[[int], object] = lambda step: None,
    before_step: Callable[[int], object] = lambda step: None,
    after: Callable[[int], object] = lambda step: None,
) -> list[Tensor]:
    """The usual loop, and its losses. Each row says what it does otherwise: `loss_of` a step, or
    something between forward and backward (`middle`), `before_step`, or `after` an iteration."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(steps):
        loss = model(batch()).square().mean() if loss_of is None else loss_of(step)
        middle(step)
        loss.backward()
        before_step(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        after(step)
    return losses


def show_model(model: nn.Module, losses: Iterable[Tensor] = ()) -> None:
    """Parameters and losses, bit by bit. Gradients are not mentioned: in code that mentions them,
    kilter leaves them alone."""
    parameters = list(model.parameters())
    show(
        parameters=bits(*parameters),
        losses=bits(*losses),
        finite=all(bool(p.isfinite().all()) for p in parameters),
    )


def is_of_kilter(filename: str) -> bool:
    """Whether a file is in kilter's package. The folder above may have any name, also "kilter"."""
    return filename.startswith(KILTER)


def is_inside_kilter(frame: FrameType | None, program: str) -> bool:
    """A signal has interrupted a function of kilter that the program has called."""
    while frame is not None and frame.f_code.co_filename != program:
        if is_of_kilter(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
