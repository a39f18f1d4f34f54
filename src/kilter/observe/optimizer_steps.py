"""Listeners to the steps of all optimizers, which may come and go while another thread steps.

Torch walks through its tables of hooks while it calls them, and a table that changes then raises
RuntimeError in the program's own step. So one hook of ours stands in each of the two tables, and
the listeners are in tables of ours. Torch's tables belong to the process, and so do these.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from kilter.observe import torch_internals

StepListener = Callable[[Any, Any, Any], object]
"""It is called with the optimizer, and the positional and the keyword arguments of its step."""


class _Steps:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._before: dict[int, StepListener] = {}
        self._after: dict[int, StepListener] = {}
        self._handles: list[Any] = []
        self._inside = 0
        """So many calls of our hooks have not returned."""
        self._threads: set[int] = set()
        """These threads have stepped: each may be on its way through torch's tables."""

    def listen(
        self, before: StepListener | None, after: StepListener | None, first: bool
    ) -> Callable[[], None]:
        if not self._handles:
            self._install()
        number = next(self._numbers)
        if before is not None:
            self._before[-number if first else number] = before
        if after is not None:
            self._after[number] = after
        return lambda: self._leave(number)

    def _install(self) -> None:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        def begins(*step: Any) -> None:
            self._tell(self._before, *step)

        def ends(*step: Any) -> None:
            self._tell(self._after, *step)

        uncompiled = torch_internals.uncompiled
        before = register_optimizer_step_pre_hook(uncompiled(begins))
        torch_internals.global_optimizer_pre_hooks.move_to_end(before.id, last=False)
        after = register_optimizer_step_post_hook(uncompiled(ends))
        self._handles = [before, after]

    def _leave(self, number: int) -> None:
        for table, key in ((self._before, -number), (self._before, number), (self._after, number)):
            table.pop(key, None)
        alone = not self._inside and self._threads <= {threading.get_ident()}
        if alone and not self._before and not self._after:
            while self._handles:
                self._handles.pop().remove()

    def _tell(self, table: dict[int, StepListener], optimizer: Any, args: Any, kwargs: Any) -> None:
        self._inside += 1
        try:
            self._threads.add(threading.get_ident())
            for _, listener in sorted(table.items()):
                listener(optimizer, args, kwargs)
        finally:
            self._inside -= 1


_steps = _Steps()


def listen(
    *, before: StepListener | None = None, after: StepListener | None = None, first: bool = False
) -> Callable[[], None]:
    """Call these before and after each step of each optimizer; gives what ends that.

    Listeners are called in the order in which they came, but those that want to be `first` before
    a step; all of them before the program's own hooks before a step. Our hooks leave torch's
    tables with the last listener, unless that would disturb a step: when it leaves inside of one,
    or when another thread has stepped, they stay, without effect.
    """
    return _steps.listen(before, after, first)
