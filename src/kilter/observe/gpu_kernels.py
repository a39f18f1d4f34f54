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
from typing import Any

from kilter.core.errors import DeviceError
from kilter.observe import torch_internals

CYCLES = 100_000
"""They take 50 us at 2 GHz."""
AHEAD = 400
"""So many kernels are launched before their times are read: 20 ms at 2 GHz."""
COMPARED = 20
"""The clocks are compared by so many kernels; they must not drift apart meanwhile."""


class SpinKernels:
    """Kernels of `CYCLES` on a stream; times from the first one's begin. `spin` gives the stream a
    kernel of so many SM cycles, and `mark` a timing event of CUDA."""

    def __init__(
        self,
        spin: Callable[[int], None],
        mark: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spin, self._mark = spin, mark
        self._clock = clock
        self._last = mark()
        self._at_s = 0.0
        self._flying: deque[Any] = deque()
        self._ahead_s: deque[float] = deque(maxlen=COMPARED)

    def kernel(self) -> tuple[float, float]:
        """Begin and end of the next one."""
        while len(self._flying) < AHEAD:
            self._spin(CYCLES)
            self._flying.append(self._mark())
        mark = self._flying.popleft()
        mark.synchronize()
        begin_s = self._at_s
        self._at_s += self._last.elapsed_time(mark) * 1e-3
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
            return _on_stream(torch, torch.cuda.Stream(index))
    raise DeviceError(f"PyTorch does not see {uuid}: a build with CUDA, and CUDA_VISIBLE_DEVICES?")


def _on_stream(torch: Any, stream: Any) -> SpinKernels:
    def spin(cycles: int) -> None:
        with torch.cuda.stream(stream):
            torch_internals.cuda_sleep(cycles)

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    return SpinKernels(spin, mark)
