"""The observation window: `torch.profiler` for a few iterations, then nothing of it is left.

Autograd puts a thread's state back to what it was before backward, and the profiler's is part of
it: switched on or off inside backward, the profiler is torn in two, and the program crashes. A
thread other than the one that imported torch cannot be the first to use it either. So the profiler
is switched at one kind of place alone: in that one thread, outside backward.

The program's thread pays for switching the profiler on and off at three iteration ends and for the
window itself. What that costs is mostly the collection of events when it is switched off, about
10 us for each with their shapes, so that on a GPU, whose times hardly vary, one iteration has to
do. Writing them to a file takes half as long again and holds the interpreter, also from another
thread: a patient window leaves that until the program is over.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kilter.core.errors import FileError
from kilter.core.trace import IterationTrace
from kilter.observe import torch_internals
from kilter.observe.flops import torch_flops
from kilter.observe.imports import after_import
from kilter.observe.inference_watch import Fenced
from kilter.observe.iteration_clock import IterationClock, in_backward
from kilter.observe.kineto import ITERATION_END, MODULE, read_kineto

WindowSeen = TypeVar("WindowSeen")

_THE_PROGRAM_S = "the program uses torch.profiler itself"
_ANOTHER_THREAD = (
    "an iteration ended in another thread than the one that imported torch, which is the only one "
    "in which a profiler is started"
)
_IN_BACKWARD = (
    "iterations ended inside backward, where no profiler can be started; with kilter.govern() as "
    "job, call job.mark() after backward"
)
_WAIT_S = 10.0
"""How long another thread that prepares a profiler waits for ours to be switched off."""
_INTERRUPTED = "an exception of the program came while the profiler was switched"
_NOT_SAVED = "what the profiler had seen was not written to its file"
_TOO_SHORT = "the program ended before its iterations could be observed"


class WindowState(enum.Enum):
    """In the order in which a window goes through them; it may fail from each of them."""

    WAITING = "waiting"
    PREPARING = "preparing"
    READY = "ready"
    OPENING = "opening"
    OPEN = "open"
    SHUTTING = "shutting"
    HELD = "held"
    """A patient window is held: the program is not over, and nothing is written before it is."""
    SAVING = "saving"
    SAVED = "saved"
    DONE = "done"
    """`trace` has read the file."""
    FAILED = "failed"
    """There is no trace; `why_not` says why."""


_SAVED_OR_LOST = (WindowState.SAVED, WindowState.DONE, WindowState.FAILED)
_OVER = (WindowState.HELD, WindowState.SAVING, *_SAVED_OR_LOST)
_STEPS = (WindowState.PREPARING, WindowState.OPENING, WindowState.SHUTTING)


class Window:
    """Driven by iteration ends: prepares the profiler at the one before `after`, opens at the next
    and closes `iterations` later (None: 1 on a GPU, 2 on a CPU).

    An iteration that ends inside backward (an optimizer that steps in a hook of a gradient) counts
    from the next call of a module outside of it. Once an iteration has ended in another thread,
    there is no trace.

    There can only be one profiler, and the program's own goes first: whenever it prepares one,
    ours ends.

    A `patient` window has its trace when the program is over, not earlier; a program that is killed
    has none.

    A `plain` window has times alone: neither shapes nor modules, with which switching the profiler
    off takes three times as long.

    `run` calls a function behind the fence, also after an error of ours: a profiler that is on has
    to be switched off all the same.

    `costs_s` says what each step took.

    An exception of the program, which a signal handler raises, may interrupt any step. Then the
    next iteration end takes the profiler out, and there is no trace. It has many attributes because
    whoever takes the profiler out has to know what each step had begun.
    """

    def __init__(
        self,
        marks: IterationClock,
        *,
        after: int = 5,
        iterations: int | None = None,
        patient: bool = False,
        plain: bool = False,
        run: Callable[[Callable[[], None]], object] = lambda function: function(),
    ) -> None:
        if after < 1 or (iterations is not None and iterations < 1):
            raise ValueError("a window begins after the first iteration end and holds an iteration")
        self._marks = marks
        self._fence = marks.fence
        self._after = after
        self._iterations = iterations
        self._patient = patient
        self._plain = plain
        self.state = WindowState.WAITING
        self.why_not: str | None = None
        """Why it ends, or has ended, without a trace."""
        self.costs_s: dict[str, float] = {}
        self.opened_at = 0
        """It opened at this iteration end."""
        self.ends_s: dict[int, float] = {}
        """It has the iteration ends in the trace, by number, as times of `time.monotonic()`."""
        self._profile: Any = None
        self._guard: _Guard | None = None
        self._file: Path | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._trace: IterationTrace | None = None
        self._annotations = _Annotations(self._fence)
        self._outside = _Outside(marks, run)
        self._lock = threading.RLock()
        """It stands between a thread that prepares our profiler and one that wants none of it."""
        self._worker: threading.Thread | None = None

    def start(self) -> None:
        """Watch for the program's own profiler from the import of torch on. Without it, that
        begins at the first iteration end; one that is already prepared by then is not noticed."""
        if self._guard is None:
            self._guard = _Guard(self._fence(self._make_way))
            self._guard.start()
            os.register_at_fork(after_in_child=self._forked)

    def iteration_ended(self, index: int) -> None:
        """Iteration `index` of the program has ended, in the thread that calls this."""
        if self.state in _OVER:
            return
        if in_backward():
            if self.state != WindowState.WAITING or index >= self._after - 1:
                self._outside.call(partial(self._iteration_ended, index))
        elif not self._outside.here:
            self._abandon(_ANOTHER_THREAD)
        elif not _capturing():
            self._iteration_ended(index)

    def close(self, timeout_s: float = 10.0) -> None:
        """The program is over: end it wherever it is. Whole iterations seen are not lost."""
        if self.state == WindowState.OPEN and self._outside.now:
            self._outside.finish()
        seen = self.state == WindowState.OPEN and self._marks.index > self.opened_at
        if seen and self.why_not is None and self._outside.now:
            self._shut()
        if self._worker is not None:
            self._worker.join(timeout_s)
        if self.state == WindowState.HELD:
            self._save()
        nobody_saves = self._worker is None or not self._worker.is_alive()
        if nobody_saves and self.state == WindowState.SAVING:
            self.state, self.why_not = WindowState.FAILED, _NOT_SAVED
            self._unguard()
        if self.state not in _OVER:
            late = self._outside.waiting and self._marks.index > self._after
            self._abandon(_IN_BACKWARD if late else _TOO_SHORT)

    def abandon(self, why: str) -> None:
        """Do without a trace, also where iterations have been recorded already."""
        if self.state == WindowState.HELD:
            self.state, self.why_not, self._profile = WindowState.FAILED, why, None
            self._unguard()
        self._abandon(why)

    def trace(self) -> IterationTrace | None:
        """What was seen; None before it is saved, or if failed. Not for the program's thread."""
        self._trace = self._trace or self.take(
            lambda file: read_kineto(
                file, flops=torch_flops(), iteration_s=self._marks.usual_s, breathe=_breathe
            )
        )
        return self._trace

    def take(self, read: Callable[[Path], WindowSeen]) -> WindowSeen | None:
        """What `read` makes of the profiler's file, once; None before it is saved, or if failed.
        Not for the program's thread."""
        if self.state != WindowState.SAVED or self._file is None:
            return None
        try:
            seen = read(self._file)
            self.state = WindowState.DONE
            return seen
        except FileError as error:
            self.state, self.why_not = WindowState.FAILED, str(error)
            return None
        finally:
            assert self._directory is not None
            self._directory.cleanup()

    @property
    def over(self) -> bool:
        """The profiler is done with, and what it saw is in its file, or lost."""
        return self.state in _SAVED_OR_LOST

    @property
    def busy(self) -> bool:
        """The profiler is prepared or on: only the program's thread can take it out."""
        return self.state in (WindowState.READY, WindowState.OPEN, *_STEPS)

    def _iteration_ended(self, index: int) -> None:
        """In the thread that imported torch, outside backward."""
        if self.why_not is not None or self.state in _STEPS:
            self._abandon(self.why_not or _INTERRUPTED)
        elif self.state == WindowState.WAITING and index >= self._after - 1:
            self.start()
            self._prepare()
        elif self.state == WindowState.READY:
            self._open(index)
        elif self.state == WindowState.OPEN:
            self._annotate_end(index)
            if index >= self.opened_at + (self._iterations or 1):
                self._shut()

    def _make_way(self) -> None:
        """The program is about to prepare a profiler. Where two are on in two threads, the one that
        is switched off last crashes: another thread waits until ours is off; and where that takes
        too long (our thread waits for the other one), ours is never switched off."""
        self._abandon(_THE_PROGRAM_S)
        end_s = time.monotonic() + _WAIT_S
        while self.busy and not self._outside.here and time.monotonic() < end_s:
            time.sleep(0.001)
        if self.busy and not self._outside.here:
            self.state = WindowState.FAILED
            self._outside.cancel()

    def _abandon(self, why: str) -> None:
        """End without a trace: now, or, where the profiler is prepared or on and cannot be switched
        at this place, at the next place where it can."""
        with self._lock:
            if self.state in _OVER:
                if self.over:
                    self._unguard()
                return
            self.why_not = self.why_not or why
            if not self.busy:
                self.state = WindowState.FAILED
        if self.busy and not self._outside.now:
            self._outside.call(partial(self._abandon, why))
            return
        self._outside.cancel()
        if self.busy:
            self._annotations.remove()
            self._take_out()
            self.state = WindowState.FAILED
            self._profile = None
        self._unguard()

    def _take_out(self) -> None:
        """Switch the profiler off, wherever an exception has interrupted us, also in here. To start
        one that was not prepared, or to stop one that is not on, crashes. Torch itself says whether
        it is on. Nothing says whether an interrupted preparation was over: on a GPU, where CUPTI
        waits from then on, it is done again, of which torch warns."""
        if self._profile is None:
            return
        assert self._guard is not None
        with _quiet_kineto():
            if self.state == WindowState.PREPARING and self._profile.use_device is not None:
                with self._guard.ours():
                    self._profile._prepare_trace()
                self.state = WindowState.READY
            if (
                self.state in (WindowState.READY, WindowState.OPENING)
                and not torch_internals.profiler_enabled()
            ):
                self.state = WindowState.OPENING
                self._profile._start_trace()
            self.state = WindowState.SHUTTING
            if torch_internals.profiler_enabled():
                self._profile.__exit__(None, None, None)
        vars(sys.modules["torch.autograd.profiler"])["_is_profiler_enabled"] = False

    def _unguard(self) -> None:
        if self._guard is not None:
            self._guard.stop()

    def _forked(self) -> None:
        """In a child that the program forked inside the window, the profiler would go on for ever:
        nobody is there to end it."""
        if self.state == WindowState.OPEN:
            torch_internals.enable_record_function(False)
        if "prepare" in self.costs_s:
            _leave_kineto_behind()
        self.state = WindowState.FAILED
        self._annotations.forget()

    def _prepare(self) -> None:
        if _profiler_active():
            self._abandon(_THE_PROGRAM_S)
            return
        import torch

        # What torch.profiler.profile stands on; that one adds a warning in some versions, and
        # builds a Python object for every event when it is stopped (60 us each on an H200's host).
        from torch.autograd.profiler import profile

        with self._lock:
            if self.state != WindowState.WAITING:
                return
            self.state = WindowState.PREPARING
        cuda = torch.cuda.is_initialized()
        self._iterations = self._iterations or (1 if cuda else 2)
        # Without use_kineto there would be no kernels in the trace, and no word about it.
        self._profile = profile(
            use_device="cuda" if cuda else None, use_kineto=True, record_shapes=not self._plain
        )
        assert self._guard is not None
        with self._guard.ours(), self._timed("prepare"):
            self._profile._prepare_trace()
        self.state = WindowState.READY

    def _open(self, index: int) -> None:
        self.state = WindowState.OPENING
        with self._timed("open"), _quiet_kineto():
            self._profile._start_trace()
            self._annotations.install(
                modules=not (self._plain or torch_internals.anything_compiled()),
                inside=self._outside.module,
            )
        self.state = WindowState.OPEN
        self.opened_at = index
        self._annotate_end(index)

    def _annotate_end(self, index: int) -> None:
        self._annotations.iteration_ended()
        self.ends_s[index] = time.monotonic()

    def _shut(self) -> None:
        self.state = WindowState.SHUTTING
        with self._timed("shut"), _cupti_goes(), _quiet_kineto():
            self._annotations.remove()
            self._profile.__exit__(None, None, None)
        self._outside.cancel()
        if self._patient:
            self.state = WindowState.HELD
        else:
            self.state = WindowState.SAVING
            worker = threading.Thread(
                target=self._fence(self._save), name="kilter-window", daemon=True
            )
            worker.start()
            self._worker = worker

    def _save(self) -> None:
        self.state = WindowState.SAVING
        # The profiler opens files by name and for everybody, beside this one, too: nobody else
        # may enter the directory.
        self._directory = tempfile.TemporaryDirectory(prefix="kilter-", ignore_cleanup_errors=True)
        path = Path(self._directory.name, "kineto.json")
        with self._timed("save"):
            self._profile.export_chrome_trace(str(path))
        self._file = path
        self.state = WindowState.SAVED
        self._profile = None
        self._unguard()

    def _timed(self, step: str) -> _Timed:
        return _Timed(self.costs_s, step)


