"""Marks the end of every iteration of an unchanged program, and times it. Cheap and permanent.

An iteration ends where an optimizer has stepped (`torch`'s global post-step hook), or where the
program says so (`mark`), or, in a program that only infers, where its outermost module returns.
On a GPU the times are the GPU's own: an event is recorded on the current stream at each iteration
end and read a few iterations later, when it has passed, so that nobody ever waits for the GPU.
"""

from __future__ import annotations

import functools
import hashlib
import os
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kilter.observe import torch_internals
from kilter.observe.cycle import Cycle
from kilter.observe.imports import after_import

Fenced = Callable[[Callable[..., None]], Callable[..., None]]
AtIterationEnd = Callable[[int, float], None]

INFERENCE_AFTER_S = 2.0
"""A program that has not stepped any optimizer for so long after `import torch` may only infer."""

_WATCHED_CALLS = 64
"""Calls of outermost modules after which the search for one that infers ends."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One finished iteration: from iteration end `index - 1` to iteration end `index`."""

    index: int
    end_s: float
    """When the host passed the iteration end, on the clock of `IterationClock`."""
    duration_s: float
    timeline: str
    """Whose clock `duration_s` is from: `gpu` or `host`."""
    skipped: int = 0
    """Optimizer steps that a gradient scaler left out: the interval holds so many more
    iterations, and is not the time of one."""


@dataclass(slots=True)
class _Pending:
    index: int
    t_s: float
    event: Any
    """A recorded CUDA event, or None."""
    epoch: int
    """Intervals between iteration ends of different epochs are not iterations."""


