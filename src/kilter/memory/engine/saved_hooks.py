"""Our hooks on saved tensors beside those of the program, and under `torch.func`, which allows
none.

`torch.func.grad` and its kin call `torch.autograd.graph.disable_saved_tensors_hooks`. The one
replacement of that function enters what the parts of the engine have to do around the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from kilter.observe import torch_internals

OUR_MODULES = "kilter.", "kilter_recorder"
"""The first words of their names; the second is the compiled library."""

Around = Callable[[], AbstractContextManager[None]]

_around: list[Around] = []
_replaced: list[tuple[Any, Any]] = []
"""It holds our function and the one that it replaces, while ours may be called: ours stays in place
where somebody has replaced it in turn."""


def is_ours(hook: Any) -> bool:
    """Whether a hook on saved tensors is one of kilter's."""
    module = getattr(hook, "__module__", None)
    if module is None:  # a method of a class in C
        module = type(getattr(hook, "__self__", None)).__module__
    return str(module).startswith(OUR_MODULES)


def innermost_are_ours() -> bool:
    """Whether the hooks that this thread calls first are kilter's."""
    top = torch_internals.top_saved_hooks(True)
    return top is not None and is_ours(top[0])


def only_ours() -> bool:
    """Whether this thread calls no hooks of the program first: what enters now does not leave
    before they do."""
    return torch_internals.top_saved_hooks(True) is None or innermost_are_ours()


@contextmanager
def stepped_aside() -> Iterator[None]:
    """Without our hooks, unless the program has put its own above them."""
    taken = []
    while innermost_are_ours():
        taken.append(torch_internals.top_saved_hooks(True))
        torch_internals.pop_saved_hooks()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            torch_internals.push_saved_hooks(*hooks)


def around_disabling(around: Around) -> Callable[[], None]:
    """From here on enter `around()` wherever hooks on saved tensors are disabled; what came last is
    entered first. Returns the function that ends this."""
    import torch

    _around.append(around)
    if not _replaced:
        _replace(torch.autograd.graph)

    def end() -> None:
        _around.remove(around)
        graph: Any = torch.autograd.graph
        if not _around and _replaced and graph.disable_saved_tensors_hooks is _replaced[0][0]:
            graph.disable_saved_tensors_hooks = _replaced.pop()[1]

    return end


def _replace(graph: Any) -> None:
    disable = graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled(error_message: str) -> Iterator[None]:
        with ExitStack() as stack:
            for around in reversed(_around):
                stack.enter_context(around())
            stack.enter_context(disable(error_message))
            yield

    graph.disable_saved_tensors_hooks = disabled
    _replaced.append((disabled, disable))
