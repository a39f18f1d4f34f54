"""KeyboardInterrupts that the program catches arrive while kilter writes its record."""

import sys
from types import FrameType

import torch
from seen import batch, layers, show

RUN = ("energy", "all")
NOT_COMPARED = ("stderr",)

model = layers(3)
optimizer = torch.optim.AdamW(model.parameters())
met = 0


def interrupt(frame: FrameType, event: str, argument: object) -> None:
    global met
    if frame.f_code.co_filename.endswith("recorder.py"):
        met += 1
        if met % 4 == 3:
            raise KeyboardInterrupt


for step in range(60):
    sys.setprofile(interrupt)
    try:
        loss = model(batch(4096 + 64 * (step // 10))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
show(over=True)
