"""The user's branches, a list or one module, and the serial loop over them.

The loop defines the result of a call in every way. This file also holds the signature by which
calls are told apart, and the reasons for which a call has to run as written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kilter.core.errors import UsageError
from kilter.core.reasons import Reason
from kilter.observe.torch_internals.branches import GLOBAL_HOOKS, in_tensor_mode, pytree
from kilter.parallel.checks import tf32_allowed

Branches = Callable[..., Any] | Sequence[Callable[..., Any]]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""They are the arguments of a call, by position and by name."""


@dataclass(frozen=True)
class SerialLoop:
    """The branches as they were written, one after the other."""

    branches: tuple[Callable[..., Any], ...]
    is_list: bool

    @classmethod
    def of(cls, given: Branches) -> SerialLoop:
        plain = isinstance(given, nn.ModuleList) and type(given).forward is nn.ModuleList.forward
        is_list = plain or isinstance(given, (list, tuple))
        branches: tuple[Any, ...] = tuple(given) if is_list else (given,)  # type: ignore[arg-type]
        if not branches or not all(callable(b) for b in branches):
            raise UsageError("branches must be one module, or a list of modules or callables")
        return cls(branches, is_list)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not self.is_list:
            return self.branches[0](*inputs, **named)
        spread = self.spread(inputs)
        return tuple(b(*given, **named) for b, given in zip(self.branches, spread, strict=True))

    def spread(self, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """The arguments of each branch of a list; those given by name are for all of them."""
        count = len(self.branches)
        if len(inputs) == 1 and count != 1:
            inputs = inputs * count
        if len(inputs) != count:
            raise UsageError(
                f"{count} branches take {count} inputs, or one for all; got {len(inputs)}"
            )
        return [x if isinstance(x, tuple) else (x,) for x in inputs]


TENSORS = (Tensor, nn.Parameter)
"""Tensors of these types may be in an input: a subclass may redefine its operations."""
_VALUES = (Tensor, int, float, str, bool, type(None), torch.dtype)


def why_serial(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> Reason | None:
    """Why this call has to run as written, whatever was prepared."""
    for leaf in leaves:
        if type(leaf) not in TENSORS:
            kind = type(leaf).__name__
            if isinstance(leaf, Tensor):
                return Reason("tensor_subclass", kind, "an input is a tensor subclass")
            if not isinstance(leaf, _VALUES):
                return Reason("unknown_input", kind, f"an input is a {kind}")
    if any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing():
        return Reason("user_capture", "", "called inside a capture of the user's")
    if in_tensor_mode():
        return Reason("tensor_mode", "", "called under a tensor mode")
    if any(GLOBAL_HOOKS) and any(map(_has_foreign, GLOBAL_HOOKS)):
        text = "there are hooks for all modules, and a replay calls no modules"
        return Reason("global_hooks", "", text)
    return None


def _has_foreign(hooks: dict[int, Callable[..., Any]]) -> bool:
    """Whether a hook is not kilter's. kilter's own observers count what runs, and a replay runs."""
    ours = "kilter."
    return any(not (getattr(h, "__module__", None) or "").startswith(ours) for h in hooks.values())


def signature(leaves: Sequence[Any], spec: Hashable, gradients: Hashable) -> Hashable:
    """Everything that a prepared form depends on besides the branches. `gradients`: which inputs
    require a gradient; None if autograd does not record the call."""
    return (
        tuple(
            (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x)
            for x in leaves
        ),
        spec,
        gradients,
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("cpu"),
        tf32_allowed(),
        torch.backends.cudnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )


def assembler(spec: pytree.TreeSpec, const: dict[int, Any]) -> Callable[[Sequence[Any]], Any]:
    """Builds the loop's result from its tensors. `const`: the leaves that are no tensors."""
    tensors = [i for i in range(spec.num_leaves) if i not in const]
    number = {leaf: at for at, leaf in enumerate(tensors)}
    template = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if template == 0 and not const:
        return lambda results: results[0]
    if not const and type(template) is tuple and template == tuple(range(spec.num_leaves)):
        return tuple

    def built(part: Any, results: Sequence[Any]) -> Any:
        if type(part) is int:
            return const[part] if part in const else results[number[part]]
        return type(part)([built(inside, results) for inside in part])

    if _plain(template):
        return lambda results: built(template, results)

    def unflattened(results: Sequence[Any]) -> Any:
        leaves = [built(i, results) for i in range(spec.num_leaves)]
        return pytree.tree_unflatten(leaves, spec)

    return unflattened


def _plain(template: Any) -> bool:
    if type(template) in (tuple, list):
        return all(map(_plain, template))
    return type(template) is int
