"""The checkpointing that a model brings with it, switched on from outside.

transformers, diffusers and timm build checkpointing into their models behind a flag on the modules
whose blocks can be run again. Its authors know which ones can; kilter, which sees operations, would
have to guess what else a call of a module does. So only models of these libraries are switched, and
only where the program has left the flag alone.

Checkpointing runs a block a second time in backward. Random numbers are drawn alike, so the bits of
all numbers stay. What else a block does, it does twice: models are left alone whose buffers change
in an iteration (the statistics of a batch norm), or that hold modules of the program's own, hooks,
or another `forward` than their library has written. transformers does without its cache then, so
that attention reads keys and values in another layout, and may round otherwise: modules that keep
one in training are left alone, too (of a model that translates or transcribes, its decoder).
"""

from __future__ import annotations

import math
import sys
import weakref
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from kilter.observe import torch_internals
from kilter.observe.torch_internals import fsdp

if TYPE_CHECKING:
    from torch.nn import Module

    from kilter.session.fence import Fence

FLAGS = {
    "transformers": "gradient_checkpointing",
    "diffusers": "gradient_checkpointing",
    "timm": "grad_checkpointing",
}
"""It names, by library, the attribute of its modules that has their blocks checkpointed."""
VOUCHED = {*FLAGS, "torch", "peft"}
"""Modules of these may run again: their authors say so."""
CHECKPOINT = "_gradient_checkpointing_func"
"""Where transformers and diffusers look for the function that checkpoints a block."""
CLAIMS = ("supports_gradient_checkpointing", "_supports_gradient_checkpointing")
"""What their models say of themselves."""
CACHES = (
    "use_cache",
    "cache",
    "cache_params",
    "layer_past",
    "past_key_value",
    "past_key_values",
)
"""These arguments of their modules keep a cache."""
KEEPS_CACHE = (
    "its own checkpointing is not tried, since the model keeps a cache in training: if nothing "
    "reads that, config.use_cache = False allows it"
)
FSDP = "torch.distributed.fsdp"
_ABSENT: Any = object()


class OwnCheckpointing:
    """The models of a job that can checkpoint their blocks. Used in the thread whose tensors are
    governed, between iterations."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._hooks: list[Any] = []
        """They see which modules are called; empty: nobody looks."""
        self._called: dict[int, tuple[weakref.ref[Module], list[int]]] = {}
        """It holds the modules called in the iteration looked at, each with the versions that its
        buffers had before. It goes by identity: a program's modules may compare as they like."""
        self._models: list[weakref.ref[Module]] = []
        """They are modules of the libraries among them."""
        self._cached: set[int] = set()
        """These modules, by identity, were given a cache."""
        self.why_not = ""
        """What the program can do about it that no model was found; empty: nothing."""
        self._before: list[tuple[weakref.ref[Module], str, Any, Any]] = []
        """Each attribute that is set stands here with its value and what stood in its place."""
        self._again: list[Any] = []
        """By these hooks sharded modules run again as they ran before."""

    def look(self) -> bool:
        """See which modules are called in the iteration that begins. `False` if that has been
        done, or cannot be."""
        from torch.nn.modules import module

        if self._hooks or torch_internals.anything_compiled():
            return False
        self._hooks = [
            module.register_module_forward_pre_hook(self._fence(self._calls)),
            module.register_module_forward_hook(self._fence(self._returns), with_kwargs=True),
        ]
        return True

    def _calls(self, module: Module, _arguments: Any) -> None:
        if id(module) not in self._called:
            self._called[id(module)] = weakref.ref(module), _versions_of(module)
            if any(_library_of(kind) in FLAGS for kind in type(module).__mro__):
                self._models.append(weakref.ref(module))

    def _returns(
        self, module: Module, _arguments: Any, named: dict[str, Any], _output: Any
    ) -> None:
        given = {n for n in CACHES if (value := named.get(n)) is not None and value is not False}
        if given and given & _named_by(module):  # else it is only handed on, or ignored
            self._cached.add(id(module))

    def found(self) -> str:
        """The iteration that was looked at is over. Gives the names of the models whose blocks can
        be checkpointed; empty if there are none."""
        self._look_away()
        called = [(reference(), was) for reference, was in self._called.values()]
        written = any(each is not None and _versions_of(each) != was for each, was in called)
        models = self._alive()
        inner = {id(p): p for model in models for p in model.modules() if p is not model}
        if written or not all(map(_may_run_again, inner.values())) or not self._flags():
            self._models.clear()
        elif not self._flags_to_set():
            self._models.clear()
            self.why_not = KEEPS_CACHE
        outer = [_class_of(model).__name__ for model in self._alive() if id(model) not in inner]
        return ", ".join(dict.fromkeys(outer))

    def switch_on(self, share: float = 1.0) -> None:
        """From the next iteration on blocks are checkpointed: this share of the modules with flags,
        the first ones that are called, whose tensors would be kept for longest."""
        parts = {id(part): part for model in self._alive() for part in model.modules()}
        for part in parts.values():
            self._again.extend(fsdp.run_again_alike(part))
        flags = self._flags_to_set()
        flagged = {id(module) for module, _ in flags}
        blocks = [
            id(module)
            for module, _ in flags
            if not any(id(part) in flagged for part in module.modules() if part is not module)
        ]
        spared = blocks[math.ceil(share * len(blocks)) :]
        for module, flag in flags:
            if id(module) in spared:
                continue
            if flag == FLAGS["transformers"]:
                self._set(module, CHECKPOINT, _Checkpoint())
            self._set(module, flag, True)

    def switch_off(self) -> None:
        """All is as it was found, but for what the program has set since. Twice is once."""
        self._look_away()
        while self._again:
            self._again.pop().remove()
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
        while self._hooks:
            self._hooks.pop().remove()

    def _alive(self) -> list[Module]:
        """The modules of the libraries."""
        found = [reference() for reference in self._models]
        return [module for module in found if module is not None]

    def _flags_to_set(self) -> list[tuple[Module, str]]:
        """Those of modules in which no cache is kept."""
        return [
            (module, flag)
            for module, flag in self._flags()
            if not any(id(part) in self._cached for part in module.modules())
        ]

    def _flags(self) -> list[tuple[Module, str]]:
        """The modules with flags. None where the program has set a flag itself, or a model says
        that it cannot be checkpointed."""
        modules = self._alive()
        flags = [
            (each, flag) for each in modules for flag in {*FLAGS.values()} if hasattr(each, flag)
        ]
        if _reentrant() and any(flag == FLAGS["timm"] for _, flag in flags):
            return []
        found = [(module, flag) for module, flag in flags if getattr(module, flag) is False]
        refused = any(getattr(each, claim, None) is False for each in modules for claim in CLAIMS)
        return [] if refused or len(found) < len(flags) else found

    def _set(self, module: Module, name: str, value: Any) -> None:
        before = vars(module).get(name, _ABSENT)
        self._before.append((weakref.ref(module), name, value, before))
        setattr(module, name, value)


