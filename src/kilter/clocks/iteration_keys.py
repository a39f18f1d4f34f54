"""What the program's thread leaves at every iteration end for the controller of sections: the
marker that the conductor reads, and how many collectives each process group has numbered."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

from kilter.core.errors import DeviceError
from kilter.observe.collective_counts import CollectiveCounts, CollectiveKey
from kilter.observe.cuda_driver import CudaDriver
from kilter.observe.marker import Marker
from kilter.observe.stream_marker import StreamMarker

CHANGED_ITERATIONS = 3
"""So many iterations in a row with another key are a change of the sequence."""
MARKS_KEPT = 1024
"""The times of so many iteration ends are remembered, for the windows."""


class IterationKeys:
    """`iteration_ended` and `script_ended` are for the program's thread, the rest for our own."""

    def __init__(self) -> None:
        self.marker = Marker()
        self.marking = False
        """There is a conductor. Without one the program's streams are left alone."""
        self.failed: str | None = None
        """Why the marker does not move any more."""
        self.marked_s: dict[int, float] = {}
        """It holds the host's times of the last iteration ends, by `time.monotonic()`."""
        self.cost_s = 0.0
        self.reopened = 0
        self._on_gpu: StreamMarker | None = None
        self._counts = CollectiveCounts()
        self._recent: deque[CollectiveKey | None] = deque(maxlen=CHANGED_ITERATIONS)
        self._planned_for: CollectiveKey | None = None

    def iteration_ended(self, index: int, device: Any) -> None:
        begin_s = time.perf_counter()
        self.marked_s[index] = time.monotonic()
        self.marked_s.pop(index - MARKS_KEPT, None)
        if self.marking and self.failed is None:
            try:
                self._mark(index, device)
            except DeviceError as error:
                self.failed = str(error)
        self._recent.append(self._counts.since_last())
        self.cost_s += time.perf_counter() - begin_s

    def _mark(self, index: int, device: Any) -> None:
        if device is None:
            self.marker.mark(index)
            return
        if self._on_gpu is None:
            cuda = sys.modules["torch"].cuda
            self._on_gpu = StreamMarker(self.marker, CudaDriver(), cuda)
        self._on_gpu.mark(index, device)

    def script_ended(self) -> None:
        """In the program's thread, which has the GPU's context."""
        on_gpu, self._on_gpu = self._on_gpu, None
        try:
            if on_gpu is not None:
                on_gpu.close()
        except DeviceError as error:
            self.failed = self.failed or str(error)

    @property
    def changed(self) -> bool:
        """The last iterations agree on another key than that of the plan."""
        recent = list(self._recent)
        if self._planned_for is None or len(recent) < CHANGED_ITERATIONS:
            return False
        return len(set(recent)) == 1 and recent[0] != self._planned_for

    @property
    def collectives(self) -> int | None:
        """Of one iteration."""
        return None if self._planned_for is None else sum(n for _, n in self._planned_for)

    def accept(self) -> None:
        """The plan is for iterations like the last ones."""
        if self._recent:
            self._planned_for = self._recent[-1]

    def forget(self) -> None:
        self._planned_for = None
        self.reopened += 1

    def close(self) -> None:
        self.marker.close()
