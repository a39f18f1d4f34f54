"""No hooks on saved tensors in a backward that saves none.

Autograd gives the hooks of the thread that calls `backward` to each node of the graph in turn. For
that it takes Python's lock a dozen times, about a microsecond of the host for every node, whether
it has saved anything or not. So our hooks are taken away meanwhile, where the plan expects that no
tensor is saved any more. Should the program save one nonetheless, autograd keeps it.

No public function stands between the program and autograd's engine, so ours takes the place of the
one that `torch.autograd.backward` and `torch.autograd.grad` call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kilter.memory.engine.replacements import Replacements
from kilter.memory.engine.store import called
from kilter.memory.engine.tensor_hooks import TensorHooks
from kilter.observe import torch_internals

CREATE_GRAPH = 2
"""The place of this argument of the engine, behind what backward begins at."""


class BackwardCalls(AbstractContextManager["BackwardCalls"]):
    """Stands between the program and the engine."""

    def __init__(self, hooks: TensorHooks, saves_no_more: Callable[[], bool]) -> None:
        self._hooks = hooks
        self._saves_no_more = saves_no_more
        self._replaced = Replacements()

    def __enter__(self) -> BackwardCalls:
        try:
            holder, name = torch_internals.holder_of("run_backward")
            self._run: Any = getattr(holder, name)
        except AttributeError:
            return self  # this PyTorch has no such function
        self._replaced.put(holder, name, self._run_backward)
        return self

    def __exit__(self, *exception: object) -> None:
        self._replaced.undo()

    def _run_backward(self, roots: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = self._hooks
        if hooks.aside:  # within another backward
            return self._run(roots, *args, **kwargs)
        ask = called if hooks.fence is None else hooks.fence.run
        try:
            ask(self._stand_aside, args)
            return self._run(roots, *args, **kwargs)
        finally:
            ask(hooks.come_back)

    def _stand_aside(self, args: tuple[Any, ...]) -> None:
        ordinary = len(args) > CREATE_GRAPH and args[CREATE_GRAPH] is False
        if ordinary and self._saves_no_more():
            self._hooks.stand_aside()
