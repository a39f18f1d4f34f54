"""FSDP2 (`fully_shard`), whose private names differ from version to version.

A module that runs again in backward, because a checkpoint covers it, has to do what it did in
forward. In PyTorch 2.8 to 2.11 FSDP's hooks then return inputs and outputs as they are, uncast, and
in 2.8 they do not gather parameters that were freed meanwhile; 2.13 does both. The hooks here
follow FSDP's own. What those have done, they leave as it is. They are put into older versions only,
so that the name that they alone need is not in the table of the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.nn import Module


def state_of(hook: Any) -> Any:
    """The state of FSDP that a hook of a module belongs to; None: it is not FSDP's."""
    state = getattr(hook, "__self__", None)
    return state if hasattr(state, "_mp_policy") else None


def groups_of(state: Any) -> list[Any]:
    """Its groups of parameters; a module without parameters has none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def run_again_alike(module: Module) -> Iterator[Any]:
    """Hook into a sharded module whose FSDP does too little when it runs again. Gives handles."""
    for state in [*filter(None, map(state_of, module._forward_pre_hooks.values()))]:
        if not hasattr(state, "_cast_forward_inputs"):
            hooks = _Again(state)
            yield module.register_forward_pre_hook(hooks.before, with_kwargs=True)
            yield module.register_forward_hook(hooks.after)


class _Again:
    def __init__(self, state: Any) -> None:
        from torch.distributed.utils import _apply_to_tensors

        self._state, self._apply = state, _apply_to_tensors

    def before(self, _module: Module, args: Any, kwargs: Any) -> Any:
        for group in groups_of(self._state):
            if not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()
        policy = self._state._mp_policy
        dtype = policy.param_dtype if policy.cast_forward_inputs else None
        return self._cast(args, dtype), self._cast(kwargs, dtype)

    def after(self, _module: Module, _args: Any, output: Any) -> Any:
        return self._cast(output, self._state._mp_policy.output_dtype)

    def _cast(self, held: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None:
            return held
        return self._apply(lambda each: each.to(dtype) if each.is_floating_point() else each, held)
