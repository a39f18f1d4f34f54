"""Reading a file that somebody else may have put there: regular, of sane size, of a trusted owner.

A FIFO with a name that we look for would hang the reader, a link would show it another file, and
another user's file must not decide what we do. All is asked of the open file, never of the name.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from kilter.core.errors import FileError
from kilter.core.own_file import OwnFile, OwnStream


def read_file(
    path: str | os.PathLike[str],
    *,
    max_bytes: int,
    owners: Collection[int] | None = None,
    closed_to: int = 0o022,
    follow: bool = True,
) -> bytes:
    """The bytes of a regular file of at most `max_bytes`.

    With `owners` the file must belong to one of these user numbers and have none of the mode bits
    `closed_to`: it is writable by its owner alone. Without `follow` the last part of the path must
    not be a link. Raises `FileNotFoundError`, or `FileError` for everything else.
    """
    file = open_file(path, max_bytes=max_bytes, owners=owners, closed_to=closed_to, follow=follow)
    try:
        with file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from error
    if len(raw) > max_bytes:
        raise FileError(f"{path}: more than {max_bytes} bytes; not read")
    return raw


def open_file(
    path: str | os.PathLike[str],
    *,
    max_bytes: int,
    owners: Collection[int] | None = None,
    closed_to: int = 0o022,
    follow: bool = True,
) -> io.BufferedReader:
    """The file of `read_file`, open to be read in parts."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{path}: cannot be read ({why})") from error
    flaw = flaw_of(os.fstat(handle), max_bytes=max_bytes, owners=owners, closed_to=closed_to)
    if flaw is not None:
        os.close(handle)
        raise FileError(f"{path}: {flaw}; not read")
    return io.BufferedReader(OwnStream(OwnFile(handle)))


def flaw_of(
    status: os.stat_result,
    *,
    max_bytes: int | None = None,
    owners: Collection[int] | None = None,
    closed_to: int = 0o022,
) -> str | None:
    """Why an open file is not to be trusted, or None."""
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if max_bytes is not None and status.st_size > max_bytes:
        return f"{status.st_size} bytes, more than the {max_bytes} that such a file may have"
    if owners is not None and status.st_uid not in owners:
        return f"belongs to user {status.st_uid}"
    if owners is not None and status.st_mode & closed_to:
        return "writable by others than its owner"
    return None


def state_home(environ: Mapping[str, str]) -> Path:
    """Where kilter keeps what outlives a reboot: `$XDG_STATE_HOME/kilter`, by default in
    `~/.local/state`."""
    return Path(environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "kilter")
