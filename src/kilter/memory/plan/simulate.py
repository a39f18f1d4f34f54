"""The event simulator that judges every schedule: channels, events, allocator.

It shares no code with the planners. Compute runs the operations in order; one channel a direction
serves transfers first in, first out; while both are busy they share the link. Before operation `k`

1. every release due at `k` waits until its transfer to the host is complete, and frees the memory;
2. every load due at `k` takes memory and joins the queue to the device;
3. the operation waits for what it needs, and recomputes what is to be recomputed.

A transfer to the host starts no earlier than the end of the operation before the gap. Waiting is
counted as stall. Nothing is trusted: what is not resident when used, more memory than the budget,
or a load that does not follow its release is reported as a fault.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kilter.memory.plan.problem import Link, Problem


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One swap: `interval` leaves after its use, its memory is free from operation `release` on,
    and it is loaded again from operation `load` on."""

    interval: int
    release: int
    load: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is swapped and what is recomputed; every other interval is kept."""

    moves: tuple[Move, ...] = ()
    recomputed: tuple[int, ...] = ()


class Span(NamedTuple):
    """One piece of the timeline: `lane` is compute, recompute, stall, out or in."""

    lane: str
    index: int  # type: ignore[assignment]  # a tuple's method, which nobody calls here
    """Operation (compute, stall) or interval (recompute, out, in)."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPass:
    """What a schedule does. `label` of these numbers: simulated."""

    iteration_s: float
    peak_bytes: int
    stall_s: float
    recompute_s: float
    out_bytes: int
    in_bytes: int
    spans: tuple[Span, ...]
    faults: tuple[str, ...]
    """Empty for a correct schedule."""


class _State(enum.Enum):
    HERE = "on the device"
    AWAY = "away"
    COMING = "on its way in"


@dataclass(slots=True)
class _Transfer:
    index: int
    latency_left_s: float
    bytes_left: float
    start_s: float


class _Channels:
    """Two first-in-first-out channels that share the link while both are moving bytes.

    Between two events (a latency is over, a transfer is done) nothing changes, so the next event is
    computed once, and nobody asks in between.
    """

    def __init__(self, link: Link, record: Callable[[Span], None]) -> None:
        self._link = link
        self._record = record
        self._now_s = 0.0
        """Up to here transfers are accounted for."""
        self._span_s = self._event_s = math.inf
        """From there to the next event, and when that is."""
        self._factor = 1.0
        self._rates = {"out": link.to_host_bytes_per_s, "in": link.to_device_bytes_per_s}
        self._queues: dict[str, deque[tuple[int, int]]] = {"out": deque(), "in": deque()}
        self._current: dict[str, _Transfer] = {}
        self._done: set[tuple[str, int]] = set()

    def put(self, lane: str, index: int, size_bytes: int, now_s: float) -> None:
        while self._event_s <= now_s:
            self._step()
        self._queues[lane].append((index, size_bytes))
        if lane not in self._current:
            self._move(now_s - self._now_s)
            self._now_s = now_s
            self._go_on()

    def wait(self, lane: str, index: int) -> float:
        """Run until this transfer is done; a time by which it is. Infinite if it was never put."""
        while (lane, index) not in self._done:
            if self._event_s == math.inf:
                return math.inf
            self._step()
        return self._now_s

    def _step(self) -> None:
        """Advance to the next event."""
        self._move(self._span_s)
        self._now_s = self._event_s
        for lane, transfer in list(self._current.items()):
            if transfer.bytes_left < 1e-3:  # a thousandth of a byte: rounding
                self._record(Span(lane, transfer.index, transfer.start_s, self._now_s))
                self._done.add((lane, transfer.index))
                del self._current[lane]
        self._go_on()

    def _move(self, span_s: float) -> None:
        """Time passes without an event."""
        for lane, transfer in self._current.items():
            if transfer.latency_left_s > 0:
                transfer.latency_left_s -= span_s
                if transfer.latency_left_s < 1e-15:
                    transfer.latency_left_s = 0.0
            else:
                transfer.bytes_left -= self._rates[lane] * self._factor * span_s

    def _go_on(self) -> None:
        """Start what waits, and find the next event."""
        for lane, queue in self._queues.items():
            if queue and lane not in self._current:
                index, size_bytes = queue.popleft()
                self._current[lane] = _Transfer(
                    index, self._link.latency_s, float(size_bytes), self._now_s
                )
        moving = sum(transfer.latency_left_s <= 0 for transfer in self._current.values())
        self._factor = self._link.shared if moving == 2 else 1.0
        self._span_s = math.inf
        for lane, transfer in self._current.items():
            left_s = transfer.latency_left_s
            if left_s <= 0:
                left_s = transfer.bytes_left / (self._rates[lane] * self._factor)
            self._span_s = min(self._span_s, left_s)
        self._event_s = self._now_s + self._span_s