class _Checkpoint:
    """`torch.utils.checkpoint.checkpoint`, but within transformations of functions (`torch.func`),
    where it is an error. In a pickle and a copy it is torch's: a model that is saved meanwhile
    loads without kilter."""

    def __call__(self, function: Any, *arguments: Any, **named: Any) -> Any:
        if torch_internals.functorch_level() is not None:
            return function(*arguments, **named)
        return self._of_torch()(function, *arguments, **named)

    def __reduce__(self) -> Any:
        return self._of_torch().__reduce__()

    @staticmethod
    def _of_torch() -> partial[Any]:
        from torch.utils.checkpoint import checkpoint

        return partial(checkpoint, use_reentrant=False)


def _versions_of(module: Module) -> list[int]:
    return [buffer._version for buffer in module.buffers(recurse=False)]


def _named_by(module: Module) -> set[str]:
    """The arguments that its `forward` has by name: all that keep a cache, where that is hidden."""
    try:
        return {*signature(module.forward).parameters}
    except (TypeError, ValueError):
        return {*CACHES}


def _library_of(kind: Any) -> str:
    """Of a class, or of a function, which the program may have put in the place of a library's."""
    return str(getattr(kind, "__module__", "")).partition(".")[0]


def _reentrant() -> bool:
    """timm checkpoints in the older way of PyTorch, which DDP does not always bear."""
    asked = getattr(sys.modules.get("timm.layers"), "use_reentrant_ckpt", None)
    return asked is None or bool(asked())


def _class_of(module: Module) -> type:
    """What is sharded has a class that FSDP has made from its own."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith(FSDP))


def _may_run_again(part: Module) -> bool:
    """A part of a model does nothing but what its library has written, and FSDP where it shards
    the part: its hooks see that the part runs again, and those of `fsdp` do what they leave out."""
    hooks = *part._forward_pre_hooks.values(), *part._forward_hooks.values()
    return (
        all(fsdp.state_of(hook) is not None for hook in hooks)
        and not (part._backward_pre_hooks or part._backward_hooks)
        and "forward" not in vars(part)
        and _library_of(_class_of(part)) in VOUCHED
        and _library_of(getattr(type(part), "forward", None)) in VOUCHED
    )
