"""What dead jobs of other users have left, put back by root: `kilter restore --all`, in an epilog.

A user can write anything into a journal. So root takes from it only that something was left, and
puts the GPU to the operator's baseline; without a baseline for the GPU it is reported and left.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from kilter.core.errors import DeviceError
from kilter.lease.baseline import of_gpu
from kilter.lease.journal import Journal, RestoreOutcome, restore_all

USERS = Path("/run/user")


def user_directories(users: Path = USERS, temporary: Path | None = None) -> Iterator[Path]:
    """The state directories of other users that can be known: those of a home directory, which may
    be on another host, and those that a job has chosen cannot."""
    temporary = temporary or Path(tempfile.gettempdir())
    for path in (*sorted(users.glob("*/kilter")), *sorted(temporary.glob("kilter-[0-9]*"))):
        name = path.parent.name if path.parent.parent == users else path.name
        uid = name.removeprefix("kilter-")
        try:
            status = path.lstat()
        except OSError:
            continue
        own = status.st_uid == os.geteuid() or not stat.S_ISDIR(status.st_mode)
        if uid.isdecimal() and int(uid) == status.st_uid and not own:
            yield path


def restore_of_user(
    directory: Path,
    *,
    machine: Path | None,
    environ: Mapping[str, str],
    force: bool,
) -> Iterator[RestoreOutcome]:
    """Everything of one user. Nothing is raised for one GPU."""
    try:
        handle = os.open(directory, os.O_DIRECTORY | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        owner = os.fstat(handle).st_uid
        yield from restore_all(
            # The open directory: its name may lead elsewhere by now.
            Path(f"/proc/self/fd/{handle}"),
            owner=owner,
            machine=machine,
            force=force,
            trusted=lambda journal: _to_baseline(journal, owner, environ),
        )
    finally:
        os.close(handle)


def _to_baseline(journal: Journal, owner: int, environ: Mapping[str, str]) -> Journal:
    known = of_gpu(journal.uuid, environ)
    if known is None:
        raise DeviceError(
            f"{journal.uuid}: a dead job of user {owner} has left {journal.last}; root obeys no "
            "other user's journal, and there is no baseline for this GPU (kilter baseline save, "
            "once it stands as it should); else, as that user: kilter restore"
        )
    return msgspec.structs.replace(journal, found=known.setting)
