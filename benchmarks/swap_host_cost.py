"""What the memory engine costs the host: `python benchmarks/swap_host_cost.py [--layers N]`.

A GPT of tiny tensors on the CPU, so that an iteration is little but the host's work of issuing it.
Side by side: without the engine, checkpointed block by block, and under plans that keep everything,
swap, or recompute single operations or whole calls. The backend of all but the last copies nothing
(its numbers are wrong, its time is the engine's own). Printed are the extra microseconds of an
iteration, of its forward pass and for each saved tensor: of the fastest, and as a mean, in which
Python's collector shows; and how long the engine's hooks on saved tensors take, each call at its
shortest, which a busy machine disturbs the least. The compiled library is built first;
`KILTER_BUILD=off` does without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpt import Block
from torch import nn
from torch.utils.checkpoint import checkpoint

from kilter.memory.engine import Backend, CpuStandIn, Swapper, compiled_recorder
from kilter.memory.engine.tensor_hooks import TensorHooks
from kilter.memory.plan.problem import Link

FAST = Link(to_host_bytes_per_s=1e14, to_device_bytes_per_s=1e14, both_bytes_per_s=2e14)
SLOW = Link(to_host_bytes_per_s=1e6, to_device_bytes_per_s=1e6, both_bytes_per_s=2e6)
WIDTH = 64
TOKENS = {"cpu": 32, "cuda": 512}
"""On a GPU what the allocator rounds up and what the engine copies has to be small beside what is
saved; its kernels still take less than the host needs to issue them."""


class Idle(CpuStandIn):
    """Moves nothing and waits for nothing."""

    def alloc(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def _issue(self, target: torch.Tensor, source: torch.Tensor) -> int:
        return 0

    def evicted(self, storage: torch.UntypedStorage) -> None:
        pass


class TimedHooks:
    """The time in the engine's hooks on saved tensors."""

    def __init__(self) -> None:
        self._now: dict[str, list[float]] = {"_pack": [], "_unpack": []}
        self._iterations: dict[str, list[list[float]]] = {}
        for name in self._now:
            setattr(TensorHooks, name, self._timed(name))
        self.clear()

    def _timed(self, name: str) -> Callable[[Any, Any], Any]:
        hook = getattr(TensorHooks, name)

        def timed(hooks: Any, argument: Any) -> Any:
            begin_s = time.perf_counter()
            result = hook(hooks, argument)
            self._now[name].append(time.perf_counter() - begin_s)
            return result

        return timed

    def clear(self) -> None:
        self._iterations = {name: [] for name in self._now}

    def over(self) -> None:
        """An iteration has ended."""
        for name, calls in self._now.items():
            self._iterations[name].append(calls[:])
            calls.clear()

    def shortest_us(self, name: str) -> float:
        """The sum over all calls of an iteration, each as short as it ever was."""
        iterations = self._iterations[name]
        usual = statistics.mode(len(calls) for calls in iterations)
        alike = [calls for calls in iterations if len(calls) == usual]
        return 1e6 * sum(min(calls) for calls in zip(*alike, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", choices=TOKENS, default="cpu", help="cuda: with real copies")
    options = parser.parse_args()
    if compiled_recorder.to_build():
        reason = compiled_recorder.build()
        print("" if reason is None else reason.text, file=sys.stderr)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = options.device
    torch.set_default_device(device)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(options.layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(2, TOKENS[device], WIDTH)

    def backend() -> Backend:
        if device == "cpu":
            return Idle()
        from kilter.memory.engine.cuda import Cuda

        return Cuda.open()

    hooks = TimedHooks()
    checkpointed = False
    forward_us: list[float] = []

    def iteration() -> None:
        begin_s = _clock(device)
        with torch.autocast(device, torch.bfloat16):
            y = x
            for block in model:
                y = checkpoint(block, y, use_reentrant=False) if checkpointed else block(y)
            loss = y.float().square().mean()
        forward_us.append((_clock(device) - begin_s) * 1e6)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hooks.over()

    def swapper(planner: str, share: float, link: Link, *, calls: bool = False) -> Swapper:
        return Swapper(
            CpuStandIn() if calls and device == "cpu" else backend(),  # calls are compared first
            budget_bytes=int(base_bytes + share * (peak_bytes - base_bytes)),
            link=link,
            planner=planner,
            min_bytes=2048,
            segments=calls,
        )

    packs = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packs
        packs += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        iteration()
    watch = Swapper(backend(), budget_bytes=10**15, link=FAST, min_bytes=2048)
    with watch:
        for _ in range(4):
            iteration()
    (record,) = watch.records()
    peak_bytes = record.peak_bytes
    base_bytes = peak_bytes - sum(datum.size_bytes for datum in record.data)

    arms: dict[str, Any] = {
        "plain": contextlib.nullcontext(),
        "empty hooks": torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        "checkpoint": contextlib.nullcontext(),
        "kept": swapper("mix", 1.01, FAST),
        "swapped": swapper("spanning", 0.6, FAST),
        "mixed": swapper("mix", 0.6, SLOW),
        "calls": swapper("mix", 0.55, SLOW, calls=True),
    }
    plain_us = plain_forward_us = 0.0
    rows: list[dict[str, Any]] = []
    for name, arm in arms.items():
        checkpointed = name == "checkpoint"
        with arm:
            for _ in range(16):
                iteration()
            forward_us.clear()
            hooks.clear()
            times_us = [_timed(iteration, device) * 1e6 for _ in range(options.rounds)]
            least_us = min(times_us)
        plain_us, plain_forward_us = plain_us or least_us, plain_forward_us or min(forward_us)
        plans = arm.report().plans if isinstance(arm, Swapper) else ()
        rows.append(
            {
                "arm": name,
                "iteration_us": least_us,
                "mean_us": statistics.mean(times_us),
                "extra_us": least_us - plain_us,
                "extra_forward_us": min(forward_us) - plain_forward_us,
                "per_saved_us": (least_us - plain_us) / packs,
                "hooks_forward_us": hooks.shortest_us("_pack"),
                "hooks_backward_us": hooks.shortest_us("_unpack"),
                "swapped": sum(plan.swapped for plan in plans),
                "recomputed": sum(plan.recomputed for plan in plans),
            }
        )
    library = compiled_recorder.library() is not None
    print(
        json.dumps(
            {"label": "measured", "saved": packs, "library": library, "rows": rows}, indent=1
        )
    )


def _clock(device: str) -> float:
    """The host's time: on the CPU the process's own, so that neighbours do not count."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def _timed(iteration: Callable[[], None], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    begin_s = _clock(device)
    iteration()
    issued_s = _clock(device) - begin_s
    if device != "cpu":
        torch.cuda.synchronize()
    return issued_s


if __name__ == "__main__":
    main()
