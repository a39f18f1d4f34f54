"""The checkpointing that a model brings with it, switched on from outside.

transformers, diffusers and timm build checkpointing into their models behind a flag on the modules
whose blocks can be run again. Its authors know which ones can; kilter, which sees operations, would
have to guess what else a call of a module does. So only models of these libraries are switched, and
only where the program has left the flag alone.

Checkpointing runs a block a second time in backward. Random numbers are drawn alike, so the bits of
all numbers stay. What else a block does, it does twice: models are left alone whose buffers change
in an iteration (the statistics of a batch norm), or that hold modules of the program's own, hooks,
or another `forward` than their class has.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from kilter.observe import torch_internals

if TYPE_CHECKING:
    from torch.nn import Module

FLAGS = {
    "transformers": "gradient_checkpointing",
    "diffusers": "gradient_checkpointing",
    "timm": "grad_checkpointing",
}
"""By library, the attribute of its modules that has their blocks checkpointed."""
VOUCHED = {*FLAGS, "torch", "peft"}
"""Modules of these may run again: their authors say so."""
CHECKPOINT = "_gradient_checkpointing_func"
"""Where transformers and diffusers look for the function that checkpoints a block."""
SUPPORTED = ("supports_gradient_checkpointing", "_supports_gradient_checkpointing")
"""What their models say of themselves."""
_ABSENT: Any = object()


class OwnCheckpointing:
    """The models of a job that can checkpoint their blocks. Used in the thread whose tensors are
    governed, between iterations."""

    def __init__(self) -> None:
        self._hook: Any = None
        """It sees which modules are called; None: nobody looks."""
        self._called: weakref.WeakKeyDictionary[Module, None] = weakref.WeakKeyDictionary()
        """Modules of the libraries, as far as they were called in the iteration looked at."""
        self._versions: weakref.WeakKeyDictionary[Module, list[int]] = weakref.WeakKeyDictionary()
        """Of the buffers of each module that was called, before that."""
        self._before: list[tuple[weakref.ref[Module], str, Any, Any]] = []
        """Of each attribute that is set: the value, and what stood in its place."""

    def look(self) -> bool:
        """See which modules are called in the iteration that begins. `False` if that has been
        done, or cannot be."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        if self._hook is not None or torch_internals.anything_compiled():
            return False
        self._hook = register_module_forward_pre_hook(self._calls)
        return True

    def _calls(self, module: Module, _arguments: Any) -> None:
        if module not in self._versions:
            self._versions[module] = _versions_of(module)
            if any(_library_of(kind) in FLAGS for kind in type(module).__mro__):
                self._called[module] = None

    def found(self) -> str:
        """The iteration that was looked at is over. Gives the names of the models whose blocks can
        be checkpointed; empty if there are none."""
        self._look_away()
        inner = {part for model in self._called for part in model.modules() if part is not model}
        models = [model for model in self._called if model not in inner]
        written = any(_versions_of(module) != was for module, was in self._versions.items())
        if written or not all(_may_run_again(part) for part in inner) or not self._flags():
            self._called.clear()
            return ""
        return ", ".join(dict.fromkeys(type(model).__name__ for model in models))

    def switch_on(self) -> None:
        """From the next iteration on blocks are checkpointed."""
        from torch.utils.checkpoint import checkpoint

        for module, flag in self._flags():
            if flag == FLAGS["transformers"]:
                # (A function of torch's: a model that is saved meanwhile loads without kilter.)
                self._set(module, CHECKPOINT, partial(checkpoint, use_reentrant=False))
            self._set(module, flag, True)

    def switch_off(self) -> None:
        """All is as it was found, but for what the program has set since. Twice is once."""
        self._look_away()
        while self._before:
            reference, name, value, before = self._before.pop()
            module = reference()
            if module is None or vars(module).get(name, _ABSENT) is not value:
                continue
            if before is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, before)

    def _look_away(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _flags(self) -> list[tuple[Module, str]]:
        """The modules whose flags are to be set. None where the program has set a flag itself, or a
        model says that it cannot be checkpointed."""
        modules = list(self._called)
        flags = [
            (each, flag) for each in modules for flag in {*FLAGS.values()} if hasattr(each, flag)
        ]
        found = [(module, flag) for module, flag in flags if getattr(module, flag) is False]
        untouched = len(found) == len(flags) and not any(_says(each, False) for each in modules)
        return found if untouched else []

    def _set(self, module: Module, name: str, value: Any) -> None:
        before = vars(module).get(name, _ABSENT)
        self._before.append((weakref.ref(module), name, value, before))
        setattr(module, name, value)


def _versions_of(module: Module) -> list[int]:
    return [buffer._version for buffer in module.buffers(recurse=False)]


def _library_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _may_run_again(part: Module) -> bool:
    """A part of a model does nothing but what its library has written."""
    hooks = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks
    return not hooks and "forward" not in vars(part) and _library_of(type(part)) in VOUCHED


def _says(module: Module, supported: bool) -> bool:
    """It says of itself that it supports checkpointing, or that it does not."""
    return any(getattr(module, name, None) is supported for name in SUPPORTED)
