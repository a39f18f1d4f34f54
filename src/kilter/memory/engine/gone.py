"""Calls a function when an object has been freed.

`weakref.finalize` calls its function from Python code of the standard library. Where a signal
handler of the program raises meanwhile, Python drops the exception, and nobody can tell that the
function was ours. Here the interpreter calls a function of this package, which
`session/destructors.py` recognises: the exception is raised again.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable

_numbers = itertools.count()
_watched: dict[int, weakref.ref[object]] = {}
"""It holds references whose callbacks are to run. They are dropped when the interpreter exits."""


def when_gone(thing: object, function: Callable[..., object], *arguments: object) -> None:
    """Call the function, which must not hold the object, once the object is freed. Not when the
    interpreter exits."""
    number = next(_numbers)
    exits = sys.is_finalizing  # kept here: the interpreter empties the modules one by one

    def gone(_: weakref.ref[object]) -> None:
        _watched.pop(number, None)
        if not exits():
            function(*arguments)

    _watched[number] = weakref.ref(thing, gone)
