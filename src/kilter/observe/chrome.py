"""An `IterationTrace` as Chrome trace JSON, which Perfetto (https://ui.perfetto.dev) opens."""

from __future__ import annotations

from typing import Any

from kilter.core.trace import IterationTrace, Kind, Operation

_IDLE_TRACK = -1
"""Gaps and data waits lie on a track of their own: nothing runs on a stream then."""


def chrome(trace: IterationTrace) -> dict[str, Any]:
    """The object: complete events ("X") in microseconds, one track per stream, and what is known
    of an operation as its arguments, in SI units.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    names = {_IDLE_TRACK: "idle"}
    for operation in trace.operations:
        names.setdefault(_track(operation), f"{trace.timeline} stream {operation.stream}")
    process = {"name": f"{trace.device} ({trace.label.value}, {trace.timeline} timeline)"}
    meta = [{"ph": "M", "pid": 0, "name": "process_name", "args": process}]
    for track, name in names.items():
        meta.append(
            {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": name}}
        )
    other = {
        "iteration_s": trace.iteration_s,
        "iterations": trace.iterations,
        "source": trace.source,
        "label": trace.label.value,
    }
    events = [_event(operation) for operation in trace.operations]
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": [*meta, *events]}


def _event(operation: Operation) -> dict[str, Any]:
    known = {
        "flops": operation.flops,
        "bytes_moved": operation.bytes_moved,
        "intensity_flop_per_byte": operation.intensity,
        "kernels": operation.kernels,
    }
    return {
        "ph": "X",
        "pid": 0,
        "tid": _track(operation),
        "cat": operation.kind.value,
        "name": operation.name,
        "ts": operation.start_s * 1e6,
        "dur": operation.duration_s * 1e6,
        "args": {name: value for name, value in known.items() if value is not None},
    }


def _track(operation: Operation) -> int:
    idle = operation.kind in (Kind.GAP, Kind.DATA_WAIT)
    return _IDLE_TRACK if idle else operation.stream
