"""The watcher: a small process that outlives the job just long enough to put its GPU back.

    python -P -m kilter.lease.watcher DIRECTORY UUID NONCE CONNECTION LOCK [MACHINE_LOCK]

Started by `kilter.lease.lease` and by nobody else. It knows that the job is dead from two sources:
its end of the connection is closed (a process forked in C may keep that open), or the kernel says
so (pidfd). It ignores the signals that mean the job; only SIGKILL ends it, and then the journal is
still there. It holds the job's own lock, so nobody else gets the GPU before it has been put back.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import sys
import time
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path

from kilter.core.errors import FileError, KilterError
from kilter.lease.beside import death_of, leave_program
from kilter.lease.journal import (
    Journal,
    JournalPlace,
    RestoreOutcome,
    open_journalled,
    put_back,
    recover,
    start_ticks,
)
from kilter.lease.machine import GpuLock

MESSAGE = struct.Struct("=Qd")
"""The job tells the watcher a number and a deadline (monotonic seconds; infinite: none). The
watcher tells the job first its pid, when it is able to restore; then the number of each deadline
that has passed, once the found setting is back."""
GOODBYE = -math.inf
"""It stands in place of a deadline: everything is back, and the journal is gone because of that. A
journal that is gone without this word was deleted by somebody else."""
TRIES_S = (0.0, 0.5, 2.0, 5.0)
"""Waits before each attempt to put a dead job's GPU back."""
AGAIN_S = 5.0
"""The next attempt after a deadline waits this long, while the job lives."""


def main(arguments: list[str]) -> None:
    """Run until the job is dead or done."""
    directory, uuid, nonce, connection, *locks = arguments
    if leave_program():
        return
    place = JournalPlace(Path(directory), uuid)
    try:
        journal = _ours(place, nonce)
        if journal is None:
            return
        with closing(open_journalled(journal)) as device:
            device.settings()  # a watcher that cannot reach the GPU is none
    except KilterError as error:
        _say(f"cannot watch: {error}")
        return
    lock = GpuLock.passed([int(number) for number in locks])
    memory = _Memory(place, journal)
    with socket.socket(fileno=int(connection)) as job:
        _tell(job, os.getpid())
        if _watch(memory, job, lock):
            return
    _finish(memory, lock)


class _Memory:
    """The journal as it was last seen, for the case that somebody deletes or damages the file."""

    def __init__(self, place: JournalPlace, journal: Journal) -> None:
        self.place = place
        self.journal = journal

    def look(self) -> Journal | None:
        """The newest journal; None if it belongs to another watcher by now."""
        try:
            journal = self.place.read()
        except FileError as error:
            _say(f"acts from memory: {error}")
            return self.journal
        if journal is not None and journal.nonce != self.journal.nonce:
            return None
        if journal is not None:
            self.journal = journal
        return self.journal


def _watch(memory: _Memory, job: socket.socket, lock: GpuLock) -> bool:
    """Until the job is dead, or has closed the connection. Returns whether it has said goodbye."""
    journal = memory.journal
    poll = select.poll()
    poll.register(job, select.POLLIN)
    death = _death_of(journal)
    if death is not None:
        poll.register(death, select.POLLIN)
    job.setblocking(False)
    number, deadline_s = 0, math.inf
    while True:
        left_s = deadline_s - time.monotonic()
        # In parts: poll takes at most 24 days in milliseconds, and rounds down.
        events = dict(poll.poll(min(max(left_s, 0.0), 3600.0) * 1e3 + 1.0))
        if job.fileno() in events:
            raw = _receive(job)
            if not raw:
                return False
            number, deadline_s = list(MESSAGE.iter_unpack(raw))[-1]
            if deadline_s == GOODBYE:
                return True
            memory.look()
        elif death is not None and death in events:
            return False
        elif time.monotonic() >= deadline_s:
            deadline_s = _keep_deadline(memory, job, lock, number, deadline_s)


def _death_of(journal: Journal) -> int | None:
    """As `beside.death_of` of the job."""
    death = death_of(journal.pid)
    if death is not None and start_ticks(journal.pid) != journal.start_ticks:
        os.close(death)  # the job is dead, and the number is another's
        return None
    return death


def _receive(job: socket.socket) -> bytes:
    try:
        return job.recv(4096 * MESSAGE.size)
    except ConnectionResetError:
        return b""


def _keep_deadline(
    memory: _Memory, job: socket.socket, lock: GpuLock, number: int, deadline_s: float
) -> float:
    """The job has not renewed in time. Put back what was found, but leave the journal: the job
    still holds the GPU. Returns when to try again."""
    try:
        # A new object each time: what an old one believes to be set may no longer be so.
        with closing(open_journalled(memory.journal)) as device:
            device.settings()  # starts the driver, which takes its time
            with memory.place.turn():
                # Meanwhile the job may have come back, and set anew.
                journal = None if _spoken(job) else memory.look()
                if journal is None:
                    return math.inf
                _say(f"deadline passed: {_line(put_back(device, journal))}")
                _tell(job, number)
                with suppress(OSError):  # it is only for `kilter restore` to read
                    memory.place.note_kept(lock, deadline_s)
    except KilterError as error:
        _say(f"deadline passed, and not put back: {error}")
        return time.monotonic() + AGAIN_S
    return math.inf


def _spoken(job: socket.socket) -> bool:
    """The job has said something that has not been read yet, or has ended."""
    try:
        job.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def _tell(job: socket.socket, number: int) -> None:
    with suppress(OSError):  # the job is just ending, which the next look at it shows
        job.send(MESSAGE.pack(number, 0.0), socket.MSG_NOSIGNAL)


def _finish(memory: _Memory, lock: GpuLock) -> None:
    """The job is dead, or has given up: put back what it has left, if it has left anything."""
    for wait_s in TRIES_S:
        time.sleep(wait_s)
        try:
            lock.retake()
        except BlockingIOError:
            return  # the job had let go in good order, and somebody else has the GPU now
        try:
            journal = memory.look()
            if journal is None:
                return
            with closing(open_journalled(journal)) as device:
                _say(_line(recover(memory.place, journal, device)))
            memory.place.unlock(lock)
            return
        except KilterError as error:
            _say(f"not put back: {error}")
    _say("given up; when the GPU answers again: kilter restore")


def _ours(place: JournalPlace, nonce: str) -> Journal | None:
    """The journal, unless it is gone or belongs to another watcher by now."""
    journal = place.read()
    return journal if journal is not None and journal.nonce == nonce else None


def _line(outcome: RestoreOutcome) -> str:
    return f"{outcome.uuid}: job {outcome.pid}: {outcome.state}: {outcome.reason}"


def _say(text: str) -> None:
    """To `watcher.log`: the job's stderr may be a pipe whose reader waits for its end."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    with suppress(OSError):  # a full disk must not keep anything from being put back
        os.write(2, f"{now} watcher {os.getpid()}: {text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
