"""Trains a small GPT on synthetic text that can be learned. Plain PyTorch."""

import argparse
import time

import torch
from torch import nn


class Text:
    """Words that mostly follow from the two words before them, as many lines of one length."""

    def __init__(self, vocabulary, lines=512, length=1024, noise=0.2):
        self.generator = torch.Generator().manual_seed(0)
        follower = torch.randint(vocabulary, (vocabulary, 2), generator=self.generator)
        self.words = torch.randint(vocabulary, (lines, length), generator=self.generator)
        kept = torch.rand(lines, length, generator=self.generator) < noise
        for i in range(2, length):
            expected = follower[self.words[:, i - 1], self.words[:, i - 2] % 2]
            self.words[:, i] = torch.where(kept[:, i], self.words[:, i], expected)

    def batch(self, batch, length):
        lines, longest = self.words.shape
        line = torch.randint(lines, (batch, 1), generator=self.generator)
        first = torch.randint(longest - length, (batch, 1), generator=self.generator)
        words = self.words[line, first + torch.arange(length + 1)]
        return words[:, :-1], words[:, 1:]


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, width, layers, heads):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, words):
        places = torch.arange(words.shape[1], device=words.device)
        return self.head(self.norm(self.layers(self.words(words) + self.places(places))))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="words of a sequence")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=50, help="steps between two lines")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = Text(args.vocabulary)
    model = GPT(args.vocabulary, args.length, args.width, args.layers, args.heads).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    began, last = time.perf_counter(), 0
    for step in range(1, args.steps + 1):
        inputs, targets = (words.to(device) for words in text.batch(args.batch, args.length))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        if step % args.every == 0 or step == args.steps:
            value, now = loss.item(), time.perf_counter()
            speed = (step - last) / (now - began)
            print(f"step {step}  loss {value:.3f}  {speed:.1f} steps/s", flush=True)
            began, last = now, step


if __name__ == "__main__":
    main()
