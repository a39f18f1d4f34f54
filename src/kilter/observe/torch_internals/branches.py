"""The private names of PyTorch that `kilter.parallel` uses, as that room uses them.

Each is in the table of the package as well. This file imports torch; a name that may be absent has
its fallback here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules import module as _modules

__all__ = ["dict_version", "pytree"]

# --- what changes without a call: dictionaries, tensors, hooks ------------------------------------

try:
    from torch._C._dynamo.guards import dict_version
except ImportError:  # the number that the compiler's guards read; without it items are compared
    dict_version = None  # type: ignore[assignment]

write_count: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written to in place, as autograd counts it."""

MODULE_DICTIONARIES = ("_parameters", "_buffers", "_modules")
CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OTHER_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name and name not in CALL_HOOKS)
"""These are hooks of saving and loading, and marks that belong to `CALL_HOOKS`."""

GLOBAL_HOOKS: tuple[dict[int, Callable[..., Any]], ...] = (
    _modules._global_forward_pre_hooks,
    _modules._global_forward_hooks,
    _modules._global_backward_pre_hooks,
    _modules._global_backward_hooks,
)
"""These hooks run for every module of the process."""


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_gradient_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks)


# --- tracing --------------------------------------------------------------------------------------

TorchOperation = torch._ops.OpOverload
is_functional: Callable[[Any], bool] = torch._is_functional_tensor
SET_GRAD_ENABLED = torch._C._set_grad_enabled


def in_tensor_mode() -> bool:
    """Whether a function or dispatch mode sees every operation now."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def fake_tracer(function: Callable[..., Any]) -> Callable[..., torch.fx.GraphModule]:
    """Traces `function` on fake tensors; real tensors that it holds become attributes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    tracer: Callable[..., torch.fx.GraphModule] = make_fx(
        function, tracing_mode="fake", _allow_non_fake_inputs=True
    )
    return tracer


def propagate(graph: torch.fx.GraphModule, fakes: Sequence[Tensor]) -> None:
    """Write the fake result of every node into its `meta`."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(graph, fakes[0].fake_mode).propagate_dont_convert_inputs(*fakes)


def arguments_of(operation: Any) -> list[Any]:
    """The formal arguments of an operation: each has `name`, `type` and `default_value`."""
    return list(operation._schema.arguments)


def result_count(operation: Any) -> int:
    return len(operation._schema.returns)


def is_mutable(operation: Any) -> bool:
    return bool(operation._schema.is_mutable)


def names_of(operation: Any) -> tuple[str, str]:
    """The name of an operation and of its overload."""
    return operation._schema.name, operation._schema.overload_name


def overloads_of(name: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, name)
    return (getattr(packet, overload) for overload in packet.overloads())


def import_compiler() -> None:
    """Start the workers of `torch.compile` now, so that they start while a trace runs."""
    importlib.import_module("torch._inductor.compile_fx")


# --- operations -----------------------------------------------------------------------------------

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
SOFTMAX = torch.ops.aten._softmax.default
TO_COPY = torch.ops.aten._to_copy.default
ADDMM_RELU = torch.ops.aten._addmm_activation.default
ATTENTION_BY_DEFINITION = torch.ops.aten._scaled_dot_product_attention_math
BATCH_NORM_INFERENCE = torch.ops.aten._native_batch_norm_legit_no_training.default

# --- CUDA -----------------------------------------------------------------------------------------


def raw_stream(device: int) -> int:
    """The current stream as a number: cheaper than a stream object in every call."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def end_allocation_to_pool(device: int, pool: Any) -> None:
    """Undo what a capture that failed leaves in the allocator."""
    torch._C._cuda_endAllocateToPool(device, pool)


def copy_together(to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy tensors onto others of the same shapes by one launch where their dtypes agree."""
    torch._foreach_copy_(to, given)
