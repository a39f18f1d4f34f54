"""What a signal handler of the program raises while a destructor of ours runs.

Python drops an exception that leaves a destructor or the callback of a weak reference, after some
lines on stderr. On the CPU, backward runs our destructors in the program's main thread, right after
long work in C++, which is where python notices a signal: of 120 alarms during backward, 18 were
dropped. Such an exception is raised again, at the next instruction outside of the destructor.
"""

from __future__ import annotations

import ctypes
import operator
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kilter.session.fence import PACKAGE, Fence


class Destructors:
    """Stands before `sys.unraisablehook` from `start` to `stop`; what is not about this goes on to
    the hook that was there."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._before: Any = None
        self._hook = self._unraisable

    def start(self) -> None:
        self._before, sys.unraisablehook = sys.unraisablehook, self._hook

    def stop(self) -> None:
        """If the program has put a hook of its own before ours, that stays."""
        if sys.unraisablehook is self._hook:
            sys.unraisablehook = self._before

    def _unraisable(self, what: sys.UnraisableHookArgs) -> object:
        code = getattr(what.object, "__code__", None)
        error = what.exc_value
        if code is None or error is None or not code.co_filename.startswith(PACKAGE):
            return self._before(what)
        theirs = self._fence.the_programs(error)
        if theirs is None:
            return self._before(what)
        self._fence.interrupted(theirs, code.co_qualname)
        self._fence.late = id(theirs)
        return _Raise(theirs)


class _Raise:
    """Has the interpreter raise an exception in this thread, when the last reference to it goes:
    the interpreter drops what its hook returns, and no instruction of the hook is left that the
    exception could meet. For the same reason the destructor is C from end to end."""

    __del__ = property(operator.attrgetter("act"))

    def __init__(self, error: BaseException) -> None:
        class Again(BaseException):
            def __new__(cls) -> BaseException:  # type: ignore[misc]
                return error

        thread, kind = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Again)
        self.act: Callable[[], int] = partial(
            ctypes.pythonapi.PyThreadState_SetAsyncExc, thread, kind
        )
