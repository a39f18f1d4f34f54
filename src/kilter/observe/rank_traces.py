"""Kineto and Chrome traces of the ranks of a job to `RankTrace`s. Pure: no torch, no clock.

A kernel communicates if the table says so (`communication_kernels.toml`). Its message, group and
sequence number come from the kernel's own arguments, or from the c10d operation that launched the
kernel; traces without CPU activities have neither, and then the kernel's name tells the operation.
"""

from __future__ import annotations

import re
import tomllib
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kilter.core.errors import FileError
from kilter.core.rank_trace import (
    Collective,
    IterationMarks,
    RankIteration,
    RankTimes,
    RankTrace,
)
from kilter.core.units import MICRO
from kilter.model.intervals import union
from kilter.observe.gpu_markers import GpuWork, markers
from kilter.observe.kineto import ITERATION_END
from kilter.observe.repetition import starts
from kilter.observe.trace_events import MOST_US, ON_DEVICE, Args, RawEvent, TraceFile, left_out

_LAUNCH = {"cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime"}
_STEP = re.compile(r"ProfilerStep\s?#?\*?(\d+)")
_COMPUTE, _COMMUNICATION, _COPY = 0, 1, 2
_TRANSFERS = ("send", "recv")
_SIZES = {"double": 8, "float64": 8, "long": 8, "int64": 8, "float": 4, "float32": 4, "int": 4}
_SIZES |= {"int32": 4, "half": 2, "float16": 2, "bfloat16": 2, "short": 2, "bool": 1, "byte": 1}
_SIZES |= {"char": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    library: str
    pattern: str
    op: str = ""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernel: list[_Entry]


class KernelTable:
    """Which kernels communicate. `extension`: a TOML file whose entries come before the shipped
    ones; `FileError` if it cannot be used."""

    def __init__(self, extension: Path | None = None) -> None:
        shipped = resources.files("kilter.observe").joinpath("communication_kernels.toml")
        entries = _entries(shipped.read_text("utf-8"), "communication_kernels.toml")
        if extension is not None:
            try:
                text = extension.read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise FileError(f"{extension}: cannot be read ({error})") from error
            entries = _entries(text, str(extension)) + entries
        self._entries = entries

    def op(self, kernel: str) -> str | None:
        """The operation of a kernel that communicates; None for one that does not."""
        for entry, pattern in self._entries:
            if (match := pattern.search(kernel)) is not None:
                named = next((text for text in match.groupdict().values() if text), "")
                return operation(entry.op or named or kernel)
        return None


def _entries(text: str, where: str) -> list[tuple[_Entry, re.Pattern[str]]]:
    try:
        table = msgspec.convert(tomllib.loads(text), _Table)
        return [(e, re.compile(e.pattern, re.IGNORECASE)) for e in table.kernel]
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, re.error) as error:
        raise FileError(f"{where}: not a usable table of kernels ({error})") from error


_OPERATIONS = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("signal", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
    ("reduce", "reduce"),
    ("copy", "copy"),
)


def operation(name: str) -> str:
    """`_allgather_base`, `AllGather` or a kernel's whole name -> `all_gather`; else `other`."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((op for word, op in _OPERATIONS if word in plain), "other")


def read_ranks(
    paths: Iterable[Path], *, table: KernelTable, iterations: int | None = None
) -> Iterator[RankTrace | FileError]:
    """Each file as a rank, or why it cannot be one. Files that do not tell their rank are numbered
    by their names (`rank3`), else by their place in the list."""
    for place, path in enumerate(paths):
        try:
            yield read_rank(path, table=table, iterations=iterations, otherwise=place)
        except FileError as error:
            yield error


def read_rank(
    path: Path,
    *,
    table: KernelTable,
    iterations: int | None = None,
    otherwise: int = 0,
    marks: IterationMarks | None = None,
) -> RankTrace:
    """The trace of one rank. `iterations`: how many equal ones the file holds, where it has no
    marks; `otherwise`: the rank's number if neither the file nor its name tells it. With `marks` of
    a window of ours, iterations go from marker to marker of the GPU's stream, and `origin_s` is of
    `time.monotonic()`."""
    file = TraceFile(path, RawEvent)
    timeline = _Timeline(str(path), table)
    for event in file:
        timeline.add(event)
    named = re.findall(r"rank[-_ ]?(\d+)", path.name, re.IGNORECASE)
    info = file.head.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank = _integer(info.get("rank"))
    if rank is None or rank < 0:
        rank = int(named[-1]) if named else otherwise
    return timeline.finish(
        rank=rank,
        world_size=_integer(info.get("world_size")),
        device=next(iter(file.devices), ""),
        groups=_Groups(info.get("pg_config")),
        count=iterations,
        marks=marks,
    )


class _Groups:
    """Process groups by name, from the trace's `distributedInfo`."""

    def __init__(self, config: object) -> None:
        self._known: dict[str, tuple[str, tuple[int, ...]]] = {}
        for entry in config if isinstance(config, list) else ():
            if isinstance(entry, dict) and entry.get("pg_name") is not None:
                name = str(entry["pg_name"])
                label = str(entry.get("pg_desc") or "undefined")
                members = _integers(entry.get("ranks"))
                self._known[name] = (name if label == "undefined" else label, members or ())

    def of(self, args: Args | None) -> tuple[str | None, tuple[int, ...]]:
        """Name and members of the group that the arguments name, or of the only group."""
        name = None if args is None or args.group is None else str(args.group)
        if name is None or args is None:
            return next(iter(self._known.values())) if len(self._known) == 1 else (None, ())
        label, members = self._known.get(name, (name, ()))
        described = args.group_description
        if described and described != "undefined":
            label = str(described)
        # The profiler shortens long lists of ranks: `[0, 1, ..., 63]`.
        return label, _integers(args.group_ranks) or members


