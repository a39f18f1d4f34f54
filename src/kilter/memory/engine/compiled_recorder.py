"""The compiled library, `recorder.cpp`: built once for each version of PyTorch and of Python.

Where it cannot be built (no C++ compiler, say) Python does the same: `recording.py`, `engine.py`
for the events of `position.h` and `moves.h`, and `tensor_hooks.py` and `store.py` for what
`saved_tensors.h` finds out.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kilter.core.files import state_home
from kilter.core.reasons import Reason

BUILD = "KILTER_BUILD"
"""With `off` in this environment variable nothing is built, and what is built is not used."""
LONGEST_BUILD_S = 300
BUILD_POLL_S = 0.1
_NAME = "kilter_recorder"
_SOURCE = Path(__file__).with_name("recorder.cpp")
_SOURCES = _SOURCE, *sorted(_SOURCE.parent.glob("*.h"))


def library() -> Any:
    """The compiled library, or None where there is none that can be loaded."""
    path = built_path()
    return _loaded(path) if path.exists() and os.environ.get(BUILD) != "off" else None


def to_build() -> bool:
    """It is wanted, and was not built."""
    return os.environ.get(BUILD) != "off" and not built_path().exists()


class RecorderBuild(threading.Thread):
    """Builds it while the program goes on."""

    def __init__(self) -> None:
        super().__init__(name="kilter-build", daemon=True)
        self._over = threading.Event()
        self.reason: Reason | None = None
        """Why it was not built."""

    def run(self) -> None:
        self.reason = build(self._over)

    def cancel(self) -> None:
        """Nobody needs it any more. Leaves nothing."""
        self._over.set()
        self.join()


def build(over: threading.Event | None = None) -> Reason | None:
    """Build it; takes about a minute. The reason if it cannot be built, or was `over` before."""
    path = built_path()
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return _not_built("no C++ compiler was found (c++ or g++ on the PATH)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
        with lock, tempfile.TemporaryDirectory(dir=path.parent) as directory:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other ranks wait for the one that builds
            if path.exists():
                return None
            made, errors = Path(directory, f"{_NAME}.so"), Path(directory, "errors")
            code = _finish(_command(compiler, made), errors, over or threading.Event())
            if code != 0 or not made.exists():
                told = errors.read_text(errors="replace").split("\n")
                why = [line for line in told if "error" in line] or [f"exit code {code}"]
                return _not_built(why[0])
            made.replace(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _not_built(str(error))
    return None


def _command(compiler: str, made: Path) -> list[str]:
    """(`torch.utils.cpp_extension` would need ninja, and no space in any path.)"""
    home = Path(torch.__file__).parent
    include = home / "include"
    headers = (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        *(compiler, "-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared"),
        *(f"-DTORCH_EXTENSION_NAME={_NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H"),
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(flag for path in headers for flag in ("-isystem", str(path))),
        *("-o", str(made), str(_SOURCE), f"-L{home / 'lib'}"),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]


def _finish(command: list[str], errors: Path, over: threading.Event) -> int:
    """The exit code; what it started (the compiler) ends with it."""
    by_s = time.monotonic() + LONGEST_BUILD_S
    with errors.open("w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True
        )
        try:
            while process.poll() is None and not over.wait(BUILD_POLL_S):
                if time.monotonic() > by_s:
                    raise subprocess.TimeoutExpired(command[0], LONGEST_BUILD_S)
            return process.returncode if process.returncode is not None else -signal.SIGKILL
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _not_built(why: str) -> Reason:
    text = (
        f"calls of modules are recorded in Python, which takes the host longer: {why}."
        f" {BUILD}=off does not try to build."
    )
    return Reason(code="recorder_not_built", subject="recorder.cpp", text=text)


@cache
def built_path() -> Path:
    """Where it is built for this PyTorch, this Python and this source."""
    key = hashlib.sha256()
    for source in _SOURCES:
        key.update(source.read_bytes())
    for part in (torch.__version__, sys.implementation.cache_tag, platform.machine()):
        key.update(str(part).encode())
    return state_home(os.environ) / "built" / f"{_NAME}-{key.hexdigest()[:16]}.so"


@cache
def _loaded(path: Path) -> Any:
    found = importlib.util.spec_from_file_location(_NAME, path)
    assert found is not None
    assert found.loader is not None
    try:
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    except ImportError:  # built on a machine with other libraries, say: Python does the same
        return None
    return module
