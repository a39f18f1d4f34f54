"""The marker of a program on a GPU: its stream writes the word when it has come so far.

The host runs ahead of a GPU, so the host's own time says nothing about the GPU's. At each iteration
end the stream that is current is given one write of eight bytes, which it carries out after all
that it was given before. Nobody waits for it. (The idea of a marker on the device's timeline
instead of a callback: notes of US 2025/0264922, "control code before and after a section".)
"""

from __future__ import annotations

import mmap
import time
from typing import Any

from kilter.observe.cuda_driver import CudaDriver
from kilter.observe.marker import NONE, Marker

LAST_WRITE_S = 0.5
"""How long `close` waits for the last write. A page with a write outstanding stays registered."""
_LOOK_S = 0.001


class StreamMarker:
    """In the program's thread alone. `cuda` is `torch.cuda`."""

    def __init__(self, page: Marker, driver: CudaDriver, cuda: Any) -> None:
        self._page = page
        self._driver = driver
        self._cuda = cuda
        self._there: int | None = None
        """The page's address for the GPU, once it is registered."""
        self._fills = False
        """The GPU's streams write no values: the word is filled instead."""
        self._last = NONE

    def mark(self, index: int, device: Any) -> None:
        """The current stream of a GPU passes iteration end `index` after the work that it has by
        now. Nothing while that stream is captured into a graph, of which a write would become a
        part. Raises `DeviceError`, and then nothing has changed but the registration."""
        with self._cuda.device(device):
            if self._cuda.is_current_stream_capturing():
                return
            if self._there is None:
                self._register()
            assert self._there is not None
            write = self._driver.fill if self._fills else self._driver.write
            write(self._cuda.current_stream(device).cuda_stream, self._there, index + 1)
        self._last = index

    def close(self) -> None:
        """Unregister the page, unless the GPU may still write to it: then the end of the process
        does. Twice is once. Raises `DeviceError`."""
        by_s = time.monotonic() + LAST_WRITE_S
        while self._page.last != self._last and time.monotonic() < by_s:
            time.sleep(_LOOK_S)
        if self._there is not None and self._page.last == self._last:
            self._there = None
            self._driver.unregister(self._page.address)

    def _register(self) -> None:
        self._fills = not self._driver.writes_values()
        self._page.without_times()
        self._last = self._page.last
        self._there = self._driver.register(self._page.address, mmap.PAGESIZE)
