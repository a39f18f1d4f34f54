"""One holder of a GPU on a machine, whichever users and state directories its jobs have.

A state directory belongs to one user, who may choose it, so its lock keeps out only jobs that have
the same. A second lock is in a place that all users share: `/run/lock/kilter`. Root makes the
directory, as open as `/tmp`; `kilter daemon` takes it for itself, and then no user can lock a GPU.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kilter.core.errors import FileError, Held
from kilter.core.files import flaw_of
from kilter.core.own_file import OwnFile, identity

MACHINE = Path("/run/lock/kilter")
LOCK_VARIABLE = "KILTER_LOCK_DIR"
POLL_S = 0.02
_OPEN_TO_ALL = 0o1777


def machine_directory(environ: Mapping[str, str]) -> Path | None:
    """Where the locks of all users are, or None if there is no such place: nobody with the right to
    has made one, or another user has, who could put other locks in their place."""
    path = Path(environ.get(LOCK_VARIABLE) or MACHINE)
    try:
        if os.geteuid() == 0 and not path.exists():
            path.mkdir()
            path.chmod(_OPEN_TO_ALL)
        status = path.lstat()
    except OSError:
        return None
    private = not status.st_mode & 0o022 or bool(status.st_mode & stat.S_ISVTX)
    trusted = stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.geteuid())
    return path if trusted and private else None


def take_for_root(directory: Path) -> None:
    """From here on only root locks GPUs here: others could keep the daemon from any GPU."""
    with suppress(OSError):
        directory.chmod(0o755)
        for path in directory.iterdir():
            if path.lstat().st_uid == os.geteuid():
                path.chmod(0o600, follow_symlinks=False)


class GpuLock:
    """The lock of the state directory and that of the machine, if there is one. Open files, so that
    a job and its watcher can have them in common, and they die with both."""

    def __init__(self, own: OwnFile, machine: OwnFile | None = None) -> None:
        self.own = own
        self._files = [own] if machine is None else [own, machine]

    @classmethod
    def passed(cls, numbers: list[int]) -> GpuLock:
        """The same lock in another process, which has got the descriptors."""
        return cls(*map(OwnFile, numbers))

    @property
    def numbers(self) -> list[int]:
        """Of what is open still."""
        return [number for file in self._files if (number := file.number) is not None]

    @property
    def whole(self) -> bool:
        """The program has closed none of the files."""
        return len(self.numbers) == len(self._files)

    def named_by(self, *paths: Path | None) -> bool:
        """Whether these names still lead to the open files: a cleaner of temporary files may have
        removed one, and then the next job would lock another file of that name."""
        found = [_identity_of(path) for path in paths if path is not None]
        return found[: len(self._files)] == [identity(number) for number in self.numbers]

    def retake(self) -> None:
        """Raises `BlockingIOError` if somebody else has one of them by now."""
        for number in self.numbers:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Let the GPU go, also for other processes that have the same open files."""
        for number in self.numbers:
            fcntl.flock(number, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()


def lock_of_machine(path: Path, until_s: float) -> OwnFile:
    """Take a GPU for this process, whatever its user. Raises `Held`, `FileError` or `OSError`."""
    while True:
        lock = _open(path)
        while (number := lock.number) is not None:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    who = _holder_of(number)
                    lock.close()
                    raise Held(
                        f"{path.stem}: {who} controls this GPU, with another state directory; "
                        f"one kilter per GPU ({path})"
                    ) from None
            time.sleep(POLL_S)
        if number is not None and identity(number) == _identity_of(path):
            return lock
        lock.close()  # another one was put in its place meanwhile


def _open(path: Path) -> OwnFile:
    """A lock needs no right to write, so that no user can change the lock of another."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock = OwnFile.open(path, flags)
    except FileNotFoundError:
        with suppress(FileExistsError):
            made = OwnFile.open(path, flags | os.O_CREAT | os.O_EXCL)
            if made.number is not None and path.parent.stat().st_mode & 0o002:
                os.fchmod(made.number, 0o644)
            return made
        return _open(path)
    except PermissionError:
        raise Held(
            f"{path}: root keeps the GPUs of this machine; who is not root asks its kilter daemon"
        ) from None
    assert lock.number is not None
    flaw = flaw_of(os.fstat(lock.number))
    if flaw is not None:
        lock.close()
        raise FileError(f"{path}: {flaw}; nothing is set")
    return lock


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _holder_of(number: int) -> str:
    """By the kernel's list; a process of another container stands in there without a number."""
    status = os.fstat(number)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "FLOCK" in words and device in words and words[4].isdecimal():
                owner = Path(f"/proc/{words[4]}").stat().st_uid
                return f"process {words[4]} of user {owner}"
    return "a process of another user or container"
