"""Where the ranks of a job leave each other short notes: never a collective, never a wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from kilter.core.errors import KilterError


class BoardGone(KilterError):
    """The board cannot be reached any more: the process that kept it has ended."""


class Board(Protocol):
    """Notes by name. No call waits for another rank; each may raise `BoardGone`."""

    def post(self, name: str, note: bytes) -> None:
        """Leave a note; each name is used once."""

    def look(self, name: str) -> bytes | None:
        """The note of that name, or None if it is not there yet."""

    def drop(self, name: str) -> None:
        """Take a note away that everybody has read; harmless if it is not there."""


class LocalBoard:
    """The board of a process on its own."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def post(self, name: str, note: bytes) -> None:
        self._notes[name] = note

    def look(self, name: str) -> bytes | None:
        return self._notes.get(name)

    def drop(self, name: str) -> None:
        self._notes.pop(name, None)


class StoreBoard:
    """The board of several ranks: the key-value store that their process group met at.

    A second connection to the same server, so that a slow answer never keeps the job's own calls
    waiting (the client holds a lock while it talks). `find` is None as long as there is no store.
    """

    def __init__(self, store: Any, server: Any = None) -> None:
        """`server` is kept alive for as long as this board is: the job's own store may be the one
        that serves, and be dropped with its process group while other ranks still look."""
        self._store = store
        self._server = server

    @classmethod
    def find(cls) -> StoreBoard | None:
        """The store of this process's group, once there is one; raises `BoardGone`."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return None
        with _reaching():
            store = dist.distributed_c10d._get_default_store()
            return cls(dist.PrefixStore("kilter", _second_connection(store)), store)

    def post(self, name: str, note: bytes) -> None:
        with _reaching():
            self._store.set(name, note)

    def look(self, name: str) -> bytes | None:
        with _reaching():
            return bytes(self._store.get(name)) if self._store.check([name]) else None

    def drop(self, name: str) -> None:
        with _reaching():
            self._store.delete_key(name)


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError, and what its other stores raise
        reason = str(error).partition("\n")[0]
        raise BoardGone(f"the key-value store of the job is gone ({reason})") from error


def _second_connection(store: Any) -> Any:
    """The same TCP store over a connection of our own; any other kind of store as it is."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return store
    return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
