"""A child that the script under `kilter run` has spawned: left alone until it trains, then a rank.

A child trains when it builds a module, or steps an optimizer, as a member of a process group; or
when it steps an optimizer without one. A worker of a `DataLoader` does neither.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import process
from typing import TYPE_CHECKING, Any

from kilter.core.ranks import Ranks
from kilter.observe import torch_internals
from kilter.observe.collective_counts import distributed
from kilter.session.fence import Fence, unheard

if TYPE_CHECKING:
    from kilter.session.lifecycle import Session
    from kilter.session.listener import RunListener
    from kilter.session.options import Options

_FIRST_OF_ALL = 2**31
"""It has this priority among the finalizers of `multiprocessing`, which run as soon as the target
has ended."""


def _say(where: str, error: str) -> None:
    if sys.stderr is not None:
        print(f"kilter: this process is not observed ({where}): {error}", file=sys.stderr)


class SpawnedRank:
    """A child that may train. Begins one session, at the first sign, in the thread that trains."""

    def __init__(self, message: str, listener_of: Callable[[Options], RunListener]) -> None:
        self._message = message
        self._listener_of = listener_of
        self._fence = Fence(_say)
        self._pid = os.getpid()
        self._begun = False

    def wait(self) -> None:
        """Torch has been imported: notice what the child does with it."""
        self._fence.run(self._hook)

    def _hook(self) -> None:
        """The hooks stay, without effect once the session has begun: torch walks through its tables
        of them while it calls them."""
        from torch.nn.modules.module import register_module_module_registration_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        begin_as_member = self._fence(self._begin_as_member)
        begin = self._fence(self._begin)

        def registered(module: Any, name: Any, child: Any) -> None:
            begin_as_member()

        def steps(optimizer: Any, args: Any, kwargs: Any) -> None:
            begin()

        register_module_module_registration_hook(registered)
        register_optimizer_step_pre_hook(torch_internals.uncompiled(steps))

    def _begin_as_member(self) -> None:
        if not self._begun and distributed() is not None:
            self._begin()

    def _begin(self) -> None:
        if self._begun or os.getpid() != self._pid:
            return
        self._begun = True
        # Imported here: most children are workers of a data loader, and never come so far.
        from multiprocessing.util import Finalize

        from kilter.session.children import ChildMessage, claim, directory_of, make_way
        from kilter.session.lifecycle import Session
        from kilter.session.run_directory import events_name

        if Session.is_running():
            return  # the program's own, by `kilter.govern`
        message = ChildMessage.of(self._message)
        ranks = _ranks()
        run = directory_of(message.run, message.group)
        if not claim(run, ranks.rank):
            return  # another child of the group, which trains by itself, too, was first
        if ranks.rank == 0:
            make_way(run / events_name(ranks))
        options = replace(message.options, out=run)
        session = Session(options, ranks, self._listener_of(options))
        session.__enter__()
        Finalize(None, self._end, (session,), exitpriority=_FIRST_OF_ALL)

    def _end(self, session: Session) -> None:
        """The target has returned, or raised what is on its way through `multiprocessing`."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and isinstance(error.__context__, Exception):
            error = error.__context__  # `torch.multiprocessing.spawn` has caught and kept it
        unheard(session.__exit__, None if error is None else type(error), error, None)


def _ranks() -> Ranks:
    """Of this process in its group; alone without one. The number that `torch.multiprocessing`
    has given a child is that of its GPU as a rule; without one, its rank is taken for that."""
    dist = distributed()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist is not None else (0, 1)
    python_process: Any = process.current_process()
    numbered = getattr(python_process._target, "__module__", "") == "torch.multiprocessing.spawn"
    return Ranks(rank, world_size, python_process._args[1] if numbered else rank)