class _Outside:
    """The places where the profiler may be switched: in the thread that imported torch, outside
    backward; and the next such place, at the beginning of a module's forward."""

    def __init__(self, marks: IterationClock, run: Callable[[Callable[[], None]], object]) -> None:
        self._marks = marks
        self._run = run
        self._function: Callable[[], None] | None = None
        self._handle: Any = None
        self._lock = threading.RLock()
        self.module: Any = None
        """This module's forward begins, while a function that was left is called there."""

    @property
    def here(self) -> bool:
        """Is this the thread?"""
        return threading.get_ident() == self._marks.torch_thread

    @property
    def now(self) -> bool:
        """Is this such a place?"""
        return self.here and not in_backward() and not _capturing()

    @property
    def waiting(self) -> bool:
        """Has something been left for the next such place, which has not come yet?"""
        return self._function is not None

    def call(self, function: Callable[[], None]) -> None:
        """Have it called there; instead of what was to be called before. In a compiled program,
        where a hook on all modules would be traced, it is never called."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        with self._lock:
            self._function = function
            if self._handle is None and not torch_internals.anything_compiled():
                self._handle = register_module_forward_pre_hook(self._entered)

    def cancel(self) -> None:
        """Call nothing. Twice is once."""
        with self._lock:
            self._function = None
            handle, self._handle = self._handle, None
            if handle is not None:
                handle.remove()

    def finish(self) -> None:
        """Call here what was to be called at the next such place."""
        function = self._function
        self.cancel()
        if function is not None:
            self._run(function)

    def _entered(self, module: Any, _args: Any) -> None:
        if self.now:
            self.module = module
            self.finish()
            self.module = None


class _Guard:
    """Tells when the program prepares a profiler of its own, before it does.

    Torch has no hook for that, and two at a time are an error in the program's own call, so the
    method by which every Kineto profiler begins is replaced until our window is over.
    """

    def __init__(self, in_the_way: Callable[[], None]) -> None:
        self._in_the_way = in_the_way
        self._ours: set[int] = set()
        """We prepare a profiler in these threads."""
        self._waiting: after_import | None = None
        self._restore: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._waiting = after_import("torch.autograd.profiler", self._replace)
        self._waiting.install()

    def stop(self) -> None:
        """Twice is once."""
        if self._waiting is not None:
            self._waiting.cancel()
        self._restore()
        self._restore = lambda: None

    @contextmanager
    def ours(self) -> Iterator[None]:
        """What this thread prepares inside is ours."""
        thread = threading.get_ident()
        self._ours.add(thread)
        try:
            yield
        finally:
            self._ours.discard(thread)

    def _replace(self) -> None:
        from torch.autograd.profiler import profile

        original = profile._prepare_trace

        def prepare(profiler: Any) -> Any:
            if threading.get_ident() not in self._ours:
                self._in_the_way()
            return original(profiler)

        def restore() -> None:
            if profile._prepare_trace is prepare:
                profile._prepare_trace = original

        self._restore = restore
        profile._prepare_trace = prepare


class _Timed:
    def __init__(self, costs_s: dict[str, float], step: str) -> None:
        self._costs_s, self._step = costs_s, step

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._costs_s[self._step] = time.perf_counter() - self._begin


@contextmanager
def _set_unless_chosen(variable: str, value: str) -> Iterator[None]:
    """An environment variable that Kineto reads; the program's own choice stands."""
    if variable in os.environ:
        yield
        return
    try:
        os.environ[variable] = value
        yield
    finally:
        os.environ.pop(variable, None)


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Kineto logs nothing inside, where its level can be reached; afterwards it logs as before,
    for the program's own profiler. The variable KINETO_LOG_LEVEL would silence both, because Kineto
    reads it once: when the first profiler is prepared, which has to be over."""
    level = _kineto_log_level()
    if level is None:
        yield
        return
    before = level.value
    try:
        level.value = 99
        yield
    finally:
        level.value = before


def _kineto_log_level() -> ctypes.c_int | None:
    """Kineto's own variable, on systems where its library shows it."""
    try:
        library = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD)
        return ctypes.c_int.in_dll(library, "_ZN9libkineto6Logger14severityLevel_E")
    except (OSError, ValueError, AttributeError):
        return None


