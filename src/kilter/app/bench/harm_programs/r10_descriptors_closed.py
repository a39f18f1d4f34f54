"""Closes all descriptors above 2, as a daemon does, and opens its own files in their places."""

import os
import time
from pathlib import Path
from typing import TextIO

from seen import layers, show_model, train

RUN = ("energy", "memory", "nvml")

model = layers(4)
files: list[TextIO] = []


def close_all(step: int) -> None:
    if step == 30:
        os.closerange(3, 4096)
        files.extend(Path(f"checkpoint-{number}").open("w") for number in range(24))  # noqa: SIM115
        for number, file in enumerate(files):
            print(f"the contents of file {number}", file=file, flush=True)
    time.sleep(0.02)  # time for kilter's own thread


losses = train(model, steps=60, after=close_all)
for file in files:
    print("its last line", file=file, flush=True)
show_model(model, losses)
