"""One rank of `kilter share run --ray`: the actor on its node, and the process that it starts."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from kilter.core.errors import KilterError
from kilter.sharing.store import TIMEOUT, read_endpoint

_STOP_TIMEOUT_S = 10.0
_OUTPUT_TIMEOUT_S = 2.0
_CHUNK_BYTES = 1 << 16


class RankSite(msgspec.Struct, frozen=True):
    """What a rank has to find on its node."""

    folder: str
    """The job was started in it."""
    script: str | None
    """It is a file, relative to the folder or absolute; None for a module."""
    endpoint: str
    """The daemon can be reached by this file."""


class SiteReport(msgspec.Struct, frozen=True):
    """What it has found there."""

    missing: str | None
    """It names the folder or the script, if that is not there."""
    unreached: str | None
    """Why the daemon cannot be reached."""
    free_port: int


class RankProcess:
    """Made by Ray on the node of a rank."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        """Nothing is started any more."""
        self._lock = threading.Lock()
        """It guards these two: Ray may call `stop` while `start` is under way."""
        self._folder = ""
        self._written: queue.SimpleQueue[tuple[str, bytes] | int] = queue.SimpleQueue()

    def where(self) -> tuple[str, list[str]]:
        """The node's address, and the GPUs that Ray gives the rank."""
        ray = importlib.import_module("ray")
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
        return ray.util.get_node_ip_address(), list(map(str, gpus))

    def look(self, site: RankSite) -> SiteReport:
        self._folder = site.folder
        wanted = [Path(site.folder)]
        wanted += [] if site.script is None else [Path(site.folder) / site.script]
        with socket.create_server(("", 0)) as listener:
            port = listener.getsockname()[1]
        return SiteReport(
            next((str(path) for path in wanted if not path.exists()), None),
            _unreached(Path(site.endpoint)),
            port,
        )

    def start(self, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
        """Start `python -u COMMAND` with these variables beside those of Ray's workers."""
        with self._lock:
            if self._stopped:
                return
            process = self._process = subprocess.Popen(
                [sys.executable, "-u", *command],
                cwd=self._folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        threading.Thread(target=self._follow, args=(process,), daemon=True).start()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=self._forward, args=source, daemon=True)
            for source in (("stdout", process.stdout), ("stderr", process.stderr))
        ]
        for reader in readers:
            reader.start()
        code = process.wait()
        for reader in readers:
            # What the process has left running may hold its output open for ever.
            reader.join(_OUTPUT_TIMEOUT_S)
        self._written.put(code)

    def _forward(self, name: str, source: IO[bytes]) -> None:
        with source:
            while text := os.read(source.fileno(), _CHUNK_BYTES):
                self._written.put((name, text))

    def read(self) -> tuple[list[tuple[str, bytes]], int | None]:
        """What was written since the last call, once there is anything; with the exit code (minus
        the signal's number) once the process has ended."""
        found: list[tuple[str, bytes]] = []
        while not found or not self._written.empty():
            each = self._written.get()
            if isinstance(each, int):
                return found, each
            found.append(each)
        return found, None

    def stop(self) -> None:
        """End the process and all that it has started."""
        with self._lock:
            self._stopped = True
            process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT_S)
            os.killpg(process.pid, signal.SIGKILL)


def _unreached(file: Path) -> str | None:
    try:
        endpoint = read_endpoint(file)
        address = endpoint.host, endpoint.port
        socket.create_connection(address, TIMEOUT.total_seconds()).close()
    except (KilterError, OSError) as error:
        return str(error)
    return None
