"""The event simulator that judges every schedule: transfers, waiting, memory.

It shares no code with the planners. Compute runs the operations in order; one channel a direction
serves transfers first in, first out; while both are busy they share the link. Before operation `k`

1. every release due at `k` waits until its transfer to the host is complete, and frees the memory;
2. every load due at `k` takes memory and is queued for the transfer to the device;
3. the operation waits for what it needs, and recomputes what is to be recomputed.

A transfer to the host starts no earlier than the end of the operation before the gap. Waiting is
counted as stall. What wraps around the iteration begins and ends it evicted, its last copy done.
Nothing is trusted: what is not resident when used, more memory than the budget, or a load that does
not follow its release is reported as a fault.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kilter.memory.plan.problem import IdleInterval, Link, Problem


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One interval that is offloaded after its use: its memory is free from operation `release` on,
    and its transfer back may start from operation `load` on."""

    interval: int
    release: int
    load: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is offloaded and what is recomputed; every other interval is kept."""

    moves: tuple[Move, ...] = ()
    recomputed: tuple[int, ...] = ()


class Span(NamedTuple):
    """One piece of the timeline: `lane` is compute, recompute, stall, out or in."""

    lane: str
    index: int  # type: ignore[assignment]  # a tuple's method, which nobody calls here
    """It is an operation (compute, stall) or an interval (recompute, out, in)."""
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
    """It is empty for a correct schedule."""


class _State(enum.Enum):
    RESIDENT = "on the device"
    EVICTED = "evicted"
    PREFETCHING = "on its way in"


class _Lane:
    """One direction of the link: transfers, first in, first out."""

    __slots__ = ("bytes_left", "index", "latency_left_s", "name", "queue", "rate", "start_s")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name = name
        self.rate = bytes_per_s
        self.queue: deque[tuple[int, int]] = deque()
        """It holds intervals that wait, and their sizes."""
        self.index: int | None = None
        """The interval with this index is under way."""
        self.latency_left_s = self.bytes_left = self.start_s = 0.0

    def start(self, latency_s: float, now_s: float) -> None:
        self.index, self.bytes_left = self.queue.popleft()
        self.latency_left_s, self.start_s = latency_s, now_s


class _Channels:
    """Two first-in-first-out channels that share the link while both are moving bytes.

    Between two events (a latency is over, a transfer is done) nothing changes, so the next event is
    computed once, and nobody asks in between.
    """

    def __init__(self, link: Link, record: Callable[[Span], None]) -> None:
        self._link = link
        self._record = record
        self._now_s = 0.0
        """Transfers are accounted for up to here."""
        self._span_s = self._event_s = math.inf
        """`_span_s` leads from there to the next event, and `_event_s` is when that is."""
        self._factor = 1.0
        self._out = _Lane("out", link.to_host_bytes_per_s)
        self._in = _Lane("in", link.to_device_bytes_per_s)
        self._both = self._out, self._in
        self._out_done: set[int] = set()
        self._in_done: set[int] = set()

    def put_out(self, index: int, size_bytes: int, now_s: float) -> None:
        self._put(self._out, index, size_bytes, now_s)

    def put_in(self, index: int, size_bytes: int, now_s: float) -> None:
        self._put(self._in, index, size_bytes, now_s)

    def wait_out(self, index: int) -> float:
        """Run until this transfer is done; a time by which it is. Infinite if it was never put."""
        return self._wait(self._out_done, index)

    def wait_in(self, index: int) -> float:
        return self._wait(self._in_done, index)

    def _put(self, lane: _Lane, index: int, size_bytes: int, now_s: float) -> None:
        while self._event_s <= now_s:
            self._step()
        lane.queue.append((index, size_bytes))
        if lane.index is None:
            self._move(now_s - self._now_s)
            self._now_s = now_s
            self._go_on()

    def _wait(self, done: set[int], index: int) -> float:
        while index not in done:
            if self._event_s == math.inf:
                return math.inf
            self._step()
        return self._now_s

    def _step(self) -> None:
        """Advance to the next event."""
        self._move(self._span_s)
        self._now_s = self._event_s
        for lane, done in ((self._out, self._out_done), (self._in, self._in_done)):
            # Less than a thousandth of a byte left: rounding.
            if lane.index is not None and lane.bytes_left < 1e-3:
                self._record(Span(lane.name, lane.index, lane.start_s, self._now_s))
                done.add(lane.index)
                lane.index = None
        self._go_on()

    def _move(self, span_s: float) -> None:
        """Time passes without an event."""
        for lane in self._both:
            if lane.index is None:
                continue
            if lane.latency_left_s > 0:
                lane.latency_left_s -= span_s
                if lane.latency_left_s < 1e-15:
                    lane.latency_left_s = 0.0
            else:
                lane.bytes_left -= lane.rate * self._factor * span_s

    def _go_on(self) -> None:
        """Start what waits, and find the next event."""
        moving = 0
        for lane in self._both:
            if lane.index is None:
                if not lane.queue:
                    continue
                lane.start(self._link.latency_s, self._now_s)
            moving += lane.latency_left_s <= 0
        factor = self._factor = self._link.shared if moving == 2 else 1.0
        span_s = math.inf
        for lane in self._both:
            if lane.index is not None:
                left_s = lane.latency_left_s
                if left_s <= 0:
                    left_s = lane.bytes_left / (lane.rate * factor)
                if left_s < span_s:
                    span_s = left_s
        self._span_s = span_s
        self._event_s = self._now_s + span_s


class _Timetable:
    """What is due at each operation."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        intervals = problem.intervals
        recomputed = frozenset(schedule.recomputed)
        given = [Move(i, *j.moved) for i, j in enumerate(intervals) if j.moved is not None]
        every = (*schedule.moves, *given)
        self.around = [move.interval for move in every if intervals[move.interval].wraps]
        """These intervals are evicted where the iteration begins and where it ends."""
        self.due = problem.deadlines(recomputed)
        for index in self.around:
            self.due[index] = intervals[index].after
        self.leave: dict[int, list[Move]] = {}
        self.release: dict[int, list[Move]] = {}
        self.load: dict[int, list[Move]] = {}
        for move in every:
            self.leave.setdefault(intervals[move.interval].after, []).append(move)
            self.release.setdefault(move.release, []).append(move)
            self.load.setdefault(move.load, []).append(move)
        for moves in self.load.values():
            moves.sort(key=lambda move: (self.due[move.interval], move.interval))
        self.drop: dict[int, list[int]] = {}
        self.recompute: dict[int, list[int]] = {}
        for index in sorted(recomputed):
            self.drop.setdefault(intervals[index].after, []).append(index)
            self.recompute.setdefault(self.due[index], []).append(index)
        self.touched = sorted({*recomputed, *(move.interval for move in every)})
        self.needed: dict[int, list[int]] = {}
        for index in self.touched:
            interval = intervals[index]
            last = interval.after if interval.wraps else interval.before
            for operation in {interval.after, self.due[index], last}:
                self.needed.setdefault(operation, []).append(index)