def simulate(problem: Problem, schedule: Schedule) -> SimulatedPass:
    """Run one iteration of `problem` under `schedule`."""
    intervals = problem.intervals
    spans: list[Span] = []
    faults: list[str] = []
    channels = _Channels(problem.link, spans.append)
    recomputed = frozenset(schedule.recomputed)
    due = problem.deadlines(recomputed)

    leave: dict[int, list[Move]] = {}
    release: dict[int, list[Move]] = {}
    load: dict[int, list[Move]] = {}
    for move in schedule.moves:
        leave.setdefault(intervals[move.interval].after, []).append(move)
        release.setdefault(move.release, []).append(move)
        load.setdefault(move.load, []).append(move)
    for moves in load.values():
        moves.sort(key=lambda move: (due[move.interval], move.interval))
    drop: dict[int, list[int]] = {}
    recompute: dict[int, list[int]] = {}
    for index in sorted(recomputed):
        drop.setdefault(intervals[index].after, []).append(index)
        recompute.setdefault(due[index], []).append(index)
    touched = {*recomputed, *(move.interval for move in schedule.moves)}
    state = dict.fromkeys(sorted(touched), _State.HERE)
    needed: dict[int, list[int]] = {}
    for index in state:
        for operation in {intervals[index].after, due[index], intervals[index].before}:
            needed.setdefault(operation, []).append(index)

    clock_s = 0.0
    stall_s = 0.0
    recompute_s = 0.0
    away_bytes = 0
    peak_bytes = 0
    out_bytes = 0
    in_bytes = 0

    def stall(operation: int, until_s: float) -> None:
        nonlocal clock_s, stall_s
        if until_s == math.inf:
            faults.append(f"operation {operation} waits for a transfer that never starts")
        elif until_s > clock_s:
            spans.append(Span("stall", operation, clock_s, until_s))
            stall_s += until_s - clock_s
            clock_s = until_s

    for operation, duration_s in enumerate(problem.operation_s):
        for move in release.get(operation, ()):
            interval = intervals[move.interval]
            if operation <= interval.after or state[move.interval] is not _State.HERE:
                faults.append(f"{interval.name}: released at operation {operation} while in use")
            if not interval.clean:
                stall(operation, channels.wait("out", move.interval))
            state[move.interval] = _State.AWAY
            away_bytes += interval.size_bytes
        for move in load.get(operation, ()):
            interval = intervals[move.interval]
            if state[move.interval] is not _State.AWAY:
                faults.append(f"{interval.name}: loaded at operation {operation} before it left")
            state[move.interval] = _State.COMING
            away_bytes -= interval.size_bytes
            in_bytes += interval.size_bytes
            channels.put("in", move.interval, interval.size_bytes, clock_s)
        users = needed.get(operation, ())
        for index in users:
            if state[index] is _State.COMING and due[index] == operation:
                stall(operation, channels.wait("in", index))
                state[index] = _State.HERE
        for index in recompute.get(operation, ()):
            interval = intervals[index]
            if interval.recompute_s is None:
                faults.append(f"{interval.name}: cannot be recomputed")
                continue
            for other in interval.needs:
                covers = intervals[other].after < operation <= intervals[other].before
                if covers and state.get(other, _State.HERE) is not _State.HERE:
                    faults.append(
                        f"{interval.name}: recomputed while {intervals[other].name} is away"
                    )
            spans.append(Span("recompute", index, clock_s, clock_s + interval.recompute_s))
            clock_s += interval.recompute_s
            recompute_s += interval.recompute_s
            if state[index] is not _State.AWAY:
                faults.append(f"{interval.name}: recomputed but never dropped")
            state[index] = _State.HERE
            away_bytes -= interval.size_bytes
        for index in users:
            if state[index] is not _State.HERE:
                found = f"{intervals[index].name}: {state[index].value}"
                faults.append(f"{found} when operation {operation} uses it")
        used_bytes = problem.resident_bytes[operation] - away_bytes
        peak_bytes = max(peak_bytes, used_bytes)
        if used_bytes > problem.budget_bytes:
            faults.append(
                f"operation {operation} needs {used_bytes} bytes of {problem.budget_bytes}"
            )
        spans.append(Span("compute", operation, clock_s, clock_s + duration_s))
        clock_s += duration_s
        for move in leave.get(operation, ()):
            if not intervals[move.interval].clean:
                out_bytes += intervals[move.interval].size_bytes
                channels.put("out", move.interval, intervals[move.interval].size_bytes, clock_s)
        for index in drop.get(operation, ()):
            state[index] = _State.AWAY
            away_bytes += intervals[index].size_bytes
    for index, where in state.items():
        if where is not _State.HERE:
            faults.append(f"{intervals[index].name}: {where.value} at the end of the iteration")
    return SimulatedPass(
        iteration_s=clock_s,
        peak_bytes=peak_bytes,
        stall_s=stall_s,
        recompute_s=recompute_s,
        out_bytes=out_bytes,
        in_bytes=in_bytes,
        spans=tuple(spans),
        faults=tuple(faults),
    )
