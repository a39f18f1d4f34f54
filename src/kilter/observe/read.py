"""`python -m kilter.observe.read RAW TRACE [--iteration-s S]`: a Kineto file to a trace file.

A process of its own, because reading is seconds of Python that would take the interpreter from
a training that is bound by its host, and because FLOPs need torch's table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from kilter.core import codec
from kilter.core.errors import FileError
from kilter.observe.flops import torch_flops
from kilter.observe.kineto import read_kineto


def start(raw: Path, trace: Path, *, iteration_s: float | None) -> subprocess.Popen[bytes]:
    """Begin to read `raw` in a child; `trace` is there once it has ended with 0."""
    # -P: a torch.py in the program's directory is not torch. No GPU: the child only looks at files.
    command = [sys.executable, "-P", "-m", __name__, str(raw), str(trace)]
    if iteration_s is not None:
        command += ["--iteration-s", repr(iteration_s)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "KILTER": "0"},
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("raw", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--iteration-s", type=float)
    options = parser.parse_args(arguments)
    os.nice(10)
    try:
        trace = read_kineto(options.raw, flops=torch_flops(), iteration_s=options.iteration_s)
        codec.save(options.trace, trace)
    except FileError as error:
        print(f"kilter: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
