"""What several benchmarks train, and one step of it. Knows nothing of kilter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 50304


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm; heads of 64 channels. `dropout` is that of
    attention and of what both add."""

    def __init__(self, width: int, *, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = max(1, width // 64), causal, dropout
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.one(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, None, self.dropout, self.causal)
        x = x + self._dropped(self.out(y.transpose(1, 2).flatten(2)))
        return x + self._dropped(self.down(F.gelu(self.up(self.two(x)))))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class Gpt(nn.Module):
    """Tokens to logits; with `checkpointing` every block is recomputed in backward."""

    def __init__(
        self,
        layers: int,
        width: int,
        length: int,
        words: int = VOCABULARY,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.checkpointing = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))


def backward(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Forward and backward under bf16 autocast; the loss."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    return loss.detach()


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """One iteration; its loss."""
    loss = backward(model, inputs, targets)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def digest(model: nn.Module, losses: Sequence[object]) -> str:
    """Of this rank's parameters and losses: equal only where all bits are."""
    found = hashlib.sha256("".join(map(str, losses)).encode())
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter).detach().cpu()
        found.update(local.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
