"""Equal short kernels on a GPU, one right after the other, timed by the GPU's own clock: what the
calibrator of switch times looks at.

A kernel spins for a fixed number of SM cycles, so its length is the period of the SM clock times
that number, and a constant for its launch and its end (3.5 us on an H200). Some are always launched
ahead, so that the GPU goes on while the host is inside a call of the driver. The host's clock is
brought to the GPU's by the kernels that the host has waited for: it cannot see an end before it is
there, so the smallest difference is the true one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kilter.core.errors import DeviceError
from kilter.observe import torch_internals

CYCLES = 100_000
"""50 us at 2 GHz."""
AHEAD = 400
"""Kernels that are launched before their times are read: 20 ms at 2 GHz."""
COMPARED = 20
"""Kernels by which the clocks are compared; they must not drift apart meanwhile."""


class Mark(Protocol):
    def wait(self) -> None:
        """Until the stream has passed it."""

    def seconds_to(self, later: Any) -> float:
        """To another one, both passed."""


class SpinGpu(Protocol):
    def spin(self, cycles: int) -> None:
        """Give it a kernel that takes so many SM cycles."""

    def mark(self) -> Mark:
        """Give it a mark."""


class SpinKernels:
    """Kernels of `CYCLES`; times from the first one's begin."""

    def __init__(self, gpu: SpinGpu, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpu = gpu
        self._clock = clock
        self._last = gpu.mark()
        self._at_s = 0.0
        self._flying: deque[Mark] = deque()
        self._ahead_s: deque[float] = deque(maxlen=COMPARED)

    def kernel(self) -> tuple[float, float]:
        """Begin and end of the next one."""
        while len(self._flying) < AHEAD:
            self._gpu.spin(CYCLES)
            self._flying.append(self._gpu.mark())
        mark = self._flying.popleft()
        mark.wait()
        begin_s = self._at_s
        self._at_s += self._last.seconds_to(mark)
        self._last = mark
        self._ahead_s.append(self._clock() - self._at_s)
        return begin_s, self._at_s

    def now_s(self) -> float:
        """The present on the GPU's clock; some kernels have to be over."""
        return self._clock() - min(self._ahead_s)


def spin_kernels(uuid: str) -> SpinKernels:
    """Kernels on the GPU with this UUID. `DeviceError` where torch cannot use it."""
    try:
        import torch
    except ImportError as error:
        raise DeviceError("kernels need PyTorch, which is not installed") from error
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid).lower() in uuid.lower():
            return SpinKernels(_TorchGpu(torch, index))
    raise DeviceError(f"PyTorch does not see {uuid}: a build with CUDA, and CUDA_VISIBLE_DEVICES?")


class _TorchGpu:
    """A stream of its own."""

    def __init__(self, torch: Any, index: int) -> None:
        self._torch = torch
        self._stream = torch.cuda.Stream(index)

    def spin(self, cycles: int) -> None:
        with self._torch.cuda.stream(self._stream):
            torch_internals.cuda_sleep(cycles)

    def mark(self) -> _TorchMark:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return _TorchMark(event)


class _TorchMark:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_to(self, later: _TorchMark) -> float:
        return float(self._event.elapsed_time(later._event)) * 1e-3
