"""Large batches at first, which a budget pushes out, then small ones: what does kilter say?"""

import sys

import torch
from seen import batch, layers, show

EXPECT = {"exit": 0, "says that nothing was moved": False, "bytes were moved": True}


def train() -> None:
    model = layers(6)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(40):
        model(batch(4096 if step >= 3 else 24_000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    import jobs

    from kilter.core.events import Moved

    done = jobs.governed(__file__, "--memory-budget", "30MiB")
    moved = [event for event in jobs.events() if isinstance(event, Moved)][-1]
    show(
        **{
            "exit": done.returncode,
            "says that nothing was moved": "nothing was moved" in done.stderr,
            "bytes were moved": moved.out_bytes > 0,
        }
    )


if __name__ == "__main__":
    train() if sys.argv[1:] else main()
