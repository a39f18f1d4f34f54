"""What becomes of an object when its process forks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def in_forked_children(method: Callable[[], None]) -> None:
    """Call a bound method in every child that is forked from here on, for as long as its object
    lives: what is registered with Python stays for ever, and must not keep the object alive."""
    os.register_at_fork(after_in_child=_while_it_lives(method))


def at_each_fork(method: Callable[[], None]) -> None:
    """The same in the process that forks, after each fork."""
    os.register_at_fork(after_in_parent=_while_it_lives(method))


def _while_it_lives(method: Callable[[], None]) -> Callable[[], None]:
    of_object = weakref.WeakMethod(method)

    def call() -> None:
        bound = of_object()
        if bound is not None:
            bound()

    return call
