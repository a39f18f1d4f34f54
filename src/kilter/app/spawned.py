"""What becomes of a child that the script under `kilter run` spawns: nothing until it trains, and
then a rank of the run, as a worker of torchrun is.

A child trains when it builds a module, or steps an optimizer, as a member of a process group; or
when it steps an optimizer without one. A worker of a `DataLoader` does neither.

The program's modules may have the names of some that we need: what is not imported yet when the
child begins is imported once the program's own torch is there.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from multiprocessing import process
from typing import TYPE_CHECKING, Any

from kilter.observe.imports import after_import

if TYPE_CHECKING:
    from kilter.core.ranks import Ranks
    from kilter.session.fence import Fence
    from kilter.session.lifecycle import Session

_FIRST_OF_ALL = 2**31
"""Priority among the finalizers of `multiprocessing`, which run as soon as the target has ended."""


def enter(message: str) -> None:
    """Called in a spawned child, with a `ChildMessage`, before the program's first line."""

    def wait() -> None:
        try:
            from kilter.session.fence import Fence
        except ImportError:
            return  # it has found a module of the program
        fence = Fence(_say)
        fence(SpawnedRank(message, fence).wait)()

    after_import("torch", wait).install()


def _say(where: str, error: str) -> None:
    if sys.stderr is not None:
        print(f"kilter: this process is not observed ({where}): {error}", file=sys.stderr)


class SpawnedRank:
    """A child that may train. Begins one session, at the first sign, in the thread that trains."""

    def __init__(self, message: str, fence: Fence) -> None:
        self._message = message
        self._fence = fence
        self._pid = os.getpid()
        self._begun = False

    def wait(self) -> None:
        """Notice what the child does. The hooks stay, without effect once the session has begun:
        torch walks through its tables of them while it calls them."""
        from torch.nn.modules.module import register_module_module_registration_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from kilter.observe import torch_internals

        begin_as_member = self._fence(self._begin_as_member)
        begin = self._fence(self._begin)

        def registered(module: Any, name: Any, child: Any) -> None:
            begin_as_member()

        def steps(optimizer: Any, args: Any, kwargs: Any) -> None:
            begin()

        register_module_module_registration_hook(registered)
        register_optimizer_step_pre_hook(torch_internals.uncompiled(steps))

    def _begin_as_member(self) -> None:
        if not self._begun and _group() is not None:
            self._begin()

    def _begin(self) -> None:
        if self._begun or os.getpid() != self._pid:
            return
        self._begun = True
        from multiprocessing.util import Finalize

        from kilter.app.config import factors, find_file, here
        from kilter.session.children import ChildMessage, directory_of, make_way
        from kilter.session.lifecycle import Session
        from kilter.session.run_directory import events_name

        if Session.is_running():
            return  # the program's own, by `kilter.govern`
        message = ChildMessage.of(self._message)
        ranks = _ranks()
        run = directory_of(message.run, message.group)
        if ranks.rank == 0:
            make_way(run / events_name(ranks))
        options = replace(message.options, out=run)
        listener = _listener(factors({}, *find_file(here(), options.config)))
        session = Session(options, ranks, listener)
        session.__enter__()
        Finalize(None, self._end, (session,), exitpriority=_FIRST_OF_ALL)

    def _end(self, session: Session) -> None:
        """The target has returned, or raised what is on its way through `multiprocessing`."""
        from kilter.session.fence import unheard

        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and isinstance(error.__context__, Exception):
            error = error.__context__  # `torch.multiprocessing.spawn` has caught and kept it
        unheard(session.__exit__, None if error is None else type(error), error, None)


def _group() -> Any:
    """`torch.distributed`, in a process that is a member of a process group."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if hasattr(dist, "is_initialized") and dist.is_initialized() else None


def _ranks() -> Ranks:
    """Of this process in its group; alone without one. The number that `torch.multiprocessing`
    has given a child is that of its GPU as a rule; without one, its rank is taken for that."""
    from kilter.core.ranks import Ranks

    dist = _group()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist is not None else (0, 1)
    me: Any = process.current_process()
    numbered = getattr(me._target, "__module__", None) == "torch.multiprocessing.spawn"
    return Ranks(rank, world_size, me._args[1] if numbered else rank)


def _listener(factors: Any) -> Any:
    from kilter.app.listener import StderrListener
    from kilter.core.events import Started

    class ChildListener(StderrListener):
        """What the run is, its parent has said."""

        def started(self, started: Started) -> None:
            several = f"{started.world_size} processes" if started.world_size > 1 else "a process"
            self.noticed(f"the script trains in {several} of its own: observed there")

    return ChildListener(factors)
