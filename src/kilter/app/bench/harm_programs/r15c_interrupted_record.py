"""KeyboardInterrupts that the program catches arrive while kilter works; its record stays whole."""

from __future__ import annotations

import signal
from types import FrameType

import torch
from seen import batch, is_inside_kilter, layers, show

RUN = ("energy", "memory", "all", "govern")
NOT_COMPARED = ("stderr",)


def main() -> None:
    model = layers(3)
    optimizer = torch.optim.AdamW(model.parameters())

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_inside_kilter(frame, __file__):
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0003)
    for step in range(250):
        try:
            loss = model(batch(4096 + 64 * (step // 10))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        except KeyboardInterrupt:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    show(over=True)


if __name__ == "__main__":
    main()
