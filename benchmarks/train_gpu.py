"""Plain training loops on one GPU: a GPT of 400 M, ResNet-50, MobileNetV3. Knows nothing of kilter.

bf16 autocast, AdamW, random weights, synthetic data on the GPU, synchronised after each iteration.
Prints the script's own clock: the median iteration of its second half.
"""

import argparse
import statistics
import time

import torch
from gpt import Gpt, train_step


def job(name, batch):
    """(model, inputs, targets)"""
    if name == "gpt":
        batch = batch or 8
        tokens = torch.randint(0, 50304, (batch, 1025), device="cuda")
        return Gpt(24, 1024, 1024), tokens[:, :-1], tokens[:, 1:]
    import torchvision

    models = {
        "resnet50": torchvision.models.resnet50,
        "mobilenet": torchvision.models.mobilenet_v3_large,
    }
    batch = batch or 128
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    images = images.to(memory_format=torch.channels_last)
    model = models[name]().to(memory_format=torch.channels_last)
    return model, images, torch.randint(0, 1000, (batch,), device="cuda")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["gpt", "resnet50", "mobilenet"], default="gpt")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, inputs, targets = job(args.model, args.batch)
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        loss = train_step(model, optimizer, inputs, targets)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    median = statistics.median(times[len(times) // 2 :])
    print(f"{args.model} loss {loss.item():.4f} iteration {median * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
