"""Kineto's JSON (what `torch.profiler` writes) to an `IterationTrace`. Pure: no torch, no clock.

Operations are named after the module that they belong to where our own annotations are in the
trace (see `window`), else after the framework's operation, else after the kernel. Where the trace
has GPU kernels, the times are the GPU's: a kernel belongs to the framework operation that
launched it (correlation id), the iteration to which its launch belongs, and its stream; what no
stream covers is a gap. Without kernels, times are self times on the host's timeline.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

import msgspec

from kilter.core.errors import FileError
from kilter.core.label import Label
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.core.units import MICRO
from kilter.model.intervals import Interval, Times, difference, intersection, length, union
from kilter.observe.trace_events import MOST_US, ON_DEVICE, TraceFile, left_out
from kilter.observe.traffic import bytes_moved

MODULE = "kilter::module::"
"""The annotation of a module's forward begins so; the qualified name follows."""
ITERATION_END = "kilter::iteration_end"
"""The annotation stands, without length, between two iterations."""

Flops = Callable[[str, Sequence[Any], Sequence[Any]], float | None]
"""It is called as `flops(operation, shapes of inputs, values of inputs)` and gives None for an
operation not counted."""

_MERGED_GAP_S = {"gpu": 2e-6, "host": 20e-6}
"""Shorter gaps are added to the next longer one."""
_COLLECTIVE = re.compile(r"nccl|rccl|msccl|all_?reduce|all_?gather|reduce_?scatter", re.I)
_HOST_COLLECTIVE = re.compile(r"c10d::|gloo:|nccl:|record_param_comms")
_COPY = re.compile(r"Memcpy (HtoD|DtoH|PtoP)")
_HOST_COPY = {"aten::copy_", "aten::to", "aten::_to_copy", "aten::pin_memory"}
_DATA_WAIT = re.compile(r"enumerate\(DataLoader\)#.*__next__")
_BACKWARD = "autograd::engine::evaluate_function: "
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}


class TraceEvent(msgspec.Struct, frozen=True):
    """One entry of `traceEvents`; times in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    tid: int | str = 0
    ts: float | None = 0.0
    dur: float | None = 0.0
    args: dict[str, Any] | None = None

    @property
    def begin(self) -> float:
        """Infinite, as `length`, where the file has no number."""
        return inf if self.ts is None else self.ts

    @property
    def length(self) -> float:
        return inf if self.dur is None else self.dur

    @property
    def end(self) -> float:
        return self.begin + self.length

    @property
    def possible(self) -> bool:
        return self.length >= 0.0 and abs(self.begin) + self.length <= MOST_US

    def arg(self, name: str, *kinds: type) -> Any:
        """None for an argument of another kind as well: any program may have written the file."""
        value = self.args.get(name) if self.args else None
        return value if isinstance(value, kinds) else None


def read_kineto(
    path: str | os.PathLike[str],
    *,
    flops: Flops | None = None,
    iterations: int | None = None,
    iteration_s: float | None = None,
    device: str = "",
    breathe: Callable[[], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> IterationTrace:
    """The mean iteration of a trace file, plain or gzip.

    Iterations are told apart by our annotations; in traces of others by `ProfilerStep#n`, ends of
    optimizer steps, or the period of the kernels' names, unless `iterations` says how many equal
    pieces the trace holds. `iteration_s` is the time of an iteration without the profiler where
    that is known: kernels keep their times, gaps shrink or grow to fit (on the host's timeline
    all times do). `breathe` is called now and then, for a caller that shares the interpreter with
    something more important; `warn` gets a sentence where something was left out. Without `flops`
    no bytes of operations are counted either: a product of matrices of which only the bytes are
    known looks memory-bound.

    `FileError` if the file is missing, malformed or truncated, or holds no work.
    """
    file = TraceFile(path, TraceEvent)
    reader = _Trace(list(file), file.devices, str(path), flops, breathe or (lambda: None))
    if warn is not None and reader.left_out:
        warn(reader.left_out)
    return reader.trace(iterations, iteration_s, device)


@dataclass(frozen=True, slots=True)
class _Owner:
    """What a piece of work belongs to."""

    name: str
    kind: Kind


@dataclass(slots=True)
class _Work:
    """FLOPs and bytes of one framework operation, until its first piece of time takes them."""

    flops: float = 0.0
    bytes_moved: float = 0.0

    def take(self) -> tuple[float, float]:
        taken = self.flops, self.bytes_moved
        self.flops = self.bytes_moved = 0.0
        return taken


@dataclass(slots=True)
class _Piece:
    """Time of one owner on one stream: a kernel, or a stretch of the host's self time."""

    begin: float
    end: float
    owner: _Owner
    stream: int
    launched: float
    """This host time says to which iteration it belongs."""
    flops: float = 0.0
    bytes_moved: float = 0.0
    kernels: int = 1
    iteration: int = -1


