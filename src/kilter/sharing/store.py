"""The meeting place of jobs and daemon: a torch.distributed TCPStore on loopback, and a file with
its address and token that only its owner can read.

Whoever can reach the port could read and write keys, so every value is signed with the token, and
nothing secret is stored: no command line, only a job's name.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kilter.core.codec import write_atomically
from kilter.core.errors import FileError, KilterError
from kilter.sharing.elastic.share import connect, listening_store
from kilter.sharing.messages import JobStatus, RatioTarget, Summary, signed, verified

if TYPE_CHECKING:
    from torch.distributed import TCPStore

T = TypeVar("T")

TIMEOUT = timedelta(seconds=5)


class Endpoint(msgspec.Struct, frozen=True):
    """The content of the file."""

    host: str
    port: int
    token: str
    pid: int


def default_file() -> Path:
    """Where the daemon of this user is found."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) if runtime else Path(tempfile.gettempdir()) / f"kilter-{os.getuid()}"
    return folder / "kilter-share.json"


def read_endpoint(path: Path) -> Endpoint:
    """The endpoint in a file; `FileError` if it is missing, broken, or not ours alone."""
    try:
        found = path.stat()
        raw = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise FileError(f"{path}: others may read or own this file; run: chmod 600 {path}")
    try:
        return msgspec.json.decode(raw, type=Endpoint)
    except msgspec.DecodeError as error:
        raise FileError(f"{path}: not the address of a daemon ({error})") from error


class Channel:
    """Signed values in the store."""

    def __init__(self, store: TCPStore, token: str) -> None:
        self._store, self._token = store, token
        store.set_timeout(TIMEOUT)

    @classmethod
    def open(cls, host: str, file: Path) -> Channel:
        """Host a store and write the file that leads to it."""
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = listening_store(host)
        token = secrets.token_hex(32)
        endpoint = Endpoint(host, store.port, token, os.getpid())
        write_atomically(file, msgspec.json.encode(endpoint))
        return cls(store, token)

    @classmethod
    def join(cls, endpoint: Endpoint) -> Channel:
        """Connect; OSError if nobody listens (asked first: TCPStore would complain on stderr)."""
        socket.create_connection((endpoint.host, endpoint.port), TIMEOUT.total_seconds()).close()
        return cls(connect((endpoint.host, endpoint.port), TIMEOUT), endpoint.token)

    def put(self, key: str, value: msgspec.Struct) -> None:
        self._store.set(key, signed(self._token, key, value))

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value; None if there is none or its signature is wrong."""
        if not self._store.check([key]):
            return None
        return verified(self._token, key, self._store.get(key), kind)

    def new_slot(self) -> int:
        return int(self._store.add("jobs", 1))

    def slots(self) -> int:
        """How many numbers were given out."""
        return int(self._store.add("jobs", 0))

    # The keys.

    def report(self, slot: int, status: JobStatus) -> None:
        self.put(f"job/{slot}/status", status)

    def status(self, slot: int) -> JobStatus | None:
        return self.get(f"job/{slot}/status", JobStatus)

    def want(self, slot: int, target: RatioTarget) -> None:
        self.put(f"job/{slot}/target", target)

    def target(self, slot: int) -> RatioTarget | None:
        return self.get(f"job/{slot}/target", RatioTarget)

    def leave(self, slot: int) -> None:
        self._store.set(f"job/{slot}/left", "1")

    def has_left(self, slot: int) -> bool:
        return bool(self._store.check([f"job/{slot}/left"]))

    def summarise(self, summary: Summary) -> None:
        self.put("summary", summary)

    def summary(self) -> Summary | None:
        return self.get("summary", Summary)


def living(file: Path) -> tuple[Channel, Summary] | None:
    """The daemon behind a file, if it answers."""
    try:
        channel = Channel.join(read_endpoint(file))
        summary = channel.summary()
    except (KilterError, RuntimeError, ValueError, OSError):
        return None
    return None if summary is None else (channel, summary)
