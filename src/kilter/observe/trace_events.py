"""Streams the events of a Chrome trace file (plain or gzip) in bounded memory. Pure: no torch.

The file is read in chunks. A chunk is cut between two events, and the events before the cut are
decoded at the speed of a compiled decoder. A `},{` between two events is not told from one inside
an event by its text: a cut at a wrong place leaves a bracket open, which the decoder refuses, and
an earlier place is tried.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

import msgspec

from kilter.core.errors import FileError
from kilter.core.files import open_file
from kilter.core.units import show_count

CHUNK_BYTES = 4 << 20
MOST_BYTES = 64 << 30
MOST_HEAD_BYTES = 64 << 20
"""The keys before the events are decoded as a whole, up to this size."""
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Events of these categories run on the device."""
MOST_US = 2**63 / 1e3
"""Times in nanoseconds have 64 bits."""
_NAMED = 3
_NAME_LETTERS = 60
"""Of what is left out, so many names are told, and so much of each."""
_CUTS = 64
"""Places tried in one chunk before more of the file is read."""

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_NOT_A_NUMBER = re.compile(rb":\s*[-+]?(?:nan(?:\([^)]*\))?|inf(?:inity)?)\s*(?=[,}\]])", re.I)


_ARGS = {
    "external_id": "External id",
    "collective": "Collective name",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "group": "Process Group Name",
    "group_description": "Process Group Description",
    "group_ranks": "Process Group Ranks",
    "source_rank": "Src Rank",
    "target_rank": "Dst Rank",
    "sequence": "Seq",
}


class Args(msgspec.Struct, frozen=True, rename=_ARGS):
    """The arguments of an event that tell what a kernel communicates. Writers disagree on types."""

    device: Any = None
    stream: Any = None
    correlation: Any = None
    external_id: Any = None
    bytes: Any = None
    collective: Any = None
    in_elements: Any = None
    out_elements: Any = None
    dtype: Any = None
    group: Any = None
    group_description: Any = None
    group_ranks: Any = None
    source_rank: Any = None
    target_rank: Any = None
    sequence: Any = None


class RawEvent(msgspec.Struct, frozen=True):
    """One entry of `traceEvents`; times in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: Any = ""
    ts: float | None = 0.0
    dur: float | None = 0.0
    args: Args | None = None


T = TypeVar("T")


class TraceFile(Generic[T]):
    """The events of one file, once, in the file's order, each as a `kind`. `head` holds the other
    keys: those before the events from the first event on, those behind them at the end."""

    def __init__(self, path: str | os.PathLike[str], kind: type[T]) -> None:
        self.path = Path(path)
        self._decode = msgspec.json.Decoder(list[kind], strict=False).decode  # type: ignore[valid-type]
        self.head: dict[str, Any] = {}
        self.count = 0

    def __iter__(self) -> Iterator[T]:
        """`FileError` for a file that is missing, truncated, or no trace."""
        try:
            with self._open() as file:
                yield from self._events(file)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise FileError(f"{self.path}: broken gzip file ({error})") from error
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read ({error.strerror or error})") from error

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        pipe = str(self.path).startswith("/dev/")  # as the shell names one
        with open(self.path, "rb") if pipe else open_file(self.path, max_bytes=MOST_BYTES) as file:
            if file.peek(2)[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield cast(IO[bytes], unpacked)
            else:
                yield file

    def _events(self, file: IO[bytes]) -> Iterator[T]:
        opening, buffer = self._head(file)
        while chunk := file.read(CHUNK_BYTES):
            buffer += chunk
            events, buffer = self._cut(buffer)
            self.count += len(events)
            yield from events
        events = self._rest(opening, buffer)
        self.count += len(events)
        yield from events

    def _head(self, file: IO[bytes]) -> tuple[bytes, bytes]:
        """What stands before the first event, and the bytes read so far behind it."""
        buffer = b""
        while True:
            chunk = file.read(CHUNK_BYTES)
            buffer += chunk
            if buffer.lstrip()[:1] == b"[":
                return b"[", buffer.lstrip()[1:]
            if (match := _EVENTS.search(buffer)) is not None:
                self.head = self._keys(buffer[: match.end()] + b"]}")
                return b'{"traceEvents":[', buffer[match.end() :]
            if not chunk or len(buffer) > MOST_HEAD_BYTES:
                self._keys(buffer)
                raise FileError(f"{self.path}: not a Kineto trace (no traceEvents)")

    def _keys(self, raw: bytes) -> dict[str, Any]:
        try:
            keys = msgspec.json.decode(_NOT_A_NUMBER.sub(b":null", raw))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FileError(f"{self.path}: not a complete JSON file ({error})") from error
        if not isinstance(keys, dict):
            raise FileError(f"{self.path}: not a Kineto trace (no traceEvents)")
        if str(keys.get("schema")).startswith("kilter."):
            own = "this is a file of kilter's own, expected a trace of torch.profiler"
            raise FileError(f"{self.path}: not a Kineto trace (no traceEvents): {own}")
        keys.pop("traceEvents", None)
        return keys

    def _cut(self, buffer: bytes) -> tuple[list[T], bytes]:
        """The events up to a place between two of them, and the bytes behind that place."""
        window = buffer[-CHUNK_BYTES:]
        start = len(buffer) - len(window)
        places = [match.start() + 1 for match in _BETWEEN.finditer(window)][-_CUTS:]
        for place in reversed(places):
            cut = start + place
            for raw in self._as_numbers(b"[" + buffer[:cut] + b"]"):
                try:
                    events = self._decode(raw)
                except (msgspec.ValidationError, RecursionError) as error:
                    raise FileError(f"{self.path}: not a Kineto trace ({error})") from error
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue
                return events, buffer[cut:].lstrip()[1:]
        return [], buffer

    @staticmethod
    def _as_numbers(raw: bytes) -> Iterator[bytes]:
        """The bytes, then without the `nan` and `inf` that some profilers write."""
        yield raw
        changed, count = _NOT_A_NUMBER.subn(b":null", raw)
        if count:
            yield changed

    def _rest(self, opening: bytes, buffer: bytes) -> list[T]:
        raw = _NOT_A_NUMBER.sub(b":null", opening + buffer)
        try:
            if opening == b"[":
                return self._decode(raw)
            keys = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            events = self._decode(keys.pop("traceEvents"))
            self.head |= {name: msgspec.json.decode(value) for name, value in keys.items()}
        except (msgspec.ValidationError, RecursionError) as error:
            raise FileError(f"{self.path}: not a Kineto trace ({error})") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FileError(
                f"{self.path}: not a complete JSON file: it breaks off, or is damaged, after event "
                f"{self.count} or later; copy the trace again, or let the profiler finish writing"
            ) from error
        return events

    @property
    def devices(self) -> list[str]:
        """The names of the GPUs; the file has to be read."""
        listed = self.head.get("deviceProperties")
        known = listed if isinstance(listed, list) else []
        return [str(device.get("name", "")) for device in known if isinstance(device, dict)]


def left_out(names: Counter[str]) -> str:
    """The events that cannot be used, in words; empty where there are none."""
    if not names:
        return ""
    told = [name[:_NAME_LETTERS] for name, _ in names.most_common(_NAMED)]
    more = ", ..." if len(names) > len(told) else ""
    events = show_count(names.total(), "event")
    return f"{events} with impossible times: left out of all sums ({', '.join(told)}{more})"