@dataclass(slots=True)
class _Open:
    """An event of the host that has begun and not ended."""

    end: float
    owner: _Owner | None
    busy: bool
    backward: bool
    operation: _Work | None
    """It has the bytes of the innermost operation where kernels tell what it does, else of the
    outermost."""
    sized: _Work | None
    """It has the FLOPs of the outermost operation that has a formula; those inside are parts of
    it."""

    def take(self) -> tuple[float, float]:
        """FLOPs and bytes that no piece of time has taken yet."""
        taken = [work.take() for work in (self.operation, self.sized) if work is not None]
        return sum(flops for flops, _ in taken), sum(bytes_ for _, bytes_ in taken)


@dataclass(slots=True)
class _Thread:
    stack: list[_Open] = field(default_factory=list)
    cursor: float = 0.0
    last_backward: _Owner | None = None


class _Trace:
    """One pass over the host's events in order of time, then the timelines."""

    def __init__(
        self,
        events: Sequence[TraceEvent],
        devices: list[str],
        where: str,
        flops: Flops | None,
        breathe: Callable[[], None],
    ) -> None:
        timed = [e for e in events if e.ph == "X" and e.cat in _HOST | ON_DEVICE]
        spans = [e for e in timed if e.possible]
        self.left_out = left_out(Counter(e.name for e in timed if not e.possible))
        """It names events whose times cannot be; empty: there are none."""
        # The host's clock wins ties so that a parent comes before its first child.
        self._host = sorted(
            (e for e in spans if e.cat in _HOST), key=lambda e: (e.begin, -e.length)
        )
        self._device_events = sorted(
            (e for e in spans if e.cat in ON_DEVICE), key=lambda e: e.begin
        )
        self._devices = devices
        self._where = where
        self._flops = flops
        self._breathe = breathe
        self._threads: defaultdict[int | str, _Thread] = defaultdict(_Thread)
        self._forward: dict[int, str] = {}
        """It maps the sequence number of an operation in the forward pass to its owner's name."""
        self._launched: dict[int, tuple[float, _Open | None]] = {}
        """It says, by correlation id, when, and inside which event, a kernel was launched."""
        self._pieces: dict[int | str, list[_Piece]] = defaultdict(list)
        self._waits: list[Interval] = []
        if not self._host and not self._device_events:
            raise FileError(f"{where}: holds no operations and no kernels")

    def trace(
        self, iterations: int | None, iteration_s: float | None, device: str
    ) -> IterationTrace:
        for i, event in enumerate(self._host):
            self._begin(event)
            if i % 64 == 63:
                self._breathe()
        for name, thread in self._threads.items():
            self._close(name, thread, float("inf"))
        timeline = "gpu" if self._device_events else "host"
        pieces = self._kernels() if self._device_events else self._main_thread()
        spans = self._number(pieces, iterations, iteration_s) if pieces else []
        units = [_Unit.group([p for p in pieces if p.iteration == i]) for i in range(len(spans))]
        if not any(units):
            raise FileError(f"{self._where}: holds no operations that take time")
        spans = [span for span, of_one in zip(spans, units, strict=True) if of_one]
        mean, length_us, count = _average([u for u in units if u], spans, self._waits)
        name = device or next(iter(self._devices), "") or ("cpu" if timeline == "host" else "gpu")
        return IterationTrace(
            iteration_s=iteration_s or length_us * MICRO,
            operations=_lay_out(mean, length_us * MICRO, iteration_s, timeline),
            timeline=timeline,
            device=name,
            label=Label.MEASURED,
            iterations=count,
            source=self._where,
        )

    # The host's events, in order of their begin.

    def _begin(self, event: TraceEvent) -> None:
        thread = self._threads[event.tid]
        self._close(event.tid, thread, event.begin)
        parent = thread.stack[-1] if thread.stack else None
        if event.cat in ("cuda_runtime", "cuda_driver"):
            correlation = event.arg("correlation", int, str)
            if correlation is not None:
                self._launched[correlation] = (event.begin, parent)
            return
        if event.name == ITERATION_END:
            return
        self._flow(event.tid, thread, event.begin)
        opened = self._open(event, parent, thread)
        thread.stack.append(opened)
        if opened.operation is not None and (parent is None or parent.operation is None):
            self._pieces[event.tid].append(
                _Piece(event.begin, event.begin, opened.owner or _OTHER, 0, event.begin)
            )

    def _open(self, event: TraceEvent, parent: _Open | None, thread: _Thread) -> _Open:
        backward = event.name.startswith(_BACKWARD) or (parent is not None and parent.backward)
        owner = self._owner(event, parent, thread, backward)
        annotation = event.cat == "user_annotation" or event.name.startswith("kilter::")
        waits = owner is not None and owner.kind is Kind.DATA_WAIT
        if waits and (parent is None or not parent.busy):
            self._waits.append((event.begin, event.end))
        compiled = event.name.startswith(_COMPILED)
        busy = not annotation or waits or compiled or (parent is not None and parent.busy)
        sequence = event.arg("Sequence number", int, str)
        if not backward and sequence is not None and owner is not None and not annotation:
            self._forward[sequence] = owner.name
        operation, sized = (parent.operation, parent.sized) if parent else (None, None)
        if not annotation and _is_operation(event.name):
            shapes, types = event.arg("Input Dims", list) or (), event.arg("Input type", list) or ()
            if operation is None or self._device_events:
                known = self._flops is not None
                operation = _Work(bytes_moved=known * bytes_moved(event.name, shapes, types))
            if sized is None and self._flops is not None and shapes:
                count = self._flops(event.name, shapes, event.arg("Concrete Inputs", list) or ())
                if count is not None:
                    sized = _Work(flops=count)
        return _Open(event.end, owner, busy, backward, operation, sized)

    def _owner(
        self, event: TraceEvent, parent: _Open | None, thread: _Thread, backward: bool
    ) -> _Owner | None:
        name, outer = event.name, parent.owner if parent else None
        if name.startswith(MODULE):
            return _Owner(name[len(MODULE) :], Kind.BACKWARD if backward else Kind.FORWARD)
        if name.startswith("Optimizer.") and "#" in name:
            return outer or _Owner(_optimizer(name), Kind.OPTIMIZER)
        if _DATA_WAIT.match(name):
            return _Owner("DataLoader", Kind.DATA_WAIT)
        if name.startswith(_BACKWARD):
            return self._backward(event, thread)
        if _HOST_COLLECTIVE.match(name):
            return _Owner(name, Kind.COLLECTIVE)
        if outer is not None or event.cat == "user_annotation":
            return outer
        if name in _HOST_COPY:
            return _Owner(name, Kind.COPY)
        graded = event.arg("Sequence number", int, str) is not None
        return _Owner(name, Kind.FORWARD if graded else Kind.OTHER)

    def _backward(self, event: TraceEvent, thread: _Thread) -> _Owner:
        name = self._forward.get(event.arg("Sequence number", int, str))
        if name is not None:
            thread.last_backward = _Owner(name, Kind.BACKWARD)
        # Gradients are accumulated right behind the operation that made them.
        return thread.last_backward or _Owner(event.name[len(_BACKWARD) :], Kind.BACKWARD)

    def _close(self, name: int | str, thread: _Thread, now: float) -> None:
        while thread.stack and thread.stack[-1].end <= now:
            self._flow(name, thread, thread.stack[-1].end)
            thread.stack.pop()

    def _flow(self, name: int | str, thread: _Thread, now: float) -> None:
        """The time up to `now` belongs to the innermost open event, unless kernels tell more."""
        if self._device_events:
            return
        top = thread.stack[-1] if thread.stack else None
        if top is not None and top.busy and thread.cursor < now:
            flops, bytes_ = top.take()
            owner = top.owner or _OTHER
            begin = thread.cursor
            self._pieces[name].append(_Piece(begin, now, owner, 0, begin, flops, bytes_, 0))
        thread.cursor = max(thread.cursor, now)

    # The timelines.

    def _main_thread(self) -> list[_Piece]:
        """The pieces of the thread that works most."""
        busy = {n: sum(p.end - p.begin for p in pieces) for n, pieces in self._pieces.items()}
        return self._pieces[max(busy, key=lambda n: busy[n])] if busy else []

    def _kernels(self) -> list[_Piece]:
        """The work of the GPU that works most, in order of begin; `iteration` is still open."""
        busy: defaultdict[Any, float] = defaultdict(float)
        for event in self._device_events:
            busy[event.arg("device", int, str)] += event.length
        device = max(busy, key=lambda d: busy[d])
        return [self._kernel(e) for e in self._device_events if e.arg("device", int, str) == device]

    def _kernel(self, event: TraceEvent) -> _Piece:
        # The GPU runs behind the host: what nobody has launched here was launched before the trace.
        before = -inf if self._launched else event.begin
        launched, parent = self._launched.get(event.arg("correlation", int, str), (before, None))
        flops, bytes_ = parent.take() if parent else (0.0, 0.0)
        owner = parent.owner if parent else None
        if event.cat == "kernel" and _COLLECTIVE.search(event.name):
            owner = _Owner(event.arg("Collective name", str) or _short(event.name), Kind.COLLECTIVE)
        elif event.cat == "gpu_memcpy" and _COPY.match(event.name):
            owner = _Owner(event.name.partition(" (")[0], Kind.COPY)
            bytes_ = event.arg("bytes", int)
        elif owner is None:
            owner = _Owner(_short(event.name), Kind.OTHER)
        stream = event.arg("stream", int) or 0
        return _Piece(event.begin, event.end, owner, stream, launched, flops, float(bytes_ or 0.0))

    # Iterations.

    def _number(
        self, pieces: list[_Piece], iterations: int | None, iteration_s: float | None
    ) -> list[Interval]:
        """Say of each piece to which iteration it belongs (-1: none); the iterations' spans.
        `iteration_s` is the length of an iteration where it is known."""
        iteration_ends = [] if iterations else self._iteration_ends()
        if len(iteration_ends) < 2:
            *begins, last = _equal_parts(pieces, iterations)
            for piece in pieces:
                number = bisect_right(begins, piece.begin) - 1
                piece.iteration = number if piece.begin < last else -1
            return list(pairwise([*begins, last]))
        for piece in pieces:
            number = bisect_right(iteration_ends, piece.launched) - 1
            piece.iteration = number if number < len(iteration_ends) - 1 else -1
        if not self._device_events:
            return list(pairwise(iteration_ends))
        spans: list[Interval] = []
        over: float | None = None
        for i in range(len(iteration_ends) - 1):
            # The profiler's last step has no kernels where it began after the last iteration.
            own = [p for p in pieces if p.iteration == i]
            first = min((p.begin for p in own), default=over or 0.0)
            last = max((p.end for p in own), default=first)
            begin = first if over is None else over
            if over is None and iteration_s is not None:
                # The GPU was idle in front of its first kernel as far as its work does not fill
                # the known time of an iteration: a wait for data, mostly.
                begin = min(first, max(iteration_ends[i], last - iteration_s * 1e6))
            spans.append((begin, max(begin, last)))
            over = spans[-1][1] if own else over
        return spans

    def _iteration_ends(self) -> list[float]:
        """Host times between iterations, from the best witness in the trace."""
        ours = [e.begin for e in self._host if e.name == ITERATION_END]
        if len(ours) >= 2:
            return ours
        steps = [e for e in self._host if e.name.startswith("ProfilerStep#")]
        if steps:
            return [e.begin for e in steps] + [steps[-1].end]
        ends = defaultdict(list)
        for event in self._host:
            if event.name.startswith("Optimizer.step#"):
                ends[event.name].append(event.end)
        return min(ends.values(), key=len, default=[])


