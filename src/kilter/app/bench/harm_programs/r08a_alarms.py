"""A SIGALRM handler raises at 150 random moments of training: each exception arrives."""

import random
import signal
from types import FrameType

import torch
from seen import batch, layers, show

RUN = ("memory", "all")
ALARMS = 150


class TooLong(Exception):
    pass


model = layers(3)
optimizer = torch.optim.AdamW(model.parameters())
moments = random.Random(0)
raised = arrived = 0


def ring(number: int, frame: FrameType | None) -> None:
    global raised
    raised += 1
    raise TooLong


def step() -> None:
    loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


step()  # torch imports parts of itself in the first one, and drops exceptions that come then
signal.signal(signal.SIGALRM, ring)
while raised < ALARMS:
    before = raised
    try:
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.001, 0.05))
        while raised == before:
            step()
    except TooLong:
        arrived += 1
        # The exception can leave `torch.no_grad` at its entry, also without kilter.
        torch.set_grad_enabled(True)
show(raised=raised, arrived=arrived)
print(f"{arrived} of {raised} arrived")
