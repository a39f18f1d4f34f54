"""What a signal handler of the program raises while a destructor runs because of kilter.

Python drops an exception that leaves a destructor or the callback of a weak reference, after some
lines on stderr. On the CPU, backward runs our destructors in the program's main thread, right after
long work in C++, which is where python notices a signal: of 120 alarms during backward, 18 were
dropped. The standard library has such places, too: an import and the end of a thread run callbacks
of weak references. An exception of the program that is dropped there while kilter is at work is
raised again, at the next instruction outside of the destructor.
"""

from __future__ import annotations

import ctypes
import operator
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kilter.session.fence import PACKAGE, Fence, asynchronous, behind


class Destructors:
    """Stands before `sys.unraisablehook` from `start` to `stop`; what is not about this goes on to
    the hook that was there."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._before: Any = None
        self._hook = partial(_Dropped, self._judge)

    def start(self) -> None:
        self._before, sys.unraisablehook = sys.unraisablehook, self._hook

    def stop(self) -> None:
        """If the program has put a hook of its own before ours, that stays."""
        if sys.unraisablehook is self._hook:
            sys.unraisablehook = self._before

    def _judge(self, what: sys.UnraisableHookArgs) -> object:
        """A handler may raise in here, too. That leaves a destructor again, that of `_Dropped`: the
        next call is about that exception, and `what.object` leads to those before it."""
        dropped = [what]
        while isinstance(judged := getattr(dropped[0].object, "__self__", None), _Dropped):
            dropped.insert(0, judged.args[0])
        last: BaseException | None = None
        for each in dropped:
            theirs = self._of_the_program(each)
            if theirs is None:
                self._before(each)
            else:
                last = theirs if last is None else _chained(last, theirs)
        if last is None:
            return None
        self._fence.interrupted(last, _name_of(dropped[0].object))
        self._fence.late.add(id(last))
        return _Raise(last)

    def _of_the_program(self, what: sys.UnraisableHookArgs) -> BaseException | None:
        """The program's exception, if it has come into a function because of kilter."""
        error, code = what.exc_value, getattr(what.object, "__code__", None)
        if error is None:
            return None
        ours = code is not None and code.co_filename.startswith(PACKAGE)
        if ours or isinstance(getattr(what.object, "__self__", None), _Dropped):
            return self._fence.the_programs(error)
        if not self._fence.is_at_work():
            return None
        # A destructor of the program, say, that runs here by chance: what it raises is dropped.
        for each in behind(error):
            if id(each) in self._fence.late or asynchronous(each):
                return each
        return None


def _chained(first: BaseException, second: BaseException) -> BaseException:
    """One exception for both, as if the program had been handling the first when the second came.
    They may have met already."""
    if any(each is second for each in behind(first)):
        return first
    if not any(each is first for each in behind(second)):
        end = second
        while end.__context__ is not None:
            end = end.__context__
        end.__context__ = first
    return second


def _name_of(thing: object) -> str:
    return getattr(thing, "__qualname__", None) or repr(type(thing))


class _Dropped(partial[object]):
    """A call of the judge that the interpreter makes when it drops what its hook returns. All of it
    up to the judge's first instruction is C, so that no exception of a handler can come between."""

    __del__ = property(operator.attrgetter("__call__"))


class _Raise:
    """Has the interpreter raise an exception in this thread, when the last reference to it goes:
    the interpreter drops what the judge returns, and no instruction is left that the exception
    could meet. For the same reason all of this is C from end to end."""

    __del__ = property(operator.attrgetter("act"))

    def __init__(self, error: BaseException) -> None:
        instances: dict[type, BaseException] = {}
        kind = type("Again", (BaseException,), {"__new__": instances.pop})
        instances[kind] = error
        self.act: Callable[[], int] = partial(
            ctypes.pythonapi.PyThreadState_SetAsyncExc,
            ctypes.c_ulong(threading.get_ident()),
            ctypes.py_object(kind),
        )
