"""Ctrl-C while a function of kilter runs: the traceback shows no frame of kilter.

Python dies of SIGINT then; or it ends with 1 if anything runs the source of code after that, say a
function that an installation of torch has registered for the exit, with or without kilter.
"""

import signal
import sys
import traceback
from types import FrameType, TracebackType

import torch
from seen import batch, is_inside_kilter, is_of_kilter, layers, show

RUN = ("energy", "recompute")
NOT_COMPARED = ("stderr",)
ENDS = ("-2 (SIGINT)", "1")


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    names = {frame.filename for frame in traceback.extract_tb(trace)}
    show(
        error=kind.__name__,
        frames_of_kilter=sorted(filter(is_of_kilter, names)),
        context=type(error.__context__).__name__,
    )


sys.excepthook = tell
model = layers(3)
optimizer = torch.optim.AdamW(model.parameters())


def interrupt(number: int, frame: FrameType | None) -> None:
    if is_inside_kilter(frame, __file__):
        signal.setitimer(signal.ITIMER_REAL, 0)  # Ctrl-C once
        raise KeyboardInterrupt


signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0007)
for _ in range(100):
    loss = model(batch()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
# Off before the end: in plain, too, the program's caller may be a function of kilter.
signal.setitimer(signal.ITIMER_REAL, 0)
raise KeyboardInterrupt
