"""Where the threads that issue a training spend their time under a plan, by native frames.

    python benchmarks/memory_frames.py --out DIR [--models dit] [--arms plain,75%,plain]

For each model of `memory_libraries.py` the arms are those of `memory_host.py`. The thread of
forward and the one of backward are sampled twice a millisecond (`frames.c`, built by `cc`) in
iterations that wait for the device; after each arm a table in DIR/MODEL.txt says how many
milliseconds of an iteration each library and each function takes in each arm, by phase: in itself
by library, then with all it calls; then the same below the first frame of kilter's library. Rows
are in the order of how much more the second arm takes than the first. Sampling slows what it
samples by up to a half, and more where stacks are deep: compare arms, not times with those of other
scripts. Functions of Python show as the interpreter; what a library does not export shows as `?`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from memory_host import (
    CUDA,
    DEVICE,
    SETTLING,
    Training,
    backend_of,
    chosen,
    measure,
    swapper_of,
    wait,
)

EVERY_US = 500
PHASES = {1: "forward", 2: "backward", 3: "optimizer"}
OURS = "kilter_recorder"
WAITING = ("execute_with_graph_task", "pthread_cond_wait", "pthread_cond_clockwait")
"""A frame whose name contains one of these does nothing but wait for another thread."""
ROWS = 60
LEAST_MS = 0.3


class Mark(torch.autograd.Function):
    """Tells which thread carries out backward."""

    threads: ClassVar[set[int]] = set()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Mark.threads.add(threading.get_native_id())
        return gradient


class Sampler:
    """The library of `frames.c`, and the names of the addresses that it has met."""

    def __init__(self, folder: Path) -> None:
        built = folder / "frames.so"
        source = Path(__file__).with_name("frames.c")
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(built), str(source), "-ldl", "-lrt"]
        subprocess.run(command, check=True)
        self.calls = ctypes.CDLL(str(built))
        self._written = folder / "samples"
        self._names: dict[str, str] = {}

    def read(self) -> list[tuple[int, list[str]]]:
        """The phase of each sample, and its frames, the innermost first."""
        if self.calls.frames_write(str(self._written).encode()):
            raise OSError(f"the samples could not be written to {self._written}")
        rows = [line.split() for line in self._written.read_text().splitlines()]
        buffer = ctypes.create_string_buffer(4096)
        for address in {address for row in rows for address in row[1:]} - self._names.keys():
            number = ctypes.c_ulong(int(address, 16))
            self.calls.frames_name(number, buffer, ctypes.c_int(len(buffer)))
            self._names[address] = buffer.value.decode(errors="replace")
        return [(int(row[0]), [self._names[address] for address in row[1:]]) for row in rows]


class Times(NamedTuple):
    """Milliseconds of an iteration, by phase and name."""

    alone: Counter[tuple[int, str]]
    """Libraries."""
    whole: Counter[tuple[int, str]]
    """Functions, with what they call."""
    ours: Counter[tuple[int, str]]
    """The same where kilter's library calls them."""

    @classmethod
    def of(cls, samples: list[tuple[int, list[str]]], iterations: int) -> Times:
        times = cls(Counter(), Counter(), Counter())
        each_ms = EVERY_US / 1e3 / iterations
        for phase, frames in samples:
            if not frames or any(word in frame for frame in frames[:8] for word in WAITING):
                continue
            times.alone[phase, _library(frames[0])] += each_ms
            for frame in set(frames):
                times.whole[phase, frame] += each_ms
            ours = [at for at, frame in enumerate(frames) if frame.startswith(OURS)]
            for frame in set(frames[: ours[-1] + 1] if ours else ()):
                times.ours[phase, frame] += each_ms
        return times


def _library(frame: str) -> str:
    return frame.partition("!")[0]


def sample(training: Training, sampler: Sampler, iterations: int) -> tuple[Times, float]:
    """What a training under way spends, and the median of its iterations in milliseconds."""
    phase = sampler.calls.frames_phase

    def step(now: bool) -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            phase(1 * now)
            loss = Mark.apply(training.loss_of())
        phase(2 * now)
        loss.backward()
        phase(3 * now)
        training.optimizer.step()
        training.optimizer.zero_grad()
        phase(0)
        wait()

    Mark.threads = {threading.get_native_id()}
    step(now=False)
    sampler.calls.frames_begin()
    for thread in Mark.threads:
        if sampler.calls.frames_watch(ctypes.c_int(thread), ctypes.c_long(EVERY_US)):
            raise OSError(f"no timer for thread {thread}")
    times_s = []
    for _ in range(iterations):
        begin_s = time.perf_counter()
        step(now=True)
        times_s.append(time.perf_counter() - begin_s)
    sampler.calls.frames_stop()
    return Times.of(sampler.read(), iterations), 1e3 * statistics.median(times_s)


def demangled(names: list[str]) -> dict[str, str]:
    """Names of C++ as they were written, where `c++filt` is there."""
    try:
        found = subprocess.run(
            ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True
        ).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        return dict(zip(names, names, strict=True))
    return dict(zip(names, found, strict=False))


def table(title: str, arms: list[Counter[tuple[int, str]]]) -> str:
    """A row for each name that takes a while in some arm."""
    lines = []
    keys = {key for arm in arms for key, took_ms in arm.items() if took_ms >= LEAST_MS}
    plain = demangled(sorted({key[1].partition("!")[2] for key in keys}))
    for phase, name in PHASES.items():
        rows = sorted(
            (key for key in keys if key[0] == phase),
            key=lambda key: arms[0][key] - arms[min(1, len(arms) - 1)][key],
        )
        lines.append(f"== {title}, {name}")
        for key in rows[:ROWS]:
            library, _, function = key[1].partition("!")
            took = "  ".join(f"{arm[key]:7.2f}" for arm in arms)
            lines.append(f"{took}  {library[:24]} {plain.get(function, function)[:110]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--models", default="dit")
    parser.add_argument("--arms", default="plain,75%,plain")
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--settling", type=int, default=SETTLING, help="iterations before them")
    args = parser.parse_args()
    names, arms = chosen(parser, args.models, args.arms)
    args.out.mkdir(parents=True, exist_ok=True)
    backend, link = backend_of()
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(Path(folder))
        for name in names:
            peaks: dict[str, int] = {}
            found: list[Times] = []
            for arm in arms:
                training = Training(name, checkpoint=arm.kind == "checkpointing")
                governed = swapper_of(arm, peaks, backend, link)
                with contextlib.nullcontext() if arm.bare else governed:
                    _, peak_bytes = measure(training, 4 if arm.bare else args.settling, 4)
                    times, took_ms = sample(training, sampler, args.iterations)
                if arm.bare:
                    peaks[arm.name] = peak_bytes
                found.append(times)
                plans = [(plan.swapped, plan.recomputed) for plan in governed.report().plans]
                print(f"{name:13} {arm.name:14} {took_ms:7.1f} ms, sampled; {plans}", flush=True)
                text = [" ".join(arm.name for arm in arms[: len(found)])]
                text += [table("alone", [t.alone for t in found])]
                text += [table("with what it calls", [t.whole for t in found])]
                text += [table("below kilter's library", [t.ours for t in found])]
                (args.out / f"{name}.txt").write_text("\n".join(text) + "\n")
                del training
                gc.collect()


if __name__ == "__main__":
    main()