class _Iteration:
    """One iteration as it runs: clock, memory, where the intervals are, and what was wrong."""

    def __init__(self, problem: Problem, timetable: _Timetable) -> None:
        self._problem = problem
        self._timetable = timetable
        self._state = dict.fromkeys(timetable.touched, _State.RESIDENT)
        self._state |= dict.fromkeys(timetable.around, _State.EVICTED)
        self._spans: list[Span] = []
        self._faults: list[str] = []
        self._channels = _Channels(problem.link, self._spans.append)
        self._clock_s = self._stall_s = self._recompute_s = 0.0
        self._peak_bytes = self._out_bytes = self._in_bytes = 0
        self._offload_bytes = sum(problem.intervals[i].size_bytes for i in timetable.around)

    def run(self) -> SimulatedPass:
        due = self._timetable
        for operation, duration_s in enumerate(self._problem.operation_s):
            if operation in due.release:
                self._release(operation, due.release[operation])
            if operation in due.load:
                self._load(operation, due.load[operation])
            users = due.needed.get(operation, ())
            if users:
                self._arrive(operation, users)
            if operation in due.recompute:
                self._recompute(operation, due.recompute[operation])
            self._check(operation, users)
            end_s = self._clock_s + duration_s
            self._spans.append(Span("compute", operation, self._clock_s, end_s))
            self._clock_s = end_s
            if operation in due.leave:
                self._leave(due.leave[operation])
            if operation in due.drop:
                self._drop(due.drop[operation])
        end = len(self._problem.operation_s)
        self._release(end, due.release.get(end, ()))
        for index, where in self._state.items():
            if where is not (_State.EVICTED if index in due.around else _State.RESIDENT):
                name = self._problem.intervals[index].name
                self._faults.append(f"{name}: {where.value} at the end of the iteration")
        return SimulatedPass(
            iteration_s=self._clock_s,
            peak_bytes=self._peak_bytes,
            stall_s=self._stall_s,
            recompute_s=self._recompute_s,
            out_bytes=self._out_bytes,
            in_bytes=self._in_bytes,
            spans=tuple(self._spans),
            faults=tuple(self._faults),
        )

    def _stall(self, operation: int, until_s: float) -> None:
        if until_s == math.inf:
            self._faults.append(f"operation {operation} waits for a transfer that never starts")
        elif until_s > self._clock_s:
            self._spans.append(Span("stall", operation, self._clock_s, until_s))
            self._stall_s += until_s - self._clock_s
            self._clock_s = until_s

    def _release(self, operation: int, moves: Sequence[Move]) -> None:
        for move in moves:
            interval = self._problem.intervals[move.interval]
            if operation <= interval.after or self._state[move.interval] is not _State.RESIDENT:
                self._faults.append(
                    f"{interval.name}: released at operation {operation} while in use"
                )
            self._stall(operation, self._channels.wait_out(move.interval))
            self._state[move.interval] = _State.EVICTED
            self._offload_bytes += interval.size_bytes

    def _load(self, operation: int, moves: Sequence[Move]) -> None:
        for move in moves:
            interval = self._problem.intervals[move.interval]
            if self._state[move.interval] is not _State.EVICTED:
                self._faults.append(
                    f"{interval.name}: loaded at operation {operation} before it left"
                )
            self._state[move.interval] = _State.PREFETCHING
            self._offload_bytes -= interval.size_bytes
            self._in_bytes += interval.size_bytes
            self._channels.put_in(move.interval, interval.size_bytes, self._clock_s)

    def _arrive(self, operation: int, users: Sequence[int]) -> None:
        for index in users:
            if self._state[index] is _State.PREFETCHING and self._timetable.due[index] == operation:
                self._stall(operation, self._channels.wait_in(index))
                self._state[index] = _State.RESIDENT

    def _recompute(self, operation: int, indices: Sequence[int]) -> None:
        for index in indices:
            interval = self._problem.intervals[index]
            if interval.recompute_s is None:
                self._faults.append(f"{interval.name}: cannot be recomputed")
                continue
            self._check_sources(operation, interval)
            end_s = self._clock_s + interval.recompute_s
            self._spans.append(Span("recompute", index, self._clock_s, end_s))
            self._clock_s = end_s
            self._recompute_s += interval.recompute_s
            if self._state[index] is not _State.EVICTED:
                self._faults.append(f"{interval.name}: recomputed but never dropped")
            self._state[index] = _State.RESIDENT
            self._offload_bytes -= interval.size_bytes

    def _check_sources(self, operation: int, interval: IdleInterval) -> None:
        for index in interval.needs:
            source = self._problem.intervals[index]
            covers = source.after < operation <= source.before
            if covers and self._state.get(index, _State.RESIDENT) is not _State.RESIDENT:
                self._faults.append(f"{interval.name}: recomputed while {source.name} is evicted")

    def _check(self, operation: int, users: Sequence[int]) -> None:
        """The operation runs now."""
        for index in users:
            if self._state[index] is not _State.RESIDENT:
                found = f"{self._problem.intervals[index].name}: {self._state[index].value}"
                self._faults.append(f"{found} when operation {operation} uses it")
        used_bytes = self._problem.resident_bytes[operation] - self._offload_bytes
        if used_bytes > self._peak_bytes:
            self._peak_bytes = used_bytes
        if used_bytes > self._problem.budget_bytes:
            self._faults.append(
                f"operation {operation} needs {used_bytes} bytes of {self._problem.budget_bytes}"
            )

    def _leave(self, moves: Sequence[Move]) -> None:
        for move in moves:
            size_bytes = self._problem.intervals[move.interval].size_bytes
            self._out_bytes += size_bytes
            self._channels.put_out(move.interval, size_bytes, self._clock_s)

    def _drop(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._state[index] = _State.EVICTED
            self._offload_bytes += self._problem.intervals[index].size_bytes


def simulate(problem: Problem, schedule: Schedule) -> SimulatedPass:
    """Run one iteration of `problem` under `schedule`."""
    return _Iteration(problem, _Timetable(problem, schedule)).run()