_OTHER = _Owner("other", Kind.OTHER)


def _is_operation(name: str) -> bool:
    """Is it an operation of the framework, and not a wrapper around some?"""
    library, colons, _ = name.partition("::")
    return bool(colons) and library not in ("autograd", "torch", "kilter")


def _optimizer(annotation: str) -> str:
    """`Optimizer.step#AdamW.step` -> `AdamW`, `Optimizer.zero_grad#...` -> `AdamW.zero_grad`."""
    what, _, name = annotation.partition("#")
    return name.removesuffix(".step") if what == "Optimizer.step" else name


def _short(kernel: str) -> str:
    """The name of a kernel without its template and arguments."""
    plain = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.split(r"[<(]", plain, maxsplit=1)[0]
    return name.rpartition("::")[2] or kernel


def _equal_parts(pieces: list[_Piece], count: int | None) -> list[float]:
    """The edges of iterations, if the pieces are `count` repetitions, or as many as the kernels of
    the main stream look like."""
    import numpy as np

    from kilter.observe.repetition import starts

    stream = Counter(p.stream for p in pieces).most_common(1)[0][0]
    main = [p for p in pieces if p.stream == stream]
    _, names = np.unique([p.owner.name for p in main], return_inverse=True)
    begins, rest = starts(names, count)
    last = max(p.end for p in pieces) if rest is None else main[rest].begin
    return [min(p.begin for p in pieces), *(main[i].begin for i in begins[1:]), last]


