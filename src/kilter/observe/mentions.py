"""What the program's own code mentions, in places that no watched iteration may have come by.

A training loop that clips gradients only after its warm-up, or logs their norm every hundred steps,
looks clean while it is watched. Its byte code names what it might do.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from inspect import getattr_static
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType

PACKAGES = ("site-packages", "dist-packages")
OURS = str(Path(__file__).parents[1])
STANDARD = sysconfig.get_path("stdlib")
MOST = 1000
"""Members of one collection that are looked at."""


def callers(skip: tuple[str, ...]) -> Iterator[FrameType]:
    """The frames of this call, innermost first, but for those of the packages in `skip`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in skip:
            yield frame
        frame = frame.f_back


def mention(names: frozenset[str], frames: Iterator[FrameType]) -> str | None:
    """Where the code that runs in `frames`, or code that it can reach by name, mentions one of
    `names` (an attribute, a global or a string); `None` if nowhere.

    Of a library only the functions that are running are looked at; of the program every function,
    class and module that its modules know.
    """
    seen: set[int] = set()
    for frame in frames:
        found = _place(names, frame.f_code)
        if found is None and _of_program(frame.f_code.co_filename):
            found = _reached(names, frame.f_globals, seen)
        if found is not None:
            return found
    return None


def _of_program(file: str | None) -> bool:
    """Neither of an installed package, nor of Python, nor of kilter."""
    if file is None or file.startswith((OURS, STANDARD)):
        return False
    return not any(package in file for package in PACKAGES)


def _reached(names: frozenset[str], values: dict[str, object], seen: set[int]) -> str | None:
    waiting: list[object] = list(values.values())
    seen.add(id(values))
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (staticmethod, classmethod, MethodType)):
            waiting.append(value.__func__)
        elif isinstance(value, partial):
            waiting.append(value.func)
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += islice(value, MOST)
        elif isinstance(value, dict):
            waiting += islice(value.values(), MOST)
        elif isinstance(value, property):
            waiting += [value.fget, value.fset]
        elif isinstance(value, FunctionType):
            waiting += _wrapped(value)
            if _of_program(value.__code__.co_filename):
                found = _place(names, value.__code__)
                if found is not None:
                    return found
                if id(value.__globals__) not in seen:
                    seen.add(id(value.__globals__))
                    waiting += value.__globals__.values()
        elif isinstance(value, ModuleType):
            if _of_program(getattr(value, "__file__", None)):
                waiting += vars(value).values()
        elif isinstance(value, type):
            if _of_program(getattr(sys.modules.get(value.__module__), "__file__", None)):
                waiting += vars(value).values()
        else:
            waiting.append(type(value))
            if callable(value):  # functools.cache and the like are no functions
                waiting.append(getattr_static(value, "__wrapped__", None))
    return None


def _wrapped(function: FunctionType) -> Iterator[object]:
    """What a decorator hides."""
    yield getattr(function, "__wrapped__", None)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _place(names: frozenset[str], code: CodeType) -> str | None:
    for inner in _nested(code):
        if names.isdisjoint(inner.co_names) and not _in_constants(names, inner):
            continue
        line = inner.co_firstlineno
        for instruction in dis.get_instructions(inner):
            starts = instruction.starts_line
            if instruction.positions is not None and instruction.positions.lineno is not None:
                line = instruction.positions.lineno
            elif isinstance(starts, int):
                line = starts
            if isinstance(instruction.argval, str) and instruction.argval in names:
                return f"{inner.co_filename}:{line}"
        return f"{inner.co_filename}:{line}"
    return None


def _in_constants(names: frozenset[str], code: CodeType) -> bool:
    return any(isinstance(constant, str) and constant in names for constant in code.co_consts)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
