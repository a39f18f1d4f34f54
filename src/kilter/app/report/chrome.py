"""A run over time as Chrome trace JSON, which Perfetto (https://ui.perfetto.dev) opens: decisions,
blocks, settings in force, and what the sensors and the memory engine said.

One process for each rank. The time axis is the clock of the run; on a simulated device it is the
device's virtual time, in which its blocks and readings lie, and what has no virtual time of its own
is placed between the records around it. Pure.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from kilter.app.fields import taken
from kilter.app.report.build import Rank
from kilter.core.events import Sampled
from kilter.core.units import GIB, MHZ

_DECISIONS, _SETTINGS, _BLOCKS, _OTHERS = range(1, 5)
_TRACKS = {
    _DECISIONS: "decisions",
    _SETTINGS: "setting in force",
    _BLOCKS: "blocks",
    _OTHERS: "memory plans, sections, refusals, errors",
}


def chrome_of_run(ranks: Sequence[Rank], *, run: str) -> dict[str, Any]:
    """The object. Times in microseconds, as the format wants them; arguments in SI units."""
    events = [event for rank in ranks for event in _rank(rank)]
    lead = ranks[0].started
    other = {
        "run": run,
        "command": " ".join(lead.command),
        "label": lead.device.label.value,
        "kilter": lead.kilter,
        "begin": lead.wall_time,
    }
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


class _Axis:
    """From the two clocks of a record to the one of the trace, in seconds."""

    def __init__(self, rank: Rank) -> None:
        known = [(s.t_s, s.device_t_s) for s in rank.samples]
        known += [(b.t_s, b.device_end_s) for b in rank.blocks]
        self._virtual = rank.started.device.backend == "sim"
        self._known = sorted(known)
        # Real clocks differ by a constant, but for the delay with which a record is written.
        self._apart_s = statistics.median(t - d for t, d in known) if known else 0.0

    def of_device(self, device_t_s: float) -> float:
        """A time on the clock of the device."""
        return device_t_s if self._virtual else device_t_s + self._apart_s

    def of_run(self, t_s: float) -> float:
        """A time on the clock of the run."""
        if not self._virtual or not self._known:
            return t_s
        place = bisect_right(self._known, t_s, key=lambda pair: pair[0])
        if place == 0:
            return self._known[0][1]
        if place == len(self._known):
            return self._known[-1][1]
        (t0, d0), (t1, d1) = self._known[place - 1], self._known[place]
        return d0 + (d1 - d0) * (t_s - t0) / (t1 - t0)


def _rank(rank: Rank) -> Iterator[dict[str, Any]]:
    started, axis = rank.started, _Axis(rank)
    pid = started.rank
    name = f"rank {pid}: {started.device.name} [{started.device.label.value}]"
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, track in _TRACKS.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}}
        order = {"sort_index": tid}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": order}
    for event in (*_decisions(rank, axis), *_blocks(rank, axis), *_others(rank, axis)):
        yield {"pid": pid, **event}
    for event in (*_sensors(rank.samples, axis), *_memory(rank, axis)):
        yield {"ph": "C", "pid": pid, **event}


def _decisions(rank: Rank, axis: _Axis) -> Iterator[dict[str, Any]]:
    """Each is the state until the next one; the last one, until the record ends or an error of ours
    undoes it."""
    last_s = rank.failed[0].t_s if rank.failed else rank.last_s
    for place, decision in enumerate(rank.decisions, start=1):
        end_s = rank.decisions[place].t_s if place < len(rank.decisions) else last_s
        args = {
            "setting": str(decision.setting),
            "reason": decision.reason,
            "time_ratio": decision.time_ratio,
            "energy_ratio": decision.energy_ratio,
        }
        name = f"{decision.state}: {decision.setting}"
        begin_s = axis.of_run(decision.t_s)
        yield _span(_DECISIONS, "decision", name, begin_s, axis.of_run(end_s), args)


def _blocks(rank: Rank, axis: _Axis) -> Iterator[dict[str, Any]]:
    blocks = sorted(rank.blocks, key=lambda block: block.device_begin_s)
    for block in blocks:
        begin_s, end_s = axis.of_device(block.device_begin_s), axis.of_device(block.device_end_s)
        name = f"{block.phase} {block.arm}{'' if block.clean else ' (left out)'}"
        args = {"setting": str(block.setting)} | taken(block, _OF_BLOCK)
        yield _span(_BLOCKS, block.phase, name, begin_s, end_s, args)
    for setting, group in groupby(blocks, key=lambda block: block.setting):
        held = list(group)
        begin_s = axis.of_device(held[0].device_begin_s)
        end_s = axis.of_device(held[-1].device_end_s)
        args = {
            "sm_clock_hz": setting.sm_clock_hz,
            "memory_clock_hz": setting.memory_clock_hz,
            "power_limit_w": setting.power_limit_w,
            "blocks": len(held),
        }
        yield _span(_SETTINGS, "setting", str(setting), begin_s, end_s, args)


_OF_BLOCK = ("number", "pair", "iterations", "iteration_s", "energy_j", "rehearsed", "why_not")


def _others(rank: Rank, axis: _Axis) -> Iterator[dict[str, Any]]:
    marks: list[tuple[float, str, str, str]] = [
        (r.t_s, "refused", f"refused: {r.what}", r.reason) for r in rank.refused
    ]
    marks += [(e.t_s, "error", f"error of ours: {e.where}", e.error) for e in rank.failed]
    marks += [
        (f.t_s, "memory", f"memory plan ({f.planner})", f"{f.swapped} offloaded, {f.kept} kept")
        for f in rank.fitted
    ]
    marks += [(s.t_s, "sections", "sections", s.summary) for s in rank.sectioned]
    if rank.stopped is not None:
        end = rank.stopped
        restored = "the found setting is back" if end.restored else "NOT restored"
        marks.append((end.t_s, "end", f"ended: {end.outcome}", restored))
    for t_s, category, name, text in sorted(marks, key=lambda mark: mark[0]):
        yield {
            "ph": "i",
            "s": "p",
            "tid": _OTHERS,
            "cat": category,
            "name": name,
            "ts": axis.of_run(t_s) * 1e6,
            "args": {"text": text},
        }


def _sensors(samples: Sequence[Sampled], axis: _Axis) -> Iterator[dict[str, Any]]:
    for sample in samples:
        readings = {
            "power (W)": sample.power_w,
            "SM clock (MHz)": _scaled(sample.sm_clock_hz, MHZ),
            "memory clock (MHz)": _scaled(sample.memory_clock_hz, MHZ),
            "busy (%)": _scaled(sample.sm_utilisation, 0.01),
            "temperature (C)": sample.temperature_c,
        }
        yield from _counters(axis.of_device(sample.device_t_s), readings)


def _memory(rank: Rank, axis: _Axis) -> Iterator[dict[str, Any]]:
    for moved in rank.moved:
        readings = {
            "peak memory (GiB)": _scaled(moved.peak_bytes, GIB),
            "memory budget (GiB)": _scaled(moved.budget_bytes, GIB),
            "host memory (GiB)": _scaled(moved.host_bytes, GIB),
        }
        yield from _counters(axis.of_run(moved.t_s), readings)
    for before, moved in pairwise(rank.moved):
        seconds = moved.t_s - before.t_s
        if seconds > 0.0:
            rates: dict[str, float | None] = {
                "offload (GiB/s)": (moved.out_bytes - before.out_bytes) / GIB / seconds,
                "prefetch (GiB/s)": (moved.in_bytes - before.in_bytes) / GIB / seconds,
            }
            yield from _counters(axis.of_run(before.t_s), rates)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _counters(t_s: float, readings: dict[str, float | None]) -> Iterator[dict[str, Any]]:
    for name, value in readings.items():
        if value is not None and math.isfinite(value):
            yield {"name": name, "ts": t_s * 1e6, "args": {"value": value}}


def _span(
    tid: int, category: str, name: str, begin_s: float, end_s: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "tid": tid,
        "cat": category,
        "name": name,
        "ts": begin_s * 1e6,
        "dur": max(0.0, end_s - begin_s) * 1e6,
        "args": {key: value for key, value in args.items() if value is not None},
    }
