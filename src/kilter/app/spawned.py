"""Where kilter enters a child that the script under `kilter run` spawns.

The program's modules may have the names of some that we need: what is not imported yet when the
child begins is imported once the program's own torch is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilter.observe.imports import after_import

if TYPE_CHECKING:
    from kilter.session.listener import RunListener
    from kilter.session.options import Options


def enter(message: str) -> None:
    """Called in a spawned child, with a `ChildMessage`, before the program's first line."""

    def wait() -> None:
        try:
            from kilter.connect.spawned import SpawnedRank
        except ImportError:
            return  # it has found a module of the program
        SpawnedRank(message, _listener_of).wait()

    after_import("torch", wait).install()


def _listener_of(options: Options) -> RunListener:
    from kilter.app.config import factors_of
    from kilter.app.listener import StderrListener
    from kilter.core.events import Started

    class ChildListener(StderrListener):
        """What the run is, its parent has said."""

        def started(self, started: Started) -> None:
            several = f"{started.world_size} processes" if started.world_size > 1 else "a process"
            self.noticed(f"the script trains in {several} of its own: observed there")

    return ChildListener(factors_of(options))
