"""Lets children that the program spawns take part in its run (their side: `kilter.app.spawned`).

`multiprocessing` sends every child that it starts by `spawn` or `forkserver` a pickled dictionary
before anything else. Here the dictionary gets one more item, which no child reads, but whose
unpickling calls `enter` there: before the program's first line, without a trace in the environment
or on the command line. A child that cannot import kilter is as without it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kilter.observe.imports import after_import
from kilter.session.fence import Fence
from kilter.session.options import Options

_ITEM = "kilter"
_FORK_SERVER = "ignore"
"""Under this name `multiprocessing.forkserver` asks for what its server imports: no child."""
_ENTER = """\
try:
    from kilter.app.spawned import enter
except ImportError:
    pass
else:
    enter({message!r})
"""


class ChildMessage(msgspec.Struct, frozen=True):
    """What a child is told."""

    run: Path
    """It is the directory of its parent's run."""
    group: int
    """Children that run at the same time are ranks of one job, and have one number."""
    options: Options

    def encoded(self) -> str:
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def of(cls, encoded: str) -> ChildMessage:
        return msgspec.json.decode(encoded, type=cls, dec_hook=lambda kind, value: kind(value))


class SpawnedChildren:
    """The children that a program starts from `install` to `remove`. Those of a program that has
    trained itself are left alone: the run is its own."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._has_trained: Callable[[], bool] = lambda: False
        self._run: Path | None = None
        self._pid = os.getpid()
        self._fence = Fence(lambda where, error: None)
        self._waiting = after_import("multiprocessing.spawn", self._fence(self._take_place))
        self._original: Callable[[str], dict[str, Any]] | None = None
        self._group = 0
        self._members: set[str] = set()
        """They are the names of the children of the present group."""

    @property
    def started(self) -> bool:
        """The program has started some."""
        return self._group > 0

    @property
    def train(self) -> bool:
        """Some of them are, or were, the ranks of this run."""
        return self._run is not None and launcher_events(self._run).exists()

    def left_unreported(self) -> bool:
        """All have ended, and rank 0, which reports at its end, has not: it was killed, say because
        another rank had failed."""
        reported = self._run is not None and (self._run / "report.json").exists()
        return not reported and not self._alive()

    def _alive(self) -> bool:
        return bool(self._members & {child.name for child in multiprocessing.active_children()})

    def install(self, run: Path, has_trained: Callable[[], bool]) -> None:
        """`has_trained` says whether the program itself has done an iteration."""
        self._run, self._has_trained = run, has_trained
        self._waiting.install()

    def remove(self) -> None:
        """Twice is once."""
        self._waiting.cancel()
        spawn: Any = sys.modules.get("multiprocessing.spawn")
        if self._original is not None and spawn.get_preparation_data == self._preparation_data:
            spawn.get_preparation_data = self._original

    def _take_place(self) -> None:
        spawn: Any = sys.modules["multiprocessing.spawn"]
        self._original = spawn.get_preparation_data
        spawn.get_preparation_data = self._preparation_data

    def _preparation_data(self, name: str) -> dict[str, Any]:
        """In place of `multiprocessing.spawn.get_preparation_data`."""
        assert self._original is not None
        data = self._original(name)
        if os.getpid() == self._pid and name != _FORK_SERVER and not self._has_trained():
            self._fence(self._add)(data, name)
        return data

    def _add(self, data: dict[str, Any], name: str) -> None:
        assert self._run is not None
        if not self._alive():
            self._group += 1
            self._members = set()
        self._members.add(name)
        message = ChildMessage(self._run, self._group, self._options).encoded()
        data[_ITEM] = _RunsWhenUnpickled(_ENTER.format(message=message))


class _RunsWhenUnpickled:
    """Pickled, it is a call of `exec`, in a namespace of its own."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._code, {})


# The directory of a run whose ranks are children -----------------------------------------------


def launcher_events(run: Path) -> Path:
    """The events of the process that has started the ranks, and is none of them."""
    return run / "events-launcher.jsonl"


def directory_of(run: Path, group: int) -> Path:
    """Where the ranks of this group write: the first group that trains has the run's own directory,
    and each later one a directory in it. Raises `OSError`."""
    link = run / ".ranks"
    try:
        link.symlink_to(str(group))
    except FileExistsError:
        if os.readlink(link) != str(group):
            return run / f"spawn-{group}"
    return run


def claim(run: Path, rank: int) -> bool:
    """Whether this process is the first that trains as `rank` of the run. Children without a
    process group are all rank 0, and may begin at the same moment. Raises `OSError`."""
    run.mkdir(parents=True, exist_ok=True)
    try:
        (run / f".rank{rank}").symlink_to(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def make_way(events: Path) -> None:
    """The parent, which trains nothing, has begun `events`, the file of rank 0: it goes on to write
    it under another name. Raises `OSError`."""
    launcher = launcher_events(events.parent)
    if events.exists() and not launcher.exists():
        os.link(events, launcher)
        events.unlink()
