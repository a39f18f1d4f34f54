"""Hooks that are called when a gradient was accumulated, also before the optimizers are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from kilter.memory.engine.aliases import Known


class GradientHooks:
    """Calls `arrived(parameter)` whenever a gradient of a parameter was accumulated."""

    def __init__(self, arrived: Callable[[Any], None]) -> None:
        self._arrived = arrived
        self._hooked: dict[int, Any] = {}
        """Each parameter, by its identity, has the handle of the hook on its gradient."""
        self._hooks: list[Any] = []
        self._search: Any = None
        self._early: dict[int, Known] = {}
        """The gradients of these parameters arrived before their optimizer was known, in this
        order."""
        self._ended = False

    def search(self, fenced: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Find parameters by the modules that run: before the first step no optimizer is known."""
        self._search = register_module_forward_pre_hook(fenced(self._before_module))

    def _before_module(self, module: Any, inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self.follow(parameter)

    def stop_search(self) -> None:
        """Stop finding parameters by modules."""
        if self._search is not None:
            self._search.remove()
            self._search = None

    def follow(self, parameter: Any) -> None:
        """Put one hook on this parameter, if it can have a gradient."""
        hooked = self._hooked.get(id(parameter))
        if self._ended or not (parameter.requires_grad and parameter.is_leaf):
            return
        if hooked is not None and hooked.id in (parameter._post_accumulate_grad_hooks or ()):
            return
        hooked = parameter.register_post_accumulate_grad_hook(self._arrived)
        self._hooked[id(parameter)] = hooked
        self._hooks.append(hooked)

    def note_early(self, parameter: Any) -> None:
        """A gradient has arrived, and its optimizer is not known yet."""
        self._early[id(parameter)] = Known(parameter)

    def by_arrival(self, parameters: Sequence[Any]) -> list[Any]:
        """The parameters of an optimizer: in the order in which their gradients arrived, then the
        others from the last to the first, which is the order of backward."""
        known = {id(p): p for p in parameters}
        early = [key for key, same in self._early.items() if key in known and same(known[key])]
        for key in early:
            del self._early[key]
        return [known[key] for key in early] + [
            p for key, p in reversed(known.items()) if key not in early
        ]

    def remove(self) -> None:
        """Follow no gradient any more."""
        self._ended = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