class IterationClock:
    """Calls `on_iteration_end(index, t_s)` at every iteration end, in the program's own thread.

    Several threads of the program may end iterations. `finished()` hands out the times of
    iterations as they become known. `fence` wraps every
    function that the program calls without knowing it: errors of ours must end there.
    `stop()` takes everything out again; a forked child is without marks from its first line.
    """

    def __init__(
        self,
        on_iteration_end: AtIterationEnd,
        *,
        fence: Fenced = lambda function: function,
        clock: Callable[[], float] = time.monotonic,
        gpu_events: bool = True,
    ) -> None:
        self._on_iteration_end = on_iteration_end
        self.fence = fence
        self._clock = clock
        self._gpu_events = gpu_events
        self.index = -1
        """The last iteration end; -1 before the first."""
        self.source: str | None = None
        """What the iteration ends come from: `optimizer`, `module` or `explicit`."""
        self.why_not: str | None = None
        """Why there are no iteration ends, where that is known."""
        self.cost_s = 0.0
        """Time spent in our hooks, with what `on_iteration_end` took."""
        self.calls = 0
        self._cycle = Cycle()
        self._epoch = 0
        self._scaled = False
        self._device: Any = None
        """The CUDA device of the last iteration end."""
        self._shapes: list[str] = []
        """Of the parameters that are stepped here, with their types."""
        self._known: dict[int, Any] = {}
        """id(optimizer) -> the CUDA device of its parameters, or None."""
        self._pending: deque[_Pending] = deque()
        self._finished: deque[Iteration] = deque(maxlen=4096)
        self._recent: deque[float] = deque(maxlen=31)
        self._pool: list[Any] = []
        self._handles: list[Any] = []
        self._waiting: after_import | None = None
        self._watcher: _InferenceWatch | None = None
        self.torch_thread: int | None = None
        """The thread that imported torch; the main thread if it was imported before `start`."""
        self._running = False
        self._inside = 0
        """How many threads are in a step of the program at this moment."""
        self._threads: dict[int, bool] = {}
        """Thread in which an optimizer stepped or the program marked -> whether it ever did so
        outside backward. Backward runs in threads of its own on a GPU."""
        self._lock = threading.RLock()
        """Of all that counts iterations: several threads of the program may train at once. A
        signal handler of the program may step an optimizer while its thread holds the lock."""

    def start(self) -> None:
        """Begin now, or as soon as the program has imported torch; torch is not imported here."""
        self._running = True
        if "torch" in sys.modules:
            self.torch_thread = threading.main_thread().ident
        # Cannot be taken back, so it must not keep us alive.
        forked = weakref.WeakMethod(self.stop)
        os.register_at_fork(after_in_child=lambda: _call(forked()))
        self._waiting = after_import("torch", self.fence(self._hook))
        self._waiting.install()

    def stop(self) -> None:
        """Be without effect from now on, and take the hooks out. Twice is once.

        Torch walks through its table of hooks while it calls them, and a table that changes then
        is an error in the program's own step: when called from inside a step or from another
        thread, the hook stays behind, switched off.
        """
        self._running = False
        if self._waiting is not None:
            self._waiting.cancel()
        if self._watcher is not None:
            self._watcher.stop()
        if not self._inside and self._threads.keys() <= {threading.get_ident()}:
            while self._handles:
                self._handles.pop().remove()

    def mark(self) -> None:
        """The program says that an iteration ends here: from now on nothing else ends one."""
        if not self._running:
            return
        begin = time.perf_counter()
        with self._lock:
            if self.source != "explicit":
                self._set_source("explicit")
            self._note_thread()
            ended = self._iteration_ended(_cuda_in_use())
        self._tell(ended, begin)

    @property
    def threads(self) -> int:
        """How many threads trained: stepped an optimizer, or marked, outside of backward."""
        return sum(self._threads.values())

    def finished(self) -> list[Iteration]:
        """Iterations whose time has become known since the last call, oldest first."""
        done = []
        while self._finished:
            done.append(self._finished.popleft())
        return done

    @property
    def usual_s(self) -> float | None:
        """Median time of the last iterations (at most 31); None before the first."""
        return statistics.median(self._recent) if self._recent else None

    @property
    def device(self) -> Any:
        """The CUDA device of the last iteration end; None for a program on CPUs."""
        return self._device

    @property
    def gpu_uuid(self) -> str | None:
        """Of the GPU that the iterations run on, as torch tells it (without the `GPU-` that NVML
        puts before); None without one."""
        if self._device is None:
            return None
        return str(sys.modules["torch"].cuda.get_device_properties(self._device).uuid)

    @property
    def role(self) -> str:
        """The kind of work that this rank does, told by the shapes of the parameters that it
        steps: alike on all ranks of a data-parallel job, different on the stages of a pipeline."""
        return hashlib.sha256(repr(sorted(self._shapes)).encode()).hexdigest()[:6]

    def _hook(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if self.torch_thread is None:
            self.torch_thread = threading.get_ident()
        stepped = self.fence(self._stepped)

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            stepped(optimizer, args, kwargs)

        self._handles.append(register_optimizer_step_post_hook(torch_internals.uncompiled(hook)))
        self._watcher = _InferenceWatch(self)
        self._watcher.start()

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._running or self.source == "explicit":
            return
        begin = time.perf_counter()
        with self._lock:
            self._inside += 1
            key = id(optimizer)
            if key not in self._known:
                self._meet(key, optimizer)
            ended = self._iteration_ended(self._known[key]) if self._cycle.step(key) else None
        self._tell(ended, begin)
        with self._lock:
            self._inside -= 1

    def _meet(self, key: int, optimizer: Any) -> None:
        if self.source != "optimizer":
            self._set_source("optimizer")
        self._note_thread()
        if len(self._known) > 4096:
            self._known.clear()
        self._shapes += _shapes(optimizer)
        self._known[key] = _cuda_device(optimizer) if self._gpu_events else None
        self._scaled = self._scaled or _called_by_scaler()

    def _set_source(self, source: str) -> None:
        self.source, self.why_not = source, None
        self._epoch += 1
        if self._watcher is not None:
            self._watcher.stop()

    def _note_thread(self) -> None:
        thread = threading.get_ident()
        self._threads[thread] = self._threads.get(thread, False) or not in_backward()

    def _iteration_ended(self, device: Any) -> _Pending:
        if device != self._device:
            # Events belong to the device on which they were recorded, and so do the times between.
            self._device = device
            self._pool.clear()
            self._epoch += 1
        event = self._record(device) if device is not None else None
        now = self._clock()
        self.index += 1
        epoch = self._epoch + self._cycle.changed
        ended = _Pending(self.index, now, event, epoch)
        self._pending.append(ended)
        self._harvest()
        return ended

    def _tell(self, ended: _Pending | None, begin: float) -> None:
        """Not under the lock: what is done at the end of an iteration may take a while."""
        if ended is not None:
            self._on_iteration_end(ended.index, ended.t_s)
        with self._lock:
            self.calls += 1
            self.cost_s += time.perf_counter() - begin

    def _record(self, device: Any) -> Any:
        cuda = sys.modules["torch"].cuda
        if cuda.is_current_stream_capturing():
            return None
        event = self._pool.pop() if self._pool else cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(device))
        return event

    def _harvest(self) -> None:
        """Turn pairs of passed iteration ends into times.

        Only here, in the program's own thread and never in another one: asking after an event
        breaks a CUDA graph that the program captures at that moment. One pair at each iteration
        end keeps up; the second catches up.
        """
        for _ in range(2):
            if len(self._pending) < 2:
                return
            first, second = self._pending[0], self._pending[1]
            if second.event is not None and not second.event.query():
                return
            self._pending.popleft()
            if first.epoch == second.epoch:
                self._finish(first, second)
            if first.event is not None and first.epoch == self._pending[-1].epoch:
                self._pool.append(first.event)

    def _finish(self, first: _Pending, second: _Pending) -> None:
        on_gpu = first.event is not None and second.event is not None
        if on_gpu:
            duration_s = first.event.elapsed_time(second.event) * 1e-3
        else:
            duration_s = second.t_s - first.t_s
        skipped = self._skipped(duration_s) if self._scaled else 0
        if not skipped:
            self._recent.append(duration_s)
        timeline = "gpu" if on_gpu else "host"
        self._finished.append(Iteration(second.index, second.t_s, duration_s, timeline, skipped))

    def _skipped(self, duration_s: float) -> int:
        """How many steps a gradient scaler left out; it tells nobody, but the interval doubles."""
        if len(self._recent) < 3:
            return 0
        ratio = duration_s / statistics.median(self._recent)
        times = round(ratio)
        return times - 1 if 2 <= times <= 8 and abs(ratio - times) < 0.2 * times else 0