@dataclass(slots=True)
class _Unit:
    """Consecutive pieces of one owner on one stream."""

    owner: _Owner
    stream: int
    begin: float
    busy: Times
    flops: float = 0.0
    bytes_moved: float = 0.0
    kernels: int = 0

    @property
    def key(self) -> tuple[_Owner, int]:
        return self.owner, self.stream

    @staticmethod
    def group(pieces: list[_Piece]) -> list[_Unit]:
        """The pieces of one iteration as units, stream by stream, in order of their begin."""
        units: list[_Unit] = []
        last: dict[int, _Unit] = {}
        for piece in pieces:
            unit = last.get(piece.stream)
            if unit is None or unit.owner != piece.owner:
                unit = last[piece.stream] = _Unit(piece.owner, piece.stream, piece.begin, [])
                units.append(unit)
            unit.busy.append((piece.begin, piece.end))
            unit.flops += piece.flops
            unit.bytes_moved += piece.bytes_moved
            unit.kernels += piece.kernels
        units = [u for u in units if length(u.busy) > 0.0]
        return sorted(units, key=lambda unit: (unit.stream, unit.begin))


@dataclass(slots=True)
class _Row:
    """A unit's means over iterations (s), and the idle times of all streams behind its begin."""

    unit: _Unit
    start_s: float
    duration_s: float
    wait_s: float
    idle_s: float


