"""What becomes of an object in a child that is forked from its process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def in_forked_children(method: Callable[[], None]) -> None:
    """Call a bound method in every child that is forked from here on, for as long as its object
    lives: what is registered with Python stays for ever, and must not keep the object alive."""
    of_object = weakref.WeakMethod(method)

    def in_child() -> None:
        bound = of_object()
        if bound is not None:
            bound()

    os.register_at_fork(after_in_child=in_child)
