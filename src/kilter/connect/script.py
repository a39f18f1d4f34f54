"""Runs the user's script or module in this process, so that it cannot tell: as `python` would.

What python does before, around and after the first line of a script is repeated here: `sys.argv`,
`sys.path[0]`, a fresh and lasting `__main__` (so that pickling, `multiprocessing` and `atexit`
find it), and the traceback of an error without our frames. Exit codes, signals, the hooks in
`sys`, and the order of the end (main code, threads, `atexit`) are left to the interpreter: the
exception simply leaves through the top of the process.

Modules, directories and zip files go through `runpy._run_module_as_main`, which is what python
itself calls for them. It is private, but the public `runpy.run_module` takes `__main__` away
again when it returns, which breaks threads and `atexit` handlers that still need it.

What a program that looks for it can still see: a few frames of ours below its own (`inspect.stack`
at module level, a recursion limit that is reached as many calls earlier), our modules in
`sys.modules`, and `sys.orig_argv`.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import (
    BuiltinImporter,
    FrozenImporter,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import CodeType, TracebackType

from kilter.core.errors import UsageError
from kilter.session.fence import behind, without_ours

_STDIN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is going to be `__main__`: a module for `runpy`, or the code of one file."""

    argv: tuple[str, ...]
    """It is `sys.argv` as the first line of the program sees it."""
    path0: str | None
    """What python puts in front of `sys.path`; None if it puts nothing there."""
    module: str | None = None
    """As after `python -m`; `__main__` means that of the directory or zip file in `path0`."""
    file: str | None = None
    """It is the absolute path of a script, or `<stdin>`."""
    body: bytes | CodeType = b""
    """It is the source, or the code of a `.pyc`, of `file`."""


def find_program(command: Sequence[str]) -> Program:
    """The program of a command line without `python`: `SCRIPT ARGS...` or `-m MODULE ARGS...`.

    A file is read, not yet compiled. `UsageError` if there is no such file.
    """
    target, *arguments = command
    if target == "-m":
        module, *arguments = arguments
        path0 = None if sys.flags.safe_path else _working_directory()
        return Program(argv=("-m", *arguments), path0=path0, module=module)
    if target == _STDIN:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("'-' reads a script from standard input, which is a terminal here")
        path0 = None if sys.flags.safe_path else ""
        whole = sys.stdin.buffer.read()
        return Program(argv=(target, *arguments), path0=path0, file="<stdin>", body=whole)
    file = os.path.join(_working_directory() or "", target)
    if pkgutil.get_importer(file) is not None:
        return Program(argv=(target, *arguments), path0=file, module="__main__")
    try:
        with open(file, "rb") as script:
            body: bytes | CodeType = script.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        raise UsageError(f"can't open file {file!r}: {reason}") from error
    if file.endswith(".pyc"):
        try:
            body = SourcelessFileLoader("__main__", file).get_code("__main__") or b""
        except (ImportError, EOFError) as error:
            raise UsageError(f"can't run {file!r}: {error}") from error
    path0 = None if sys.flags.safe_path else os.path.dirname(os.path.realpath(file))
    return Program(argv=(target, *arguments), path0=path0, file=file, body=body)


def run_program(program: Program) -> None:
    """Run it as `__main__`. Whatever leaves the program leaves this function: also SystemExit."""
    sys.argv = list(program.argv)
    if program.path0 is not None:
        _lead_path(program.path0)
        forget_shadowed(program.path0)
    # Emptied and not replaced: the interpreter goes on to use the dictionary of the first
    # `__main__` after an error, and crashes (3.11) if nothing else has kept it alive.
    main = sys.modules["__main__"].__dict__
    main.clear()
    main.update(
        __name__="__main__",
        __doc__=None,
        __package__=None,
        __loader__=BuiltinImporter,
        __spec__=None,
        __annotations__={},
        __builtins__=builtins,
    )
    if program.file is not None:
        main.update(__file__=program.file, __cached__=None)
        if program.file != "<stdin>":
            compiled = isinstance(program.body, CodeType)
            loader = SourcelessFileLoader if compiled else SourceFileLoader
            main.update(__loader__=loader("__main__", program.file))
    with own_traceback():
        if program.module is not None:
            by_name = program.module != "__main__"
            runpy._run_module_as_main(program.module, by_name)  # type: ignore[attr-defined]
        elif isinstance(program.body, CodeType):
            exec(program.body, main)
        else:
            exec(compile(program.body, program.file or "", "exec", dont_inherit=True), main)


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _lead_path(path0: str) -> None:
    """Put `path0` where python put the place of our own launcher, if it put any there."""
    if sys.flags.safe_path:
        sys.path.insert(0, path0)
    else:
        sys.path[0] = path0


def forget_shadowed(path0: str) -> None:
    """Let `import NAME` find the program's own NAME.py although we have imported another NAME.

    A `profile.py` or `queue.py` beside the script hides the standard library's from the script.
    It would not, if the import found the standard library's already in `sys.modules`. Modules
    that hold a forgotten one keep it; python finds built-in and frozen ones before any path.
    """
    names = {name.partition(".")[0] for name in sys.modules} - {"__main__", "encodings", "kilter"}
    shadowed = {name for name in names if _comes_from(path0, name)}
    for name in [n for n in sys.modules if n.partition(".")[0] in shadowed]:
        del sys.modules[name]


def _comes_from(directory: str, name: str) -> bool:
    if BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name):
        return False
    spec = PathFinder.find_spec(name, [directory])
    # A plain directory (no loader) is a namespace package, which comes after any real module.
    return (
        spec is not None
        and spec.loader is not None
        and os.path.realpath(spec.origin or "")
        != os.path.realpath(getattr(sys.modules[name], "__file__", None) or "")
    )


class own_traceback:  # noqa: N801
    """Cuts the frames above the `with`, and those of ours below, off what the interpreter prints at
    the end of the process.

    The exception goes on to the top, because only there does the interpreter do all that belongs
    to it (`sys.last_value`, errors inside the hook, death by SIGINT after KeyboardInterrupt).
    The program's own hook, or the default one, prints; it is wrapped only once all is over.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        hook = getattr(sys, "excepthook", None)
        if error is None or isinstance(error, SystemExit) or frames is None or hook is None:
            return
        own = without_ours(frames.tb_next)
        for cause in behind(error):
            if cause is not error:
                cause.__traceback__ = without_ours(cause.__traceback__)

        def own_hook(
            kind: type[BaseException], value: BaseException, traceback: TracebackType | None
        ) -> None:
            sys.excepthook = hook
            if value is error:
                value.__traceback__ = sys.last_traceback = traceback = own
            hook(kind, value, traceback)

        sys.excepthook = own_hook
