"""Running the daemon: its socket, its signals, its one place per machine, what a dead one left."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kilter.core.errors import DeviceError, FileError
from kilter.core.files import read_file
from kilter.core.own_file import OwnFile
from kilter.lease.daemon.audit import Audit
from kilter.lease.daemon.metrics import serve_metrics
from kilter.lease.daemon.policy import DaemonPolicy, parse
from kilter.lease.daemon.service import Service
from kilter.lease.journal import restore_all
from kilter.lease.machine import machine_directory, take_for_root

CONFIG = Path("/etc/kilter/daemon.toml")
AUDIT = Path("/var/log/kilter/audit.jsonl")
MAX_CONFIG_BYTES = 2**20
BACKLOG = 256
FIRST_PASSED = 3
"""It is the number of the first descriptor that systemd passes (sd_listen_fds)."""


def load_policy(path: Path) -> DaemonPolicy:
    """The operator's policy. Raises `FileError`; it must belong to this user (root) or to root."""
    try:
        raw = read_file(path, max_bytes=MAX_CONFIG_BYTES, owners={0, os.geteuid()})
    except FileNotFoundError:
        raise FileError(
            f"{path}: no policy, so nobody may set anything; `kilter daemon --help` shows one"
        ) from None
    return parse(raw, where=str(path))


def run(
    socket_path: Path,
    config: Path,
    audit: Path,
    directory: Path,
    environ: Mapping[str, str],
    *,
    metrics: str | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; then everything is put back. `metrics` is the address at which
    they are to be scraped. Raises `FileError`, and `DeviceError` if another daemon serves
    already."""
    # A reload that is asked for before we can hear it waits, and does not end the daemon.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    policy = load_policy(config)
    alone = _only_one(directory)
    log = Audit(audit)
    log.write("started", pid=os.getpid(), socket=str(socket_path), config=str(config))
    machine = machine_directory(environ)
    if machine is not None:
        take_for_root(machine)
    for outcome in restore_all(directory, machine=machine):
        log.note(
            outcome.state, gpu=outcome.uuid, why="left by a dead daemon", reason=outcome.reason
        )
    service = Service(policy, directory, machine, log)
    if metrics is not None:
        serve_metrics(service, metrics)
    listener = passed_socket(environ) or listen(socket_path)
    try:
        asyncio.run(_serve(service, listener, config, environ))
    finally:
        log.note("ended", pid=os.getpid())
        alone.close()


async def _serve(
    service: Service, listener: socket.socket, config: Path, environ: Mapping[str, str]
) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    loop.add_signal_handler(signal.SIGHUP, _reload(service, config))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    with suppress(asyncio.CancelledError):
        await service.serve(listener, lambda: _tell_ready(environ))


def _reload(service: Service, config: Path) -> Callable[[], None]:
    def reload() -> None:
        try:
            service.policy = load_policy(config)
        except FileError as error:
            print(f"kilter daemon: the policy stays as it was: {error}", file=sys.stderr)

    return reload


def _only_one(directory: Path) -> OwnFile:
    path = directory / "daemon.lock"
    try:
        lock = OwnFile.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    assert lock.number is not None
    try:
        fcntl.flock(lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DeviceError(f"another kilter daemon serves this machine already ({path})") from None
    return lock


def passed_socket(environ: Mapping[str, str]) -> socket.socket | None:
    """The socket that systemd has made (socket activation), or None."""
    if environ.get("LISTEN_PID") != str(os.getpid()) or environ.get("LISTEN_FDS") != "1":
        return None
    passed = socket.socket(fileno=FIRST_PASSED)
    passed.set_inheritable(False)
    if passed.family != socket.AF_UNIX or passed.type != socket.SOCK_STREAM:
        raise FileError("the socket that systemd has passed is not a Unix stream socket")
    return passed


def listen(path: Path) -> socket.socket:
    """A listening socket that everybody may connect to: the policy decides by the kernel's word.
    Raises `FileError`. The caller is the only daemon, so a socket that is there is a dead one's."""
    try:
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise FileError(f"{path}: cannot listen there ({error.strerror or error})") from error
    return listener


def _tell_ready(environ: Mapping[str, str]) -> None:
    """To systemd (sd_notify), if it waits for that."""
    name = environ.get("NOTIFY_SOCKET", "")
    if name:
        address = "\0" + name[1:] if name.startswith("@") else name
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", address)
