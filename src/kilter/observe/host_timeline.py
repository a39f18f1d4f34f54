"""The profiler's trace of a program on CPUs to a `RankTrace`: its operators are the device's work.

    compute       operators of aten, and what the compiler has fused; times of up to `GAP_JOINED_S`
                  between two of them are the interpreter's work, and count as compute
    communication what a backend of c10d runs in its own threads: `gloo:all_reduce`

A process group's collectives are over in the order in which they began, as far as the program is
concerned, since it waits for one after the other: one that ends earlier than those before it counts
until they are over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kilter.core.errors import FileError
from kilter.core.rank_trace import Collective, RankIteration, RankTrace
from kilter.core.units import MICRO
from kilter.model.intervals import join, union
from kilter.observe.kineto import ITERATION_END
from kilter.observe.rank_traces import operation
from kilter.observe.trace_events import RawEvent, TraceFile

GAP_JOINED_S = 1e-3
_COMPUTE = re.compile(r"aten::|graph_\d+_|cpp_fused")
_COMMUNICATION = re.compile(r"(?:gloo|mpi|ucc):(\w+)")
_TICK_S = 1e-9
"""Ends that count as equal are put so far apart to keep their order."""


def read_host_rank(path: Path, ends_s: Mapping[int, float], *, rank: int) -> RankTrace:
    """The timeline of a rank whose device is the CPU. `ends_s`: the iteration ends that the window
    has seen, by number, in times of `time.monotonic()`; the trace's own times are brought to that
    clock by `origin_s`. `FileError` for a trace that holds no iteration."""
    compute: list[tuple[float, float]] = []
    collectives: list[tuple[float, float, str]] = []
    marks: list[float] = []
    for event in TraceFile(path, RawEvent):
        if event.ph != "X" or not isinstance(event.name, str) or event.ts is None:
            continue
        begin_s = event.ts * MICRO
        end_s = begin_s + max(event.dur or 0.0, 0.0) * MICRO
        if event.name == ITERATION_END:
            marks.append(begin_s)
        elif event.cat == "cpu_op" and _COMPUTE.match(event.name):
            compute.append((begin_s, end_s))
        elif (match := _COMMUNICATION.match(event.name)) is not None:
            collectives.append((begin_s, end_s, operation(match[1])))
    marks.sort()
    numbers = sorted(ends_s)
    if len(marks) < 2 or len(marks) != len(numbers):
        raise FileError(f"{path}: holds no whole iteration")
    origin_s = marks[0]
    windows = tuple(
        RankIteration(number=number, begin_s=begin - origin_s, end_s=end - origin_s)
        for number, begin, end in zip(numbers, marks, marks[1:], strict=False)
    )
    return RankTrace(
        source=str(path),
        rank=rank,
        world_size=None,
        device="CPU",
        origin_s=ends_s[numbers[0]],
        compute=join(union((a - origin_s, b - origin_s) for a, b in compute), GAP_JOINED_S),
        copies=[],
        collectives=_in_order(collectives, origin_s),
        iterations=windows,
        found_by="the iteration ends",
    )


def _in_order(found: list[tuple[float, float, str]], origin_s: float) -> tuple[Collective, ...]:
    ordered: list[Collective] = []
    end_s = float("-inf")
    for begin, end, op in sorted(found):
        end_s = max(end - origin_s, end_s + _TICK_S)
        ordered.append(Collective(op=op, begin_s=begin - origin_s, end_s=end_s, stream="host"))
    return tuple(ordered)
