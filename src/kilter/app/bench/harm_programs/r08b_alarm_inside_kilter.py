"""A SIGALRM handler raises while a function of kilter runs: the exception arrives."""

import signal
from types import FrameType

import torch
from seen import batch, is_inside_kilter, layers, show

RUN = ("energy", "recompute", "govern")
ALARMS = 40
NOT_COMPARED = ("stderr",)


class TooLong(Exception):
    pass


def depth(error: BaseException | None) -> int:
    """Alarms that came while one of them was being raised count as arrived."""
    return 0 if error is None else isinstance(error, TooLong) + depth(error.__context__)


model = layers(3)
optimizer = torch.optim.AdamW(model.parameters())
raised = arrived = 0


def ring(number: int, frame: FrameType | None) -> None:
    global raised
    if is_inside_kilter(frame, __file__):
        raised += 1
        raise TooLong


signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0007)
for _ in range(150):
    try:
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    except TooLong as error:
        arrived += depth(error)
    if raised >= ALARMS:
        break
signal.setitimer(signal.ITIMER_REAL, 0)
show(lost=raised - arrived)
