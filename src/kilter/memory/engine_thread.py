"""Ends of iterations where several threads of the program train.

What is decided at an end concerns passes of the engine's thread, and its hooks can only be put back
there. Iterations end where the slowest thread has stepped, which may be another one. Then each step
of an optimizer in the engine's thread is taken for an end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kilter.observe import optimizer_steps, torch_internals

if TYPE_CHECKING:
    from kilter.memory.engine.tensor_hooks import TensorHooks
    from kilter.session.fence import Fence


class EngineThread:
    """`ended` is called at each step that is taken for an end."""

    def __init__(self, hooks: TensorHooks, ended: Callable[[], None]) -> None:
        self._hooks = hooks
        self._ended = ended
        self._steps = False
        """An optimizer has stepped in this thread."""
        self._elsewhere = False
        """The last iteration ended in another thread."""
        self._leave_steps: Callable[[], None] = lambda: None

    def begin(self, fence: Fence) -> None:
        """In this thread."""
        self._leave_steps = optimizer_steps.listen(after=fence(self._stepped))

    def end(self) -> None:
        """In whichever thread."""
        self._leave_steps()

    def has_ended_an_iteration(self) -> bool:
        """An iteration has ended: whether that counts. On a GPU backward, with steps that are made
        in it, runs in a thread of the framework's, for this one."""
        here = self._hooks.in_thread or torch_internals.current_graph_task() != -1
        self._elsewhere = self._steps and not here
        return not self._elsewhere

    def _stepped(self, *step: Any) -> None:
        """An optimizer has stepped, in whichever thread."""
        if self._hooks.in_thread:
            self._steps = True
            if self._elsewhere:
                self._ended()