def _call(method: Callable[[], None] | None) -> None:
    if method is not None:
        method()


def in_backward() -> bool:
    """Is autograd running in this thread at this moment: in a hook of a tensor, of a parameter's
    gradient or of a saved tensor, in a recomputed forward, in a callback at backward's end?

    Afterwards autograd puts the thread's state back to what it was before, with the profiler's.
    """
    return "torch" in sys.modules and torch_internals.current_graph_task() != -1


def _cuda_in_use() -> Any:
    """The current CUDA device, if the program uses CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _cuda_device(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return parameter.device if parameter.is_cuda else None
    return None


def _shapes(optimizer: Any) -> list[str]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [f"{tuple(p.shape)} {p.dtype}" for p in parameters]


def _called_by_scaler() -> bool:
    """Is this optimizer stepped by a `GradScaler`? Asked once per optimizer."""
    frame = sys._getframe(1)
    for _ in range(24):
        if frame.f_code.co_filename.endswith("grad_scaler.py"):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


class _InferenceWatch(threading.Thread):
    """Finds the module whose calls are the iterations of a program that has no optimizer.

    Waits in a thread of its own until the program has gone `INFERENCE_AFTER_S` without a step,
    then watches all modules for a few calls (torch's global hooks), picks the outermost one that
    is called without gradients, hooks that one alone, and takes the global hooks out.

    The compiler would trace these hooks, and warns of them. It is imported by whatever compiles,
    and also by every optimizer: once it is there, only the modules that `torch.compile` has made
    are watched, whose own hooks run outside of what is compiled. (`torch.jit.script`, which does
    not import it, refuses a module with a hook of ours.) A program may take long to load what it
    compiles, so modules that are compiled later are watched from when they are made.
    """

    def __init__(self, marks: IterationClock) -> None:
        super().__init__(name="kilter-inference-watch", daemon=True)
        self._marks = marks
        self._fence = marks.fence
        self._over = threading.Event()
        self._compiler = after_import(torch_internals.COMPILER, self._fence(self._switch))
        self._noting = after_import(torch_internals.COMPILED_MODULES, self._fence(self._note))
        self._forget: Callable[[], None] = lambda: None
        self._compiled: weakref.WeakSet[Any] = weakref.WeakSet()
        """What `torch.compile` has made of modules. Noted as it is made: to look for it with `gc`
        from this thread could break a tuple that the program is building at that moment."""
        self._only_compiled = False
        """These are watched, and none else."""
        self._handles: list[Any] = []
        self._outer: dict[int, Any] = {}
        """Thread -> the outermost module that it is in."""
        self._counts: dict[int, int] = {}
        self._calls = 0

    def run(self) -> None:
        if not self._over.wait(INFERENCE_AFTER_S):
            self._fence(self._watch)()

    def start(self) -> None:
        self._noting.install()
        super().start()

    def stop(self) -> None:
        self._over.set()
        self._compiler.cancel()
        self._noting.cancel()
        self._forget()
        self._unhook()

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _watch(self) -> None:
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        if torch_internals.COMPILER not in sys.modules:
            self._compiler.install()
        if self._over.is_set():
            return
        if torch_internals.COMPILER in sys.modules:
            self._watch_compiled()
        else:
            self._handles = [
                register_module_forward_pre_hook(self._fence(self._enter)),
                register_module_forward_hook(self._fence(self._leave), always_call=True),
            ]
        if self._over.is_set():
            self.stop()

    def _switch(self) -> None:
        """The compiler has come while all modules were watched."""
        if not self._over.is_set():
            self._unhook()
            self._watch_compiled()

    def _note(self) -> None:
        kind = torch_internals.OptimizedModule
        made, compiled = kind.__init__, self._compiled

        def note(module: Any, *args: Any, **kwargs: Any) -> None:
            made(module, *args, **kwargs)
            compiled.add(module)
            if self._only_compiled and not self._over.is_set():
                self._hook(module)

        def forget() -> None:
            if kind.__init__ is note:
                kind.__init__ = made

        kind.__init__ = note
        self._forget = forget

    def _watch_compiled(self) -> None:
        self._only_compiled = True
        compiled = list(self._compiled)
        for module in compiled:
            self._hook(module)
        if not compiled:
            self._marks.why_not = (
                "no optimizer step yet; to time inference: with kilter.govern() as job, job.mark()"
            )

    def _hook(self, module: Any) -> None:
        """Twice does no harm: the second finds that the module has been left."""
        self._handles += (
            module.register_forward_pre_hook(self._fence(self._enter)),
            module.register_forward_hook(self._fence(self._leave), always_call=True),
        )

    def _enter(self, module: Any, _args: Any) -> None:
        self._outer.setdefault(threading.get_ident(), module)

    def _leave(self, module: Any, _args: Any, output: Any) -> None:
        import torch

        thread = threading.get_ident()
        if self._outer.get(thread) is not module:
            return
        del self._outer[thread]
        self._calls += 1
        if self._calls >= _WATCHED_CALLS and output is not None:
            self._marks.why_not = (
                "no optimizer and no module that infers; with kilter.govern() as job, job.mark()"
            )
            self.stop()
        # No output: the call has failed, and torch is walking through its table of hooks.
        if output is None or torch.is_grad_enabled() or self._over.is_set():
            return
        calls = self._counts[id(module)] = self._counts.get(id(module), 0) + 1
        if calls == 3:
            self._choose(module)

    def _choose(self, module: Any) -> None:
        self.stop()
        self._marks._set_source("module")
        device = next((p.device for p in module.parameters() if p.is_cuda), None)
        hook = _ModuleMark(self._fence(functools.partial(self._returned, device)))
        self._marks._handles.append(module.register_forward_hook(hook))

    def _returned(self, device: Any) -> None:
        marks = self._marks
        if not marks._running or marks.source != "module":
            return
        begin = time.perf_counter()
        with marks._lock:
            ended = marks._iteration_ended(device if marks._gpu_events else None)
        marks._tell(ended, begin)


class _ModuleMark:
    """The hook on the program's own module.

    The program may save or copy its module with all its hooks. A copy marks nothing, and a saved
    one loads where kilter is not installed: the hook is pickled as a call without effect.
    """

    def __init__(self, mark: Callable[..., None]) -> None:
        self._mark = mark

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        self._mark()

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (sys.audit, "kilter.mark")
