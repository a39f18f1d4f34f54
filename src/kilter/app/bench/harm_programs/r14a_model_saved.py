"""Saves the whole model in the middle of iterations: it loads where there is no kilter."""

import io
import subprocess
import sys
from pathlib import Path

import torch
from norm_net import train
from seen import show
from torch import nn

RUN = ("memory", "recompute")
NOT_COMPARED = ("files",)
LOAD = """
import sys
sys.modules["kilter"] = None
sys.path.insert(0, sys.argv[1])
import torch
for path in sys.argv[2:]:
    model = torch.load(path, weights_only=False)
    print(sum(float(p.double().sum()) for p in model.parameters()))
"""


def save(model: nn.Module, step: int) -> None:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    Path(f"model-{step}.pt").write_bytes(buffer.getvalue())
    show(**{f"kilter in the file {step}": b"kilter" in buffer.getvalue()})


train(save)
paths = sorted(map(str, Path().glob("model-*.pt")))
loaded = subprocess.run(
    [sys.executable, "-c", LOAD, str(Path(__file__).parent), *paths],
    capture_output=True,
    text=True,
    timeout=120,
)
show(loads=loaded.returncode, loaded=loaded.stdout)
