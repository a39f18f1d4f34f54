"""Marks the end of every iteration of an unchanged program, and times it. Cheap and permanent.

An iteration ends where an optimizer has stepped (`torch`'s global post-step hook), or where the
program says so (`mark`), or, in a program that only infers, where its outermost module returns.
Where a program trains without an optimizer of torch, its outermost module's first call after a
backward begins the next iteration.
On a GPU the times are the GPU's own (`end_times.py`).
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kilter.core.forks import in_forked_children
from kilter.observe import optimizer_steps, torch_internals
from kilter.observe.end_times import EndTimes, Iteration, IterationEnd
from kilter.observe.imports import after_import
from kilter.observe.inference_watch import (
    NO_BACKWARD,
    NOT_ALIKE,
    BackwardSeen,
    Fenced,
    InferenceWatch,
    ModuleMark,
)
from kilter.observe.stepped_optimizers import SteppedOptimizers, called_by_scaler

AtIterationEnd = Callable[[int, float], None]


class IterationClock:
    """Calls `on_iteration_end(index, t_s)` at every iteration end, in the program's own thread.

    Several threads of the program may end iterations. `finished()` hands out the times of
    iterations as they become known. `fence` wraps every function that the program calls without
    knowing it: errors of ours must end there. `stop()` takes everything out again; a forked child
    is without marks from its first line.

    Durations, optimizers and the search for inference are objects of their own. It still has many
    attributes because what stays here changes together, under one lock: the index, its source, the
    threads, the hooks and their cost.
    """

    def __init__(
        self,
        on_iteration_end: AtIterationEnd,
        *,
        fence: Fenced = lambda function: function,
    ) -> None:
        self._on_iteration_end = on_iteration_end
        self.fence = fence
        self.index = -1
        """The last iteration end has this number; -1 before the first."""
        self.source: str | None = None
        """What the iteration ends come from: `optimizer`, `module` or `explicit`."""
        self.why_not: str | None = None
        """Why there are no iteration ends, where that is known."""
        self.cost_s = 0.0
        """Our hooks took this time, with what `on_iteration_end` took."""
        self.calls = 0
        self._optimizers = SteppedOptimizers()
        self._times = EndTimes()
        self._module_hooks: list[Any] = []
        self._backward = BackwardSeen()
        self._leave_steps: Callable[[], None] = lambda: None
        self._waiting: after_import | None = None
        self._watcher: InferenceWatch | None = None
        self.torch_thread: int | None = None
        """This thread imported torch; it is the main thread if torch was imported before
        `start`."""
        self._running = False
        self._threads: dict[int, bool] = {}
        """It says of each thread in which an optimizer stepped or the program marked whether it
        ever did so outside backward. Backward runs in threads of its own on a GPU."""
        self._lock = threading.RLock()
        """It guards all that counts iterations: several threads of the program may train at once. A
        signal handler of the program may step an optimizer while its thread holds the lock."""

    def start(self) -> None:
        """Begin now, or as soon as the program has imported torch; torch is not imported here."""
        self._running = True
        if "torch" in sys.modules:
            self.torch_thread = threading.main_thread().ident
        in_forked_children(self.stop)
        self._waiting = after_import("torch", self.fence(self._hook))
        self._waiting.install()

    def stop(self) -> None:
        """Be without effect from now on, and take the hooks out. Twice is once."""
        self._running = False
        if self._waiting is not None:
            self._waiting.cancel()
        if self._watcher is not None:
            self._watcher.stop()
        self._leave_steps()
        while self._module_hooks:
            self._module_hooks.pop().remove()

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
        return self._times.finished()

    @property
    def usual_s(self) -> float | None:
        """Median time of the last iterations (at most 31); None before the first."""
        return self._times.usual_s

    @property
    def device(self) -> Any:
        """The CUDA device of the last iteration end; None for a program on CPUs."""
        return self._times.device

    @property
    def gpu_uuid(self) -> str | None:
        """Of the GPU that the iterations run on, as torch tells it (without the `GPU-` that NVML
        puts before); None without one."""
        if self._times.device is None:
            return None
        return str(sys.modules["torch"].cuda.get_device_properties(self._times.device).uuid)

    @property
    def role(self) -> str:
        """The kind of work that this rank does, told by the shapes of the parameters that it
        steps: alike on all ranks of a data-parallel job, different on the stages of a pipeline."""
        return self._optimizers.role

    def _hook(self) -> None:
        if self.torch_thread is None:
            self.torch_thread = threading.get_ident()
        self._leave_steps = optimizer_steps.listen(after=self.fence(self._stepped))
        self._watcher = InferenceWatch(
            self._module_infers, self._module_trains, self._no_module, self.fence
        )
        self._watcher.start()

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._running or self.source == "explicit":
            return
        begin = time.perf_counter()
        with self._lock:
            optimizers = self._optimizers
            if not optimizers.knows(optimizer):
                self._meet(optimizer)
            device = optimizers.device_of(optimizer)
            ended = self._iteration_ended(device) if optimizers.step(optimizer) else None
        self._tell(ended, begin)

    def _meet(self, optimizer: Any) -> None:
        if self.source != "optimizer":
            self._set_source("optimizer")
        self._note_thread()
        self._optimizers.meet(optimizer)
        self._times.scaled = self._times.scaled or called_by_scaler()

    def _module_infers(self, module: Any) -> None:
        """The program infers: its iterations are the calls of this module."""
        self._set_source("module")
        hook = self._module_mark(module, self._module_ended)
        self._module_hooks.append(module.register_forward_hook(hook))

    def _module_trains(self, module: Any) -> None:
        """The program trains with an optimizer of its own, if it ever calls backward."""
        distributed = sys.modules["torch"].distributed
        ranked = distributed.is_available() and distributed.is_initialized()
        if ranked and distributed.get_world_size() > 1:
            self.why_not = NOT_ALIKE  # each rank has begun to watch at a moment of its own
            return
        self.why_not = NO_BACKWARD
        begins = self._module_mark(module, self._module_begins)
        self._module_hooks += (
            module.register_forward_pre_hook(begins),
            module.register_forward_hook(ModuleMark(self.fence(self._watch_backward))),
        )

    def _module_mark(self, module: Any, ended: Callable[[Any, Any], None]) -> ModuleMark:
        device = next((p.device for p in module.parameters() if p.is_cuda), None)
        return ModuleMark(self.fence(functools.partial(ended, device)))

    def _module_begins(self, device: Any, output: Any) -> None:
        if not self._running or self.source not in (None, "module") or in_backward():
            return
        if self._backward.taken():
            if self.source is None:
                self._set_source("module")
            self._module_ended(device, output)

    def _watch_backward(self, output: Any) -> None:
        if self._running and self.source in (None, "module"):
            self._backward.watch(output)

    def _no_module(self, why_not: str) -> None:
        self.why_not = why_not

    def _module_ended(self, device: Any, _output: Any) -> None:
        if not self._running or self.source != "module":
            return
        begin = time.perf_counter()
        with self._lock:
            ended = self._iteration_ended(device)
        self._tell(ended, begin)

    def _set_source(self, source: str) -> None:
        self.source, self.why_not = source, None
        self._times.begin_anew()
        if self._watcher is not None:
            self._watcher.stop()

    def _note_thread(self) -> None:
        thread = threading.get_ident()
        self._threads[thread] = self._threads.get(thread, False) or not in_backward()

    def _iteration_ended(self, device: Any) -> IterationEnd:
        event = self._times.record(device)
        now_s = time.monotonic()
        self.index += 1
        return self._times.end(self.index, now_s, event, self._optimizers.changed)

    def _tell(self, ended: IterationEnd | None, begin: float) -> None:
        """Not under the lock: what is done at the end of an iteration may take a while."""
        if ended is not None:
            self._on_iteration_end(ended.index, ended.t_s)
        with self._lock:
            self.calls += 1
            self.cost_s += time.perf_counter() - begin


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