def _cupti_goes() -> AbstractContextManager[None]:
    """Have CUPTI taken out when the profiler stops. Left in, which is the default of many versions,
    it goes on to slow every launch down (pytorch#144455 reports 10 to 20 %). Before
    CUDA 12.6 taking it out could crash with CUDA graphs (pytorch#146604)."""
    import torch

    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return _set_unless_chosen("TEARDOWN_CUPTI", "1") if cuda >= (12, 6) else nullcontext()


def _leave_kineto_behind() -> None:
    """In a forked child: end without the C++ destructors of what the parent has loaded.

    Kineto's runs at `exit` and waits for a thread that the fork has not copied, for ever. Exit
    handlers are called last one first, so these two come before it; the code stays as it is. Only
    the C library's own buffers are still to be written: Python has ended by then.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)


def _capturing() -> bool:
    """Does the program record a CUDA graph? A switch of the profiler would break it."""
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _profiler_active() -> bool:
    profiler = sys.modules["torch.autograd.profiler"]
    return bool(torch_internals.profiler_enabled() or profiler._is_profiler_enabled)


class _Annotations:
    """Names in the trace: modules and iteration ends. In place only while a window is open.

    Optimizers and data loaders are annotated by torch itself, modules by torch's global hooks;
    those are not installed once anything is compiled, because the compiler would trace them.
    """

    def __init__(self, fence: Fenced) -> None:
        self._fence = fence
        self._handles: list[Any] = []
        self._open: list[tuple[object, Any]] = []
        self._names: dict[int, str] = {}
        self._thread = 0

    @property
    def here(self) -> bool:
        """Is this the thread that opened the window? Only that one can end it."""
        return threading.get_ident() == self._thread

    def install(self, *, modules: bool, inside: Any = None) -> None:
        """`inside` is a module whose forward has begun: it gives those inside their names."""
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        self._thread = threading.get_ident()
        if modules:
            enter, leave = self._fence(self._enter), self._fence(self._leave)
            self._handles.append(register_module_forward_pre_hook(enter))
            self._handles.append(register_module_forward_hook(leave, always_call=True))
            if inside is not None:
                self._name(inside)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._leave_all()
        self._names.clear()

    def forget(self) -> None:
        """Be without effect in a forked child."""
        self._thread = 0

    def iteration_ended(self) -> None:
        self._leave_all()
        _annotate(ITERATION_END).__exit__(None, None, None)

    def _enter(self, module: Any, _args: Any) -> None:
        # Modules that run on other threads (the backward's, when it recomputes activations) would
        # close annotations of this one.
        if self.here:
            if id(module) not in self._names:
                self._name(module)
            self._open.append((module, _annotate(MODULE + self._names[id(module)])))

    def _leave(self, module: Any, _args: Any, _output: Any) -> None:
        if self.here and any(m is module for m, _ in self._open):
            while self._open:
                inner, record = self._open.pop()
                record.__exit__(None, None, None)
                if inner is module:
                    return

    def _name(self, root: Any) -> None:
        """Names of a module that no known module contains, and of all inside it."""
        wrapped = type(root).__name__ in ("DistributedDataParallel", "DataParallel")
        for path, module in root.named_modules():
            path = path.removeprefix("module").removeprefix(".") if wrapped else path
            self._names.setdefault(id(module), path or type(module).__name__)

    def _leave_all(self) -> None:
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)


def _annotate(name: str) -> Any:
    record = torch_internals.RecordFunctionFast(name)
    record.__enter__()
    return record


def _breathe() -> None:
    """Let the program's thread have the interpreter, which would else wait 5 ms each time."""
    time.sleep(0.0002)
