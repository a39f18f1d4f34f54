"""What `kilter.size` says of a job, and what the allocator says; pieces found by the allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kilter
from kilter.core.units import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 64)).transpose(1, 3).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16000, 512)
        self.blocks = nn.Sequential(*(Block(512) for _ in range(8)))
        self.head = nn.Linear(512, 16000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(tokens)))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("fused", [True, False])
def test_the_predicted_peak_is_the_measured_one(fused: bool) -> None:
    with torch.device("meta"):
        model, tokens = Language(), torch.randint(16000, (16, 512))
    found = kilter.size(
        model,
        tokens,
        loss=lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()),
        optimizer="adamw-fused" if fused else "adamw",
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = Language().cuda()
    tokens = torch.randint(16000, (16, 512), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    measured_bytes = torch.cuda.max_memory_allocated() - before
    # Never less than it takes (but for rounding); more where the CPU's autocast copies.
    assert 0.98 * measured_bytes <= found.peak_bytes <= 1.12 * measured_bytes


def test_as_few_pieces_as_keep_the_budget() -> None:
    torch.manual_seed(0)
    model = Language().cuda()
    tokens = torch.randint(16000, (24, 512), device="cuda")
    loss_of(model, tokens).backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    loss_of(model, tokens).backward()
    plain_bytes = torch.cuda.max_memory_allocated()
    model.zero_grad()
    there_bytes = torch.cuda.memory_allocated()
    budget_bytes = there_bytes + (plain_bytes - there_bytes) * 4 // 10
    in_pieces = kilter.divided(lambda t: loss_of(model, t), memory_budget=budget_bytes)
    for _ in range(3):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loss = in_pieces(tokens)
        assert torch.isfinite(loss)
        assert torch.cuda.max_memory_allocated() <= budget_bytes + MIB
    assert 3 <= in_pieces.pieces <= 6
    assert "a sample" in in_pieces.explain()
    for p, gradient in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0.05, atol=2e-3)


def test_a_card_with_room_takes_the_batch_in_one_piece() -> None:
    model = nn.Linear(1024, 1024).cuda()
    in_pieces = kilter.divided(lambda x: model(x).square().mean())
    x = torch.randn(4096, 1024, device="cuda")
    in_pieces(x)
    assert in_pieces.pieces > 1, "the first call learns"
    in_pieces(x)
    assert in_pieces.pieces == 1
