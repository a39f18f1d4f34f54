"""A program on a GPU on paper: the host gives work to two streams and runs ahead of them.

Every iteration computes on one stream, exchanges gradients on another one, and steps the optimizer
on the first. What a profiler would have seen is written down beside where the marker's write and
the exposed communication really were.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPUTE, NCCL = 7, 17
HOOKS_S = 10e-6
"""From the last launch of an iteration to its end."""
_US = 1e6


@dataclass
class GpuProgram:
    """Times in seconds of `time.monotonic()`; the trace's clock is `trace_ahead_s` ahead of it."""

    seed: int = 0
    launch_s: float = 20e-6
    """Mean time that the host takes for a launch; far below a kernel's, so that it runs ahead."""
    host_waits_s: float = 0.0
    """Up to so long does the host do nothing at all, in every iteration."""
    most_ahead_s: float = 0.3
    """The queue is full then, and the host waits in a launch."""
    exchange_s: float = 0.12
    graph: bool = False
    """The computation is launched as one CUDA graph, part of which runs on a stream of its own."""
    trace_ahead_s: float = 1.7e9
    now_s: float = 1000.0
    events: list[dict[str, Any]] = field(default_factory=list)
    annotated_s: dict[int, float] = field(default_factory=dict)
    marked_s: dict[int, float] = field(default_factory=dict)
    marker_s: dict[int, float] = field(default_factory=dict)
    """Where the marker's write really was carried out."""
    exposed_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Where communication without computation really was, by the iteration end before."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._free_s = {COMPUTE: 0.0, NCCL: 0.0, 40: 0.0}
        self._launches = 0
        self.recording = False

    def run(self, iterations: range, *, recorded: range = range(0)) -> GpuProgram:
        """A window of the profiler is open from the first end in `recorded` to the last."""
        for number in iterations:
            self._iterate(number - 1)
            self.now_s += HOOKS_S
            if recorded and number == recorded[0]:
                self.recording = True
            if self.recording:
                self._annotate(number)
            self._mark(number)
            if recorded and number == recorded[-1]:
                self.recording = False
        return self

    def write(self, path: Path) -> Path:
        content = {"traceEvents": self.events, "distributedInfo": {"rank": 0, "world_size": 1}}
        path.write_text(json.dumps(content))
        return path

    def _iterate(self, after: int) -> None:
        self.now_s += self._random.uniform(0.0, self.host_waits_s)
        kernels = [self._random.uniform(0.2e-3, 2e-3) for _ in range(20)]
        if self.graph:
            self._graph(kernels)
        else:
            for length_s in kernels:
                self._launch("gemm", COMPUTE, length_s)
        computed_s = self._free_s[COMPUTE]
        done_s = self._launch("ncclDevKernel_AllReduce", NCCL, self.exchange_s, after_s=computed_s)
        self.exposed_s[after] = (done_s - self.exchange_s, done_s)
        for _ in range(5):
            self._launch("adam", COMPUTE, 1e-3, after_s=done_s)

    def _graph(self, kernels: list[float]) -> None:
        at_s, number = self._host_launch("cudaGraphLaunch")
        begin_s = max(at_s, self._free_s[COMPUTE])
        forked_s = begin_s
        for i, length_s in enumerate(kernels):
            if i % 3:
                begin_s = self._ran("gemm", COMPUTE, begin_s, length_s, number)
            else:  # the graph's own fork
                forked_s = self._ran("gemm", 40, forked_s, length_s, number)
        self._free_s[COMPUTE] = max(begin_s, forked_s)

    def _launch(self, name: str, stream: int, length_s: float, after_s: float = 0.0) -> float:
        at_s, number = self._host_launch("cudaLaunchKernel")
        begin_s = max(at_s, self._free_s[stream], after_s)
        self._free_s[stream] = self._ran(name, stream, begin_s, length_s, number)
        return self._free_s[stream]

    def _host_launch(self, name: str) -> tuple[float, int]:
        self._launches += 1
        ahead_s = self._free_s[COMPUTE] - self.now_s
        self.now_s += max(0.0, ahead_s - self.most_ahead_s)
        at_s = self.now_s
        self.now_s += self.launch_s * self._random.uniform(0.5, 1.5)
        self._note(name, "cuda_runtime", at_s, 5e-6, correlation=self._launches)
        return self.now_s, self._launches

    def _ran(self, name: str, stream: int, begin_s: float, length_s: float, number: int) -> float:
        place = {"device": 0, "stream": stream, "correlation": number}
        self._note(name, "kernel", begin_s, length_s, **place)
        return begin_s + length_s

    def _annotate(self, number: int) -> None:
        self._note("kilter::iteration_end", "cpu_op", self.now_s, 0.0)
        self.now_s += self._random.uniform(1e-6, 10e-6)
        self.annotated_s[number] = self.now_s

    def _mark(self, number: int) -> None:
        self.now_s += 2e-6
        self.marked_s[number] = self.now_s
        self._free_s[COMPUTE] = max(self._free_s[COMPUTE], self.now_s)
        self.marker_s[number] = self._free_s[COMPUTE]

    def _note(self, name: str, cat: str, at_s: float, length_s: float, **args: Any) -> None:
        if self.recording:
            ts = (at_s + self.trace_ahead_s) * _US
            self.events.append(
                {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": length_s * _US, "args": args}
            )
