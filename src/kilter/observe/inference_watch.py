"""Finds the iterations of a program that steps no optimizer: the calls of its outermost module."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kilter.observe import torch_internals
from kilter.observe.imports import after_import

Fenced = Callable[[Callable[..., None]], Callable[..., None]]

INFERENCE_AFTER_S = 2.0
"""A program that has not stepped any optimizer for so long after `import torch` may only infer, or
train with an optimizer of its own."""

_DO = "to say where an iteration ends: with kilter.govern() as job, and job.mark() after each one"
_NO_STEP = "no optimizer of torch.optim stepped, and"
NO_INFERENCE = f"{_NO_STEP} no module was called for inference alone; {_DO}"
NO_BACKWARD = f"{_NO_STEP} no backward ran through what the outermost module returned; {_DO}"
NOT_ALIKE = f"{_NO_STEP} several ranks have to count their iterations alike; {_DO}"
_WATCHED_CALLS = 64
"""After so many calls of outermost modules the search for one that infers ends: the program trains,
and gathers no gradients of so many batches for one step."""


class InferenceWatch(threading.Thread):
    """Finds the module whose calls are the iterations of a program that has no optimizer.

    Waits in a thread of its own until the program has gone `INFERENCE_AFTER_S` without a step,
    then watches all modules for a few calls (torch's global hooks), picks the outermost one that
    is called without gradients, hooks that one alone, and takes the global hooks out. Where none
    is, it picks the one that is called most with them.

    The compiler would trace these hooks, and warns of them. So they leave before the program's
    first module or function is compiled; from then on only the modules that `torch.compile` has
    made are watched, whose own hooks run outside of what is compiled. That the compiler has been
    imported says nothing: tensor parallelism imports it, and so does every optimizer.
    (`torch.jit.script` refuses a module with a hook of ours.) A program may take long to load what
    it compiles, so modules that are compiled later are watched from when they are made. It has many
    attributes because it watches in three ways (all modules, compiled ones, the one that was
    found), and each has to be taken out at any moment.
    """

    def __init__(
        self,
        infers: Callable[[Any], None],
        trains: Callable[[Any], None],
        failed: Callable[[str], None],
        fence: Fenced,
    ) -> None:
        """`infers` or `trains` is called with the module, `failed` with why there is none."""
        super().__init__(name="kilter-inference-watch", daemon=True)
        self._infers = infers
        self._trains = trains
        self._failed = failed
        self._fence = fence
        self._over = threading.Event()
        self._compiling = self._fence(self._switch)
        self._compiler = after_import(torch_internals.COMPILER, self._fence(self._await_compiling))
        self._noting = after_import(torch_internals.COMPILED_MODULES, self._fence(self._note))
        self._forget: Callable[[], None] = lambda: None
        self._compiled: weakref.WeakSet[Any] = weakref.WeakSet()
        """What `torch.compile` has made of modules. Noted as it is made: to look for it with `gc`
        from this thread could break a tuple that the program is building at that moment."""
        self._awaiting = False
        """The compiler calls us before it traces."""
        self._globally = False
        """All modules are watched."""
        self._only_compiled = False
        """These are watched, and none else."""
        self._handles: list[Any] = []
        self._outer: dict[int, Any] = {}
        """It maps a thread to the outermost module that the thread is in."""
        self._counts: dict[int, int] = {}
        self._trained: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """It says how often a module was called with gradients, as the outermost."""
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
        if self._awaiting:
            started = torch_internals.compilations
            # Another list: the compiler may be walking through this one.
            kept = [each for each in started.start_callbacks if each is not self._compiling]
            started.start_callbacks = kept
        self._unhook()

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _watch(self) -> None:
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        self._compiler.install()
        if self._over.is_set():
            return
        if self._compiled or torch_internals.anything_compiled():
            self._watch_compiled()
        else:
            self._globally = True
            self._handles = [
                register_module_forward_pre_hook(self._fence(self._enter)),
                register_module_forward_hook(self._fence(self._leave), always_call=True),
            ]
            if self._compiled or torch_internals.anything_compiled():
                self._switch()  # the program did so at this moment
        if self._over.is_set():
            self.stop()

    def _await_compiling(self) -> None:
        """The compiler is there: it calls us before it traces anything."""
        torch_internals.compilations.start_callbacks.append(self._compiling)
        self._awaiting = True

    def _switch(self, _args: Any = None) -> None:
        """Something is compiled for the first time."""
        if self._globally and not self._over.is_set():
            self._globally = False
            self._unhook()
            self._watch_compiled()

    def _note(self) -> None:
        kind = torch_internals.OptimizedModule
        made, compiled = kind.__init__, self._compiled

        def note(module: Any, *args: Any, **kwargs: Any) -> None:
            made(module, *args, **kwargs)
            compiled.add(module)
            self._switch()
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
            self._failed(f"{_NO_STEP} what is compiled tells nothing where it only infers; {_DO}")

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
        # No output: the call has failed, and torch is walking through its table of hooks.
        if output is None or self._over.is_set():
            return
        if torch.is_grad_enabled():
            self._trained[module] = self._trained.get(module, 0) + 1
        if self._calls >= _WATCHED_CALLS:
            self.stop()
            if self._trained:
                self._trains(max(self._trained, key=self._trained.__getitem__))
            else:
                self._failed(NO_INFERENCE)
            return
        if torch.is_grad_enabled():
            return
        calls = self._counts[id(module)] = self._counts.get(id(module), 0) + 1
        if calls == 3:
            self.stop()
            self._infers(module)


class BackwardSeen:
    """Whether backward has run through what a module returned."""

    def __init__(self) -> None:
        self._seen = False

    def watch(self, output: Any) -> None:
        import torch

        for tensor in torch_internals.pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._note)
                return

    def _note(self, _gradients: Any) -> None:
        self._seen = True

    def taken(self) -> bool:
        """Since this was asked before."""
        seen, self._seen = self._seen, False
        return seen


class ModuleMark:
    """The hook on the program's own module.

    The program may save or copy its module with all its hooks. A copy marks nothing, and a saved
    one loads where kilter is not installed: the hook is pickled as a call without effect.
    """

    def __init__(self, mark: Callable[[Any], None]) -> None:
        """`mark` is called with what the module returned; before it is called, with None."""
        self._mark = mark

    def __call__(self, module: Any, args: Any, output: Any = None) -> None:
        self._mark(output)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (sys.audit, "kilter.mark")
