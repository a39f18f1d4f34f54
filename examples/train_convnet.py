"""Trains a small ResNet on synthetic images whose class can be learned. Plain PyTorch."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLASSES = 10


class Patterns(Dataset):
    """Noisy images; the class is the direction and frequency of a wave in the noise."""

    def __init__(self, count, size, seed=0):
        self.count, self.size, self.seed = count, size, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        label = index % CLASSES
        angle, waves = label * torch.pi / CLASSES, 2 + label % 3
        axis = torch.linspace(0, 1, self.size)
        along = axis[:, None] * torch.cos(torch.tensor(angle)) + axis * torch.sin(
            torch.tensor(angle)
        )
        phase = torch.rand(3, 1, 1, generator=generator)
        wave = torch.sin(2 * torch.pi * (waves * along + phase))
        return wave + 4 * torch.randn(3, self.size, self.size, generator=generator), label


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.blocks = nn.Sequential(
            Block(width, width, 1),
            Block(width, 2 * width, 2),
            Block(2 * width, 4 * width, 2),
            Block(4 * width, 8 * width, 2),
        )
        self.head = nn.Linear(8 * width, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(nn.functional.relu(self.stem(x))).mean((2, 3)))


def batches(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=32, help="height and width of an image")
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(
        Patterns(4096, args.size),
        args.batch,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=device == "cuda",
    )
    model = ResNet(args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    began, last = time.perf_counter(), 0
    for step, (images, labels) in enumerate(batches(loader), start=1):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % args.every == 0 or step == args.steps:
            value, now = loss.item(), time.perf_counter()
            speed = (step - last) / (now - began)
            print(f"step {step}  loss {value:.3f}  {speed:.1f} steps/s", flush=True)
            began, last = now, step
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
