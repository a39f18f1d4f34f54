"""A process of ours beside the program's, such as the watcher of a lease.

It is nobody's child, so that a script that waits for all of its children does not wait for it, and
in a session of its own, so that Ctrl-C does not reach it. The two ends of a socket connect it with
the program: when one side is gone, the other one sees the connection end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable

from kilter.core.own_file import OwnFile


def start_beside(
    module: str,
    arguments: Iterable[object],
    handles: Iterable[int | None],
    *,
    timeout_s: float,
    stderr: int = subprocess.DEVNULL,
) -> OwnFile:
    """Our end of the connection to `python -m MODULE ARGUMENTS... CONNECTION HANDLES...`, once that
    has left us (`leave_program`). Raises `OSError` or `TimeoutExpired`."""
    ours, theirs = (OwnFile(end.detach()) for end in socket.socketpair())
    numbers = [number for number in (theirs.number, *handles) if number is not None]
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, (*arguments, *numbers))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=numbers,
            start_new_session=True,
        )
        process.wait(timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        ours.close()
        raise
    finally:
        theirs.close()  # so that the death of a process that is just starting is seen
    return ours


def leave_program() -> bool:
    """In the new process: ignore the signals that mean the program, and fork. True where the caller
    has to return: the program waits for that one, and the other one is nobody's child."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return os.fork() != 0


def death_of(pid: int) -> int | None:
    """A file that becomes readable when a process dies; None if it is dead already, or where the
    kernel has no such thing."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
