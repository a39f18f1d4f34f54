"""The fence: the one place in the package that catches everything.

Nothing of ours may end, hang or change a user's training. Whatever goes wrong in our code that
runs inside the training ends here: the error is told once, and kilter steps aside. Everywhere else
errors are specific.

What the program raises itself is the program's. A signal handler of the program, or another thread
of the program (`PyThreadState_SetAsyncExc`), may raise between any two instructions, also between
two of ours. Such an exception passes. It may have left our state half changed, so that kilter steps
aside after it, too.
"""

from __future__ import annotations

import functools
import inspect
import opcode
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import kilter
from kilter.core.errors import KilterError

T = TypeVar("T")

THREADS = "kilter"
"""What the names of our own threads begin with."""
PACKAGE = str(Path(kilter.__file__).parent) + os.sep
_RAISE = opcode.opmap["RAISE_VARARGS"]
_BARE = (MemoryError, StopIteration, queue.Empty)
"""Functions in C raise these without arguments."""


class Fence:
    """Calls functions of ours on behalf of the user's program.

    `aside(where, error)` is called with the first error; after it nothing inside is run any
    more. What the program raises passes, and so do KeyboardInterrupt and SystemExit.
    """

    def __init__(self, aside: Callable[[str, str], None]) -> None:
        self._aside = aside
        self._told = False
        self._closed = False
        self.down = False
        """Our state cannot be relied on any more. Set at once; what `until_aside` wraps runs on
        until `aside` has been called."""
        self.broken_into: str | None = None
        """Which exception of the program has interrupted us, and where."""
        self.late: set[int] = set()
        """It has the ids of exceptions of the program that are being raised for the second time."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., None]:
        """`function` behind the fence. Its result is dropped."""

        @functools.wraps(function)
        def fenced(*args: Any, **kwargs: Any) -> None:
            if not self.down:
                self.run(function, *args, **kwargs)

        return fenced

    def until_aside(self, function: Callable[..., Any]) -> Callable[..., None]:
        """The same for what stepping aside itself relies on: the ends of iterations, at which the
        program's thread takes the profiler out."""

        @functools.wraps(function)
        def fenced(*args: Any, **kwargs: Any) -> None:
            if not self._closed:
                self.run(function, *args, **kwargs)

        return fenced

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Run it now, also after an error. Whether it came to its end."""
        return bool(self.ask(function, *args, **kwargs))

    def ask(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Run it now, also after an error; its result, or nothing if it did not come to its end."""
        try:
            return [function(*args, **kwargs)]
        except BaseException as error:
            theirs = self.the_programs(error)
            if theirs is None:
                self.down = True
                first, self._told = not self._told, True
                if first:
                    self.run(self._tell, _name(function), error)
                    self.close()
                return []
        try:
            raise theirs
        except BaseException:
            # In here, what a handler raises next is chained to it.
            self.interrupted(theirs, _name(function))
            raise
        finally:
            del theirs  # with its traceback it would keep the program's frames alive

    def is_at_work(self) -> bool:
        """The calling function was called, through whatever others, by one behind the fence."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not Fence.ask.__code__:
            frame = frame.f_back
        return frame is not None

    def the_programs(self, error: BaseException) -> BaseException | None:
        """The exception of the program that is behind `error`, or None if all of it is ours.

        Ours may have been raised from the program's: a `TimeoutError` is an `OSError`, which our
        code expects of the system.
        """
        for each in behind(error):
            if not isinstance(each, Exception) or id(each) in self.late or asynchronous(each):
                return each
        return None

    def interrupted(self, error: BaseException, where: str) -> None:
        """The program's exception has come in the middle of a function of ours."""
        self.down = True
        self.broken_into = self.broken_into or f"{type(error).__name__} in {where}"

    def close(self) -> None:
        """We have stepped aside: what `until_aside` wraps is not run any more either."""
        self._closed = True

    def _tell(self, where: str, error: BaseException) -> None:
        """Stepping aside may fail, too: that is behind the fence like everything else."""
        self._aside(where, describe(error))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def behind(error: BaseException) -> list[BaseException]:
    """An exception and those that it was raised from, or while they were handled."""
    seen: list[BaseException] = []
    due = [error]
    while due:
        each = due.pop()
        if not any(each is before for before in seen):
            seen.append(each)
            due += [e for e in (each.__context__, each.__cause__) if e is not None]
    return seen


def asynchronous(error: BaseException) -> bool:
    """Whether it came from outside of what our frames do: out of a signal handler, or from another
    thread."""
    if threading.current_thread().name.startswith(THREADS):
        return False  # no signal handler runs in our threads, and nobody catches anything there
    frames = list(_frames(error.__traceback__))
    if any(_handles_signal(frame, before) for (before, _), (frame, _) in pairwise(frames)):
        return True
    # Another thread can only name a class: the interpreter makes the exception from it, without
    # arguments, where no frame raises anything.
    bare = not error.args and not isinstance(error, _BARE)
    return bare and bool(frames) and not _raises(*frames[-1])


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames that an exception has passed, outermost first, each with its last instruction."""
    while trace is not None:
        yield trace.tb_frame, trace.tb_lasti
        trace = trace.tb_next


def _handles_signal(frame: FrameType, interrupted: FrameType) -> bool:
    """A handler, whatever kind of callable it is, is called with the frame that it interrupts.
    Functions of ours may hand their own frame on, so they are none."""
    code = frame.f_code
    if code.co_filename.startswith(PACKAGE):
        return False
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    arguments = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    more = [each for several in arguments if isinstance(several, tuple) for each in several]
    return any(argument is interrupted for argument in (*arguments, *more))


def _raises(frame: FrameType, instruction: int) -> bool:
    """Whether the instruction is a `raise` (or an `assert`, which ends in one)."""
    return frame.f_code.co_code[instruction] == _RAISE


def unheard(function: Callable[..., object], *args: Any) -> None:
    """Run what comes after the program. Ctrl-C ends it, and what a signal handler of the program
    still raises (a timer that was never stopped) has nobody left to go to: the program's exit code
    stands."""
    try:
        function(*args)
    except (Exception, KeyboardInterrupt):
        return


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The traceback less our frames, as the program would see it without us."""
    first = each = _next_of_theirs(trace)
    while each is not None:
        following = _next_of_theirs(each.tb_next)
        if following is not each.tb_next:  # to set it, the interpreter looks at all that follow
            each.tb_next = following
        each = following
    return first


def _next_of_theirs(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
        trace = trace.tb_next
    return trace


def describe(error: BaseException) -> str:
    """One line: ours say what to do; for others the place in the code helps to mend it."""
    if isinstance(error, KilterError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
