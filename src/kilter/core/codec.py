"""Values to files and back. Every file is one JSON object that names its schema and version.

Readers accept their own version and older ones; a newer file is refused with the command that
helps. A malformed or truncated file gives one `FileError` line that names the file and the place.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from kilter.core.errors import FileError
from kilter.core.files import open_file, read_file
from kilter.core.own_file import OwnFile, OwnStream
from kilter.core.plan import Plan
from kilter.core.section_record import SectionsFound
from kilter.core.trace import IterationTrace

T = TypeVar("T")

MAX_BYTES = 2**30
MAX_NUMBER = 1e18
"""It is an exabyte, or thirty thousand million years: more than any time, size or count of ours."""
_GZIP = b"\x1f\x8b"

SCHEMAS: dict[type[Any], tuple[str, int]] = {
    SectionsFound: ("kilter.sections-found", 1),
    IterationTrace: ("kilter.trace", 1),
    Plan: ("kilter.plan", 1),
}


def encode(value: object) -> bytes:
    """One JSON object: `schema` first, then the value's fields. NaN and infinity are refused."""
    name, version = SCHEMAS[type(value)]
    fields = msgspec.to_builtins(value)
    return msgspec.json.encode({"schema": f"{name}/{version}", **fields})


def decode(raw: bytes, kind: type[T], *, where: str) -> T:
    """The value in `raw`. `where` names the file in the error message."""
    name, version = SCHEMAS[kind]
    if raw.startswith(_GZIP):
        raise FileError(f"{where}: compressed; run gunzip first")
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{where}: not a complete JSON file ({error})") from error
    if _of_profiler(found):
        raise FileError(
            f"{where}: a trace of torch.profiler, expected the trace.json of a run of kilter"
            if kind is IterationTrace
            else f"{where}: a trace of torch.profiler, expected {name}"
        )
    check_numbers(found, where)
    if not isinstance(found, dict) or not isinstance(found.get("schema"), str):
        raise FileError(f'{where}: not a kilter file (no "schema" key); expected {name}')
    found_name, _, found_version = found.pop("schema").partition("/")
    if found_name != name:
        raise FileError(f"{where}: holds {found_name!r}, expected {name!r}")
    if not (found_version.isascii() and found_version.isdigit() and len(found_version) < 9):
        raise FileError(f"{where}: unreadable schema version {found_version!r}")
    if int(found_version) > version:
        raise FileError(
            f"{where}: written by a newer kilter ({name}/{found_version}, this one reads "
            f"{name}/{version}); run: pip install -U kilter"
        )
    try:
        value = msgspec.convert(found, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FileError(f"{where}: malformed {name} ({error})") from error
    flaw = value.flaw() if isinstance(value, IterationTrace) else None
    if flaw is not None:
        raise FileError(f"{where}: malformed {name} ({flaw})")
    return value


def _of_profiler(found: Any) -> bool:
    """Whether it is a Chrome trace: an object that holds the list of events, or the bare list."""
    if isinstance(found, list):
        return bool(found) and isinstance(found[0], dict) and "ph" in found[0]
    return isinstance(found, dict) and "traceEvents" in found


def load(path: str | os.PathLike[str], kind: type[T]) -> T:
    """The value in a file; `FileError` if it is missing, malformed, truncated or newer."""
    return decode(read(path), kind, where=str(path))


def read(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a file that a user names; `FileError` if it is missing, no regular file, or
    larger than any of ours. A pipe may be named as the shell names it (`/dev/stdin`, `<(...)`)."""
    try:
        if os.fspath(path).startswith("/dev/"):
            with open(path, "rb") as pipe:
                return pipe.read(max_bytes)
        return read_file(path, max_bytes=max_bytes)
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from error


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Iterator[BinaryIO]:
    """The same as a file that is open while the block runs, for what is read line by line."""
    try:
        with open_file(path, max_bytes=max_bytes) as file:
            yield file
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from error


def check_numbers(found: Any, where: str) -> None:
    """No number of ours is larger than `MAX_NUMBER`: sums and products stay finite. Raises
    `FileError`."""
    rest = [found]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
        elif isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            raise FileError(f"{where}: holds a number that is too large to mean anything")


def save(path: str | os.PathLike[str], value: object) -> None:
    """Write a value so that a reader sees the old file or the whole new one, never a part."""
    write_atomically(path, encode(value) + b"\n")


def write_atomically(path: str | os.PathLike[str], raw: bytes) -> None:
    """Write bytes beside `path`, sync, and rename over it; `FileError` if the disk refuses.

    A device or a pipe (`/dev/stdout`, a shell's `>(...)`) is written to: renamed over, it would be
    gone for everybody.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            with open(target, "wb") as stream:
                stream.write(raw)
            return
    except OSError as error:
        raise FileError(f"{target}: cannot be written ({error.strerror})") from error
    target = Path(os.path.realpath(target))
    if not target.name:
        raise FileError(f"{target}: cannot be written (Is a directory)")
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # For the owner alone: a report names a job's command line, files and hosts.
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with io.BufferedWriter(OwnStream(OwnFile(handle))) as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise FileError(f"{target}: cannot be written ({error.strerror})") from error