def _integer(value: object) -> int | None:
    """None for what is no integer of 64 bits."""
    try:
        number: int = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def _integers(value: object) -> tuple[int, ...] | None:
    """`[0, 1]` as a list or as text; None for anything else, and for a list with an ellipsis."""
    if isinstance(value, str):
        if "..." in value:
            return None
        value = re.findall(r"\d+", value)
    numbers = [_integer(v) for v in value] if isinstance(value, list) else []
    return tuple(sorted(n for n in numbers if n is not None)) or None


class _Piece(NamedTuple):
    """What is remembered of an event on the GPU that communicates."""

    place: int
    op: str
    args: Args | None


class _Timeline:
    """Collects the events of one file in arrays, then makes sense of them. It has many attributes
    because each property of the events has an array of its own."""

    def __init__(self, where: str, table: KernelTable) -> None:
        self._where = where
        self._table = table
        self._begin_us, self._length_us = array("d"), array("d")
        self._kind, self._name = array("b"), array("l")
        self._device, self._stream = array("l"), array("l")
        self._correlation, self._external = array("q"), array("q")
        self._names: dict[str, tuple[int, int, str]] = {}
        """It maps the name of a kernel to the kernel's number, kind and operation."""
        self._labels: dict[Any, int] = {}
        """It numbers streams and devices: writers use numbers and texts."""
        self._pieces: list[_Piece] = []
        self._launch_us, self._launched = array("d"), array("q")
        self._host_steps: dict[int, tuple[float, float]] = {}
        self._gpu_steps: dict[int, tuple[float, float]] = {}
        self._iteration_ends_us: list[float] = []
        self._impossible: Counter[str] = Counter()
        """It counts, by name, the events whose times cannot be."""
        self._c10d: dict[int, tuple[str, Args | None]] = {}
        """It maps an external id to the name and arguments of an operation of c10d."""
        self._transfers: list[tuple[float, Args]] = []
        """These of them send or receive, with their times."""

    def add(self, event: RawEvent) -> None:
        cat, name, begin, length = event.cat, event.name, event.ts, event.dur
        if event.ph != "X" or not isinstance(name, str):
            return
        if cat in ON_DEVICE:
            self._add_device(name, cat, begin, length, event.args)
        elif begin is None or length is None:
            return
        elif cat in _LAUNCH:
            correlation = _integer(event.args.correlation) if event.args else None
            if correlation is not None:
                self._launched.append(correlation)
                self._launch_us.append(begin)
        elif name.startswith("ProfilerStep"):
            if (match := _STEP.match(name)) is not None:
                steps = self._gpu_steps if cat == "gpu_user_annotation" else self._host_steps
                steps[int(match[1])] = (begin, begin + length)
        elif name == ITERATION_END:
            self._iteration_ends_us.append(begin)
        elif event.args is not None and (name == "record_param_comms" or "c10d" in name):
            self._add_c10d(name, begin, event.args)

    def _add_c10d(self, name: str, begin: float, args: Args) -> None:
        external = _integer(args.external_id)
        if external is not None:
            self._c10d[external] = (name, args)
        if args.collective in _TRANSFERS:
            self._transfers.append((begin, args))

    def _add_device(
        self, name: str, cat: str, begin: float | None, length: float | None, args: Args | None
    ) -> None:
        if begin is None or abs(begin) > MOST_US:
            self._impossible[name] += 1
            return
        if length is None or not 0.0 <= length <= MOST_US - abs(begin):
            self._impossible[name] += 1
            length = 0.0
        known = self._names.get(name)
        if known is None:
            op = self._table.op(name)
            kind = _COMMUNICATION if op else _COMPUTE if cat == "kernel" else _COPY
            known = self._names[name] = (len(self._names), kind, op or "")
        number, kind, op = known
        if kind == _COMMUNICATION:
            self._pieces.append(_Piece(len(self._begin_us), op, args))
        self._begin_us.append(begin)
        self._length_us.append(length)
        self._kind.append(kind)
        self._name.append(number)
        self._device.append(self._label(args.device if args else None))
        self._stream.append(self._label(args.stream if args else None))
        self._correlation.append(_or_missing(args.correlation if args else None))
        self._external.append(_or_missing(args.external_id if args else None))

    def _label(self, value: object) -> int:
        text = str(value)
        return self._labels.setdefault(text, len(self._labels))

    # After the last event.

    def finish(
        self,
        *,
        rank: int,
        world_size: int | None,
        device: str,
        groups: _Groups,
        count: int | None,
        marks: IterationMarks | None,
    ) -> RankTrace:
        if not self._begin_us:
            raise FileError(
                f"{self._where}: holds no GPU kernels: profile with ProfilerActivity.CUDA"
            )
        begin, length = np.array(self._begin_us), np.array(self._length_us)
        if not length.any():
            raise FileError(f"{self._where}: what ran on the GPU lasts no time: record it again")
        kind, devices = np.array(self._kind), np.array(self._device)
        warnings: list[str] = []
        if self._impossible:
            warnings.append(left_out(self._impossible))
        main = self._main_device(devices, length, warnings)
        own = devices == main
        lasting = own & (length > 0.0)
        origin = float(begin[lasting].min())
        begin_s, end_s = (begin - origin) * MICRO, (begin + length - origin) * MICRO
        warnings += self._unknown(kind, own)
        origin_s = origin * MICRO
        if marks is None:
            found = self._iterations(origin, begin_s, end_s, kind, lasting, count, warnings)
            windows, found_by = found
        else:
            windows, origin_s = self._by_markers(marks, origin, end_s, kind, own)
            found_by = "the marker of the GPU's stream"
        return RankTrace(
            source=self._where,
            rank=rank,
            world_size=world_size,
            device=device,
            origin_s=origin_s,
            compute=_union(begin_s, end_s, own & (kind == _COMPUTE)),
            copies=_union(begin_s, end_s, own & (kind == _COPY)),
            collectives=self._collectives(
                rank,
                begin_s,
                end_s,
                own,
                groups,
                self._ready(origin, begin_s, end_s, own & (kind == _COMPUTE)),
            ),
            iterations=windows,
            found_by=found_by,
            warnings=tuple(warnings),
        )

    def _main_device(self, devices: NDArray[Any], length: NDArray[Any], warnings: list[str]) -> int:
        """The GPU that works most; the others of the file are left out by name."""
        busy = np.bincount(devices, weights=length)
        main = int(busy.argmax())
        names = {number: text for text, number in self._labels.items()}
        others = [names[int(i)] for i in np.flatnonzero(busy > 0.05 * busy[main]) if i != main]
        if others:
            warnings.append(
                f"GPU {names[main]} is analysed; the trace also holds work of GPU "
                f"{', '.join(others)}, which is left out"
            )
        return main

    def _unknown(self, kind: NDArray[Any], own: NDArray[Any]) -> Iterator[str]:
        """Kernels that a c10d operation launched and the table does not know."""
        if not self._c10d:
            return
        under = np.isin(np.array(self._external), list(self._c10d))
        strange = own & under & (kind == _COMPUTE)
        numbers = Counter(np.array(self._name)[strange].tolist())
        names = {number: text for text, (number, _, _) in self._names.items()}
        for number, count in numbers.most_common(5):
            yield (
                f"{count} kernels {_short(names[number])!r} were launched by a c10d operation, are "
                "not in the table of communication kernels, and count as compute; --kernels FILE "
                "adds an entry"
            )

    def _collectives(
        self,
        rank: int,
        begin_s: NDArray[Any],
        end_s: NDArray[Any],
        own: NDArray[Any],
        groups: _Groups,
        ready_s: NDArray[Any] | None,
    ) -> tuple[Collective, ...]:
        names = {number: text for text, number in self._labels.items()}
        batches = dict(self._batches())
        found = []
        for index, op, own_args in self._pieces:
            if not own[index]:
                continue
            args = own_args
            if args is None or args.collective is None:
                _, args = self._c10d.get(self._external[index], ("", own_args))
            single = args is not None and args.collective in _TRANSFERS
            transfers = [args] if args and single else batches.get(index, [])
            args = transfers[0] if transfers else args
            group, ranks = groups.of(args)
            bytes_, dtype = _message(args)
            named = operation(str(args.collective)) if args and args.collective else "other"
            op = op if named == "other" else named
            found.append(
                Collective(
                    op=op,
                    begin_s=float(begin_s[index]),
                    end_s=float(end_s[index]),
                    stream=names[self._stream[index]],
                    group=group,
                    ranks=ranks,
                    peers=_ends(transfers, rank),
                    # Each end counts its transfers with all peers.
                    sequence=_integer(args.sequence) if args and op != "send_recv" else None,
                    bytes=bytes_,
                    dtype=dtype,
                    ready_s=None if ready_s is None else _known(ready_s[index]),
                )
            )
        return tuple(sorted(found, key=lambda c: (c.begin_s, c.end_s)))

    def _batches(self) -> Iterator[tuple[int, list[Args]]]:
        """Kernels that transfer, each with what was asked for between the launch before and its
        own: those of a batch (`batch_isend_irecv`) tell nothing themselves."""
        if not self._transfers or not len(self._launched):
            return
        known, at_us = self._launches()
        kernels = [index for index, op, _ in self._pieces if op == "send_recv" and known[index]]
        asked = sorted(self._transfers, key=lambda transfer: transfer[0])
        times = [begin for begin, _ in asked]
        first = 0
        for index in sorted(kernels, key=lambda index: float(at_us[index])):
            last = bisect_left(times, at_us[index])
            yield index, [args for _, args in asked[first:last]]
            first = last

    def _ready(
        self,
        origin: float,
        begin_s: NDArray[Any],
        end_s: NDArray[Any],
        computes: NDArray[Any],
    ) -> NDArray[Any] | None:
        """`Collective.ready_s` of every event on the GPU; NaN where its launch is not known."""
        if not len(self._launched):
            return None
        known, at_us = self._launches()
        launch_s = np.where(known, (at_us - origin) * MICRO, np.nan)
        of = np.flatnonzero(computes & known)
        of = of[np.argsort(launch_s[of], kind="stable")]
        over_s = np.concatenate([[-np.inf], np.maximum.accumulate(end_s[of])])
        before = np.searchsorted(launch_s[of], launch_s, side="left")
        ready_s: NDArray[Any] = np.minimum(np.maximum(launch_s, over_s[before]), begin_s)
        return ready_s

    # Iterations.

    def _iterations(
        self,
        origin: float,
        begin_s: NDArray[Any],
        end_s: NDArray[Any],
        kind: NDArray[Any],
        own: NDArray[Any],
        count: int | None,
        warnings: list[str],
    ) -> tuple[tuple[RankIteration, ...], str]:
        """Windows on the GPU's timeline, from the best witness in the trace."""
        last = float(end_s[own].max())
        if count is None:
            marked = self._by_launch(origin, begin_s, end_s, own)
            if marked:
                return marked, "the profiler's steps"
            marked = tuple(
                RankIteration(
                    number=number, begin_s=(a - origin) * MICRO, end_s=(b - origin) * MICRO
                )
                for number, (a, b) in sorted(self._gpu_steps.items())
            )
            if marked:
                return marked, "the profiler's steps on the GPU"
        streams = np.array(self._stream)
        compute = own & (kind == _COMPUTE)
        if not compute.any():
            compute = own
        busy = np.bincount(streams[compute], weights=(end_s - begin_s)[compute])
        main = np.flatnonzero(compute & (streams == busy.argmax()))
        main = main[np.argsort(begin_s[main], kind="stable")]
        first, rest = starts(np.array(self._name)[main], count)
        edges = [0.0, *begin_s[main[first[1:]]].tolist()]
        edges.append(last if rest is None else float(begin_s[main[rest]]))
        if rest is not None:
            share = (last - edges[-1]) / (edges[1] - edges[0])
            warnings.append(
                f"the last {share * 100:.0f} % of an iteration is left out, since it is not whole"
            )
        windows = tuple(
            RankIteration(number=i, begin_s=edges[i], end_s=edges[i + 1]) for i in range(len(first))
        )
        if count is not None:
            return windows, "the number given"
        if len(windows) == 1:
            warnings.append(
                "has no ProfilerStep and no repetition: the whole trace counts as one iteration "
                "(--iterations N says how many it holds)"
            )
            return windows, "the whole trace"
        return windows, "the repetition of its kernels"

    def _by_launch(
        self, origin: float, begin_s: NDArray[Any], end_s: NDArray[Any], own: NDArray[Any]
    ) -> tuple[RankIteration, ...]:
        """A step's window begins with the first work that the step launched."""
        if self._host_steps:
            numbers = sorted(self._host_steps)
            edges = [self._host_steps[n][0] for n in numbers]
            edges.append(self._host_steps[numbers[-1]][1])
        else:
            edges = sorted(self._iteration_ends_us)
            numbers = list(range(len(edges) - 1))
        if len(edges) < 2 or not len(self._launched):
            return ()
        known, at_us = self._launches()
        known &= own
        step = np.searchsorted(np.array(edges), at_us, side="right") - 1
        windows: list[RankIteration] = []
        for i in reversed(range(len(numbers))):
            ours = known & (step == i)
            if not ours.any():
                continue
            end = windows[-1].begin_s if windows else float(end_s[ours].max())
            begin = float(begin_s[ours].min())
            if begin < end:
                windows.append(RankIteration(number=numbers[i], begin_s=begin, end_s=end))
        return tuple(reversed(windows))

    def _by_markers(
        self,
        marks: IterationMarks,
        origin: float,
        end_s: NDArray[Any],
        kind: NDArray[Any],
        own: NDArray[Any],
    ) -> tuple[tuple[RankIteration, ...], float]:
        """From marker to marker; and `time.monotonic()` at time 0."""
        annotations_s = sorted((us - origin) * MICRO for us in self._iteration_ends_us)
        if len(annotations_s) != len(marks.annotated_s) or not len(self._launched):
            raise FileError(
                f"{self._where}: holds {len(annotations_s)} of {len(marks.annotated_s)} iteration "
                f"ends and {len(self._launched)} launches"
            )
        ends_s, ahead_s = marks.on_clock_of(annotations_s)
        known, at_us = self._launches()
        known &= own
        work = GpuWork(
            launch_s=(at_us[known] - origin) * MICRO,
            launch=np.array(self._correlation)[known],
            end_s=end_s[known],
            stream=np.array(self._stream)[known],
            computes=kind[known] == _COMPUTE,
        )
        passed = list(zip(sorted(marks.annotated_s), markers(work, ends_s), strict=True))
        windows = tuple(
            RankIteration(number=number, begin_s=begin, end_s=end)
            for (number, begin), (following, end) in pairwise(passed)
            if begin is not None and end is not None and following == number + 1 and begin < end
        )
        if not windows:
            raise FileError(f"{self._where}: holds no whole iteration of the GPU")
        return windows, ahead_s

    def _launches(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Of every event on a GPU: whether its launch is in the trace, and when that was."""
        launched, order = np.unique(np.array(self._launched), return_index=True)
        correlation = np.array(self._correlation)
        place = np.searchsorted(launched, correlation).clip(0, len(launched) - 1)
        return launched[place] == correlation, np.array(self._launch_us)[order][place]


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _or_missing(value: object) -> int:
    number = _integer(value)
    return -1 if number is None else number


def _union(begin: NDArray[Any], end: NDArray[Any], where: NDArray[Any]) -> RankTimes:
    return union(zip(begin[where].tolist(), end[where].tolist(), strict=True))


def _short(kernel: str) -> str:
    return kernel if len(kernel) <= 60 else kernel[:57] + "..."


def _message(args: Args | None) -> tuple[int | None, str | None]:
    """Bytes and type of a collective's message, where the trace says them."""
    if args is None:
        return None, None
    dtype = None if args.dtype is None else str(args.dtype).lower().removeprefix("torch.")
    elements = [n for v in (args.in_elements, args.out_elements) if (n := _integer(v)) is not None]
    size = _SIZES.get(dtype or "")
    if elements and size is not None:
        return max(elements) * size, dtype
    return _integer(args.bytes), dtype


def _ends(transfers: Iterable[Args], rank: int) -> tuple[int, int] | None:
    """Source and target of a rank's transfers with one peer, of which PyTorch names the peer alone;
    the lower rank first where they go both ways. None: it is not known, or there are several."""
    ends = set()
    for args in transfers:
        sends = args.collective == "send"
        peer = _integer(args.target_rank if sends else args.source_rank)
        if peer is None or peer < 0:
            return None
        ends.add((rank, peer) if sends else (peer, rank))
    if len(ends) > 1:
        ends = {(min(pair), max(pair)) for pair in ends}
    return ends.pop() if len(ends) == 1 else None
