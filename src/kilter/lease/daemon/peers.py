"""Who is at the other end of a connection, and whose processes compute on a GPU.

Only the kernel is asked: the credentials of the socket's peer, and the owners of the processes that
NVML lists. The daemon runs in the machine's own namespaces, so both are the machine's numbers, also
for a process in a container.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kilter.core.reasons import Reason
from kilter.lease import beside
from kilter.lease.daemon.policy import User

_UCRED = struct.Struct("=iII")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The process that made a connection. The pid is 0 if it cannot be seen from here."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Raises `OSError`."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return Peer(pid=pid, uid=uid)


def user_of(uid: int) -> User:
    """A user by the account database; one that it does not know has a number only."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return User(uid=uid, name=str(uid))
    groups = []
    for gid in os.getgrouplist(account.pw_name, account.pw_gid):
        try:
            groups.append((gid, grp.getgrgid(gid).gr_name))
        except KeyError:
            groups.append((gid, str(gid)))
    return User(uid=uid, name=account.pw_name, groups=tuple(groups))


def death_of(peer: Peer) -> int | None:
    """A file that becomes readable when the peer dies: a child that it has forked may keep the
    connection open. None where there is none, or the number is another user's by now."""
    death = beside.death_of(peer.pid) if peer.pid > 0 else None
    if death is not None and owner_of(peer.pid) != peer.uid:
        os.close(death)
        return None
    return death


def owner_of(pid: int) -> int | None:
    """The user of a process, by its number here; None if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("Uid:")), "")
    words = line.split()
    return int(words[1]) if len(words) > 1 else None


def occupancy_refusal(pids: Iterable[int], uid: int, *, beside: int = 0) -> Reason | None:
    """Why a user may not set a GPU with these compute processes, or None: one of them must be the
    user's own, and none another's. Root's processes are told apart by their pid namespace, that of
    the process `beside`: root of one container is not root of the next."""
    own = 0
    for pid in pids:
        owner = owner_of(pid)
        if owner is None:
            text = f"process {pid} computes on this GPU, and nobody can tell whose it is"
            return Reason("owner_unknown", str(pid), text)
        if owner != uid:
            text = f"process {pid} of user {owner} computes on this GPU, too"
            return Reason("shared_with_others", str(pid), text)
        if uid == 0 and beside and _pid_namespace(pid) != _pid_namespace(beside):
            text = f"process {pid} of another container computes on this GPU, too"
            return Reason("shared_with_others", str(pid), text)
        own += 1
    if not own:
        text = "no process of yours computes on this GPU yet: it can be set once one does"
        return Reason("no_context", str(uid), text)
    return None


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
