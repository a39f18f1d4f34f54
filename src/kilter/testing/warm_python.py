"""Starts Python programs without their imports of torch: forks them from a Python that has it.

Importing torch takes seconds, and an optimizer's first step imports as much again. A suite that
runs hundreds of small programs spends most of its time on that. Each program here is a process of
its own, in a session of its own, forked from one that has done nothing but these imports; it runs
as `python FILE ...`, `python -m MODULE ...` or `python -c CODE ...` would. What is read when an
interpreter or a library starts (`OMP_NUM_THREADS`, interpreter flags) is the forked one's, but for
`MALLOC_MMAP_THRESHOLD_`: whoever tests that starts a Python of their own. At a program's end its
`atexit` handlers are called and its objects are freed as ever; torch's modules are left as they
are.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from kilter.core.units import KIB
from kilter.observe.torch_internals import COMPILER

PRELOADED = ("numpy", "torch", COMPILER)
_EMPTIED = ("__main__", "builtins", "sys")
"""The interpreter needs these modules to the last."""
_M_MMAP_THRESHOLD = -3
"""It is from glibc's `malloc.h`."""
_MOST_BYTES = 2**17
"""A request has at most this: the arguments and the environment of a program."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a program came to its end."""

    returncode: int
    """It is as in `subprocess`: negative for a signal."""
    peak_bytes: int


class WarmProcess:
    """A program that has been started."""

    def __init__(self, pid: int, keeper: socket.socket) -> None:
        self.pid = pid
        self._keeper = keeper

    def wait(self, timeout_s: float) -> ProcessEnd:
        """Its end; `subprocess.TimeoutExpired` if it takes longer, and it is killed then with all
        of its session."""
        self._keeper.settimeout(timeout_s)
        try:
            told = self._keeper.recv(64)
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s) from None
        finally:
            self._keeper.close()
        status, peak_kib = map(int, told.split())
        return ProcessEnd(os.waitstatus_to_exitcode(status), peak_kib * KIB)


class WarmPython:
    """A Python that has imported torch, from `__enter__` to `__exit__`.

    Programs may be started from several threads.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._stack = ExitStack()

    def __enter__(self) -> WarmPython:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests = self._stack.enter_context(own)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other.fileno())],
                env=self._environ,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self._stack.close()
        self._process.wait()

    def start(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environ: Mapping[str, str],
        streams: Sequence[IO[bytes] | int],
    ) -> WarmProcess:
        """Start `python ARGUMENTS...` with these as its standard input, output and error."""
        keeper, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([list(arguments), str(cwd), dict(environ)]).encode()
        with other:
            descriptors = [s if isinstance(s, int) else s.fileno() for s in streams]
            socket.send_fds(self._requests, [request], [other.fileno(), *descriptors])
        return WarmProcess(int(keeper.recv(64)), keeper)

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` with captured text and an empty standard input."""
        cwd = Path.cwd() if cwd is None else cwd
        environ = os.environ if environ is None else environ
        with ExitStack() as stack:
            places = [stack.enter_context(open(os.memfd_create(n), "w+b")) for n in ("out", "err")]
            for place in places:  # else processes that write at once overwrite each other's lines
                fcntl.fcntl(place, fcntl.F_SETFL, os.O_APPEND)
            nothing = stack.enter_context(open(os.devnull, "rb"))
            process = self.start(arguments, cwd=cwd, environ=environ, streams=[nothing, *places])
            ended = process.wait(timeout_s)
            told = []
            for place in places:
                place.seek(0)
                told.append(place.read().decode(errors="replace"))
        return subprocess.CompletedProcess(list(arguments), ended.returncode, *told)

    def run_ranks(
        self, count: int, arguments: Sequence[str], *, cwd: Path, timeout_s: float = 300.0
    ) -> list[subprocess.CompletedProcess[str]]:
        """The ranks of one job, each with the environment that torchrun would give."""

        def one(place: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
            environ = {**os.environ, **place}
            return self.run(arguments, cwd=cwd, environ=environ, timeout_s=timeout_s)

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, rank_environs(count)))


def rank_environs(count: int) -> list[dict[str, str]]:
    """What torchrun would add to the environment of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


# The other side ---------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> list[str]:
    """Fork a program for each request until there are no more. Returns in the programs only, with
    what each is to run."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            arguments, cwd, environ = json.loads(request)
            keeper, *streams = descriptors
            program = os.fork()
            if program == 0:
                os.setsid()
                os.close(keeper)
                for number, descriptor in enumerate(streams):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                os.chdir(cwd)
                os.environ.clear()
                os.environ.update(environ)
                return list(arguments)
            for descriptor in streams:
                os.close(descriptor)
            _keep(program, socket.socket(fileno=keeper))
        for descriptor in descriptors:
            os.close(descriptor)
        _reap()


def _keep(program: int, told: socket.socket) -> None:
    """Be the program's parent, and tell its number and its end."""
    told.send(str(program).encode())
    _, status, usage = os.wait4(program, 0)
    try:
        told.send(f"{status} {usage.ru_maxrss}".encode())
    finally:
        os._exit(0)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _leave_preloaded_as_it_is() -> None:
    """Let a program's end take apart what the program has made, and nothing of what was there
    before: that would write to most pages that the program shares with all others.

    Python's own objects: modules that are not in `sys.modules` at the end are not emptied, and what
    is referred to once too often is never freed. C++ objects: the C library calls what was
    registered last first, so that the process ends, with its exit code, before the destructors.
    """
    kept = {name: module for name, module in sys.modules.items() if name not in _EMPTIED}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False

    modules = sys.modules  # our own name `sys` will be gone: the program is `__main__` in our place

    def forget() -> None:
        for name in kept:
            modules.pop(name, None)

    atexit.register(forget)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


class _RankEnd:
    """Ends a rank behind its last `atexit` handler. Threads of its process group may be at work
    until all is freed, so nothing is taken apart while they are, and to free all takes long."""

    def __init__(self) -> None:
        self._code: int | None = None  # of an end by a signal, or by a text, Python sees to it
        self._sys, self._leave = sys, os._exit  # our own names will be gone
        atexit.register(self._end)  # first, and so called last

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit):
            self._code = error.code if isinstance(error.code, int) else None
        elif error is None or isinstance(error, Exception):
            self._code = int(error is not None)

    def _end(self) -> None:
        if self._code is not None:
            self._sys.stdout.flush()
            self._sys.stderr.flush()
            self._leave(self._code & 0xFF)


def _main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # what has been imported costs no program a collection, above all not at its end
    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    if "RANK" not in os.environ:
        _leave_preloaded_as_it_is()

    from kilter.connect.script import Program, find_program, forget_shadowed, run_program

    if threshold := os.environ.get("MALLOC_MMAP_THRESHOLD_"):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, int(threshold))

    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = new = [path for path in added if path and path not in sys.path]
    for path in new:  # torch may have imported the real one of what a stand-in there is named
        forget_shadowed(path)

    if arguments[0] == "-c":
        code, argv = arguments[1], ("-c", *arguments[2:])
        program = Program(argv=argv, path0="", file="<stdin>", body=code.encode())
    else:
        program = find_program(arguments)
    with _RankEnd() if "RANK" in os.environ else nullcontext():
        run_program(program)


if __name__ == "__main__":
    _main()
