"""A socket whose descriptor lives in somebody else's program (see `core/own_file`)."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from kilter.core.own_file import OwnFile


@contextmanager
def as_socket(file: OwnFile) -> Iterator[socket.socket]:
    """A socket object for one call: one that lived on would close whatever has its number then.
    Raises `ConnectionResetError` if the program has closed the descriptor."""
    number = file.number
    if number is None:
        raise ConnectionResetError(errno.ECONNRESET, "closed by the program")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=number)
    connection.setblocking(False)
    try:
        yield connection
    finally:
        connection.detach()