def _average(
    units: list[list[_Unit]], spans: list[Interval], waits: list[Interval]
) -> tuple[list[_Row], float, int]:
    """Rows, mean length (us) and number of the iterations that were averaged.

    Iterations that consist of different units cannot be averaged: then the one of median length
    stands for all.
    """
    keys = [[u.key for u in of_one] for of_one in units]
    usual = Counter(tuple(k) for k in keys).most_common(1)[0][0]
    alike = [i for i, k in enumerate(keys) if tuple(k) == usual]
    if len(alike) == 1:
        order = sorted(range(len(spans)), key=lambda i: spans[i][1] - spans[i][0])
        alike = [order[len(order) // 2]]
    tables = [_rows(units[i], spans[i], union(waits)) for i in alike]
    mean = []
    for rows in zip(*tables, strict=True):
        n = len(rows)
        unit = replace(
            rows[0].unit,
            flops=sum(r.unit.flops for r in rows) / n,
            bytes_moved=sum(r.unit.bytes_moved for r in rows) / n,
        )
        sums = [
            sum(getattr(r, f) for r in rows) / n
            for f in ("start_s", "duration_s", "wait_s", "idle_s")
        ]
        mean.append(_Row(unit, *sums))
    mean.sort(key=lambda row: row.start_s)
    return mean, sum(length([spans[i]]) for i in alike) / len(alike), len(alike)


def _rows(units: list[_Unit], span: Interval, waits: Times) -> list[_Row]:
    rows = [
        _Row(u, (u.begin - span[0]) * MICRO, length(union(u.busy)) * MICRO, 0.0, 0.0) for u in units
    ]
    by_begin = sorted(rows, key=lambda row: row.unit.begin)
    begins = [row.unit.begin for row in by_begin]
    idle = difference([span], union(i for u in units for i in u.busy))
    waiting = intersection(idle, waits)
    for times, name in ((waiting, "wait_s"), (difference(idle, waiting), "idle_s")):
        for begin, end in times:
            # Idle time in front of the first unit counts as behind it: the iteration is a ring.
            row = by_begin[max(0, bisect_right(begins, begin) - 1)]
            setattr(row, name, getattr(row, name) + (end - begin) * MICRO)
    return rows


def _lay_out(
    rows: list[_Row], measured_s: float, iteration_s: float | None, timeline: str
) -> tuple[Operation, ...]:
    """Operations with gaps between them; with `iteration_s`, stretched to that length."""
    target_s = iteration_s or measured_s
    idle_s = sum(r.idle_s + r.wait_s for r in rows)
    if timeline == "host":
        busy_scale = idle_scale = target_s / measured_s
    else:
        busy_scale = 1.0
        idle_scale = max(0.0, target_s - (measured_s - idle_s)) / idle_s if idle_s > 0.0 else 1.0
    operations: list[Operation] = []
    carried_s = shift_s = 0.0
    for row in rows:
        start_s = row.start_s * busy_scale + shift_s
        operations.append(_operation(row, start_s, row.duration_s * busy_scale))
        begin_s = start_s + row.duration_s * busy_scale
        wait_s, idle = row.wait_s * idle_scale, row.idle_s * idle_scale + carried_s
        carried_s = 0.0
        if wait_s > 0.0:
            operations.append(_gap("DataLoader", Kind.DATA_WAIT, begin_s, wait_s))
        if idle >= _MERGED_GAP_S[timeline]:
            operations.append(_gap("gap", Kind.GAP, begin_s + wait_s, idle))
        else:
            carried_s = idle
        if timeline == "gpu":
            shift_s += (row.wait_s + row.idle_s) * (idle_scale - 1.0)
    if carried_s > 0.0:
        operations.append(_gap("gap", Kind.GAP, max(0.0, target_s - carried_s), carried_s))
    return tuple(sorted(operations, key=lambda op: op.start_s))


def _operation(row: _Row, start_s: float, duration_s: float) -> Operation:
    unit = row.unit
    return Operation(
        name=unit.owner.name,
        kind=unit.owner.kind,
        start_s=max(0.0, start_s),
        duration_s=duration_s,
        flops=unit.flops or None,
        bytes_moved=unit.bytes_moved or None,
        kernels=max(1, unit.kernels),
        stream=unit.stream,
    )


def _gap(name: str, kind: Kind, start_s: float, duration_s: float) -> Operation:
    return Operation(name=name, kind=kind, start_s=start_s, duration_s=duration_s, kernels=0)
