"""Every private name of PyTorch that kilter uses, and what kilter does without it.

A new PyTorch is checked against this package: `missing()` names what is gone, and `kilter doctor`
shows that. Modules of kilter write `torch_internals.current_node()`; a name is looked up when it is
used for the first time, so nothing here imports torch before the program does. Attributes that
every saved tensor is asked for (`ATTRIBUTES`) stand where they are read: a call for each would cost
more than the read. `branches.py` has the names of `kilter.parallel`, as it uses them, and `fsdp.py`
what differs between versions of FSDP2.

The rooms `memory`, `parallel`, `clocks`, `sharing` and `session` stand above `observe`, so all of
them may import this.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

STEPS_ASIDE = "kilter steps aside, and the program runs on as it is"
NO_MEMORY = "a memory budget is given up, and the program runs on as it is"
NO_WEIGHTS = "weights are not offloaded"
NO_SEGMENTS = "calls of modules are not recomputed as a whole"
NO_RECIPE = "what the operation makes is kept or offloaded, and not recomputed"
NO_FRACTION = "compiled regions save what the compiler has them save"
NO_SIZE = "`kilter size` cannot be used"
NO_BRANCHES = "branches run serially"


SUPPORTED = "2.8 to 2.15"
"""These versions of PyTorch are supported."""


class Internal(NamedTuple):
    """One private name."""

    path: str
    without: str
    """What kilter does in a PyTorch that has no such name."""
    versions: str = SUPPORTED
    """It is there in these versions, of those that kilter supports. 2.8.0, 2.11.0 and 2.15.0
    (builds with CUDA) and 2.13.0 (without) have all names."""
    replaced: bool = False
    """kilter puts a function of its own in its place for a time, so it is looked up each time."""
    only_cuda: bool = False
    """A PyTorch that was built without CUDA need not have it."""


COMPILER = "torch._dynamo"
"""The import of this module says that the program may compile."""
COMPILATIONS = "torch._dynamo.callback"
COMPILED_MODULES = "torch._dynamo.eval_frame"
SLOW_TO_IMPORT = ("torch._dynamo", "torch._inductor", "torch._functorch.partitioners")
"""Programs that compile import these; `missing()` only looks whether their files are there."""

TABLE = {
    # What is executed now
    "current_node": Internal("torch._C._current_autograd_node", NO_MEMORY),
    "current_graph_task": Internal("torch._C._current_graph_task_id", STEPS_ASIDE),
    "graph_task_keeps_graph": Internal(
        "torch._C._autograd._get_current_graph_task_keep_graph", NO_MEMORY
    ),
    "run_backward": Internal(
        "torch.autograd._engine_run_backward",
        "hooks on saved tensors stay in place during backward",
        replaced=True,
    ),
    "set_grad_enabled": Internal("torch._C._set_grad_enabled", NO_MEMORY),
    "is_forward_mode_enabled": Internal("torch._C._is_fwd_grad_enabled", NO_MEMORY),
    "set_forward_mode_enabled": Internal("torch._C._set_fwd_grad_enabled", NO_MEMORY),
    # Hooks on saved tensors
    "top_saved_hooks": Internal("torch._C._autograd._top_saved_tensors_default_hooks", NO_MEMORY),
    "pop_saved_hooks": Internal("torch._C._autograd._pop_saved_tensors_default_hooks", NO_MEMORY),
    "push_saved_hooks": Internal(
        "torch._C._autograd._push_saved_tensors_default_hooks", NO_MEMORY, replaced=True
    ),
    # Tensors and storages
    "set_version_counter": Internal("torch._C._autograd._unsafe_set_version_counter", NO_MEMORY),
    "storage_use_count": Internal("torch._C._storage_Use_Count", NO_MEMORY),
    "free_weak_storage": Internal("torch.UntypedStorage._free_weak_ref", NO_MEMORY),
    "set_data": Internal("torch._C.TensorBase.data.__set__", NO_MEMORY),
    "storage_expired": Internal("torch.UntypedStorage._expired", NO_MEMORY),
    "foreach_add": Internal("torch._foreach_add_", NO_MEMORY),
    "fused_adam": Internal("torch._fused_adam_", NO_MEMORY),
    "fused_adamw": Internal("torch._fused_adamw_", NO_MEMORY),
    "global_optimizer_pre_hooks": Internal(
        "torch.optim.optimizer._global_optimizer_pre_hooks", NO_WEIGHTS
    ),
    # Operations that recipes carry out
    "attention_flash": Internal("torch.ops.aten._scaled_dot_product_flash_attention", NO_RECIPE),
    "attention_flash_cpu": Internal(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", NO_RECIPE
    ),
    "attention_efficient": Internal(
        "torch.ops.aten._scaled_dot_product_efficient_attention", NO_RECIPE
    ),
    "attention_cudnn": Internal("torch.ops.aten._scaled_dot_product_cudnn_attention", NO_RECIPE),
    "adaptive_avg_pool2d": Internal("torch.ops.aten._adaptive_avg_pool2d", NO_RECIPE),
    "safe_softmax": Internal("torch.ops.aten._safe_softmax", NO_RECIPE),
    # Modes
    "dispatch_mode_depth": Internal("torch._C._len_torch_dispatch_stack", NO_MEMORY),
    "function_mode_depth": Internal("torch._C._len_torch_function_stack", NO_MEMORY),
    "DispatchModeKey": Internal("torch._C._TorchDispatchModeKey", NO_MEMORY),
    "dispatch_mode_of": Internal("torch._C._get_dispatch_mode", NO_MEMORY),
    "DisableDispatch": Internal("torch._C._DisableTorchDispatch", NO_MEMORY),
    "DisableFunction": Internal("torch._C.DisableTorchFunction", NO_MEMORY),
    "DisableFunctionSubclass": Internal("torch._C.DisableTorchFunctionSubclass", NO_WEIGHTS),
    "DisableFunctorch": Internal("torch._C._DisableFuncTorch", NO_WEIGHTS),
    "functorch_level": Internal("torch._C._functorch.maybe_current_level", NO_MEMORY),
    "disable_current_modes": Internal(
        "torch.utils._python_dispatch._disable_current_modes", NO_WEIGHTS
    ),
    "TorchDispatchMode": Internal("torch.utils._python_dispatch.TorchDispatchMode", NO_SIZE),
    "fake_tensor": Internal("torch._subclasses.fake_tensor", NO_SIZE),
    "dispatch_key_named": Internal("torch._C._dispatch_key_parse", NO_SEGMENTS),
    "include_dispatch_key": Internal(
        "torch._C._dispatch_tls_set_dispatch_key_included", NO_SEGMENTS
    ),
    # Modules and trees
    "pytree": Internal("torch.utils._pytree", f"{NO_SIZE}, and {NO_BRANCHES}"),
    "BatchNorm": Internal("torch.nn.modules.batchnorm._BatchNorm", "batches are not divided"),
    "Dropout": Internal("torch.nn.modules.dropout._DropoutNd", "batches are not divided"),
    "module_hooks_before": Internal(
        "torch.nn.modules.module._global_forward_pre_hooks", NO_BRANCHES
    ),
    "module_hooks_after": Internal("torch.nn.modules.module._global_forward_hooks", NO_BRANCHES),
    "module_hooks_before_backward": Internal(
        "torch.nn.modules.module._global_backward_pre_hooks", NO_BRANCHES
    ),
    "module_hooks_after_backward": Internal(
        "torch.nn.modules.module._global_backward_hooks", NO_BRANCHES
    ),
    "call_of_module": Internal("torch.nn.Module._call_impl", "tensors have no module in reports"),
    # The compiler
    "disable_dynamo": Internal(
        "torch._disable_dynamo", "the public torch.compiler.disable, which imports the compiler"
    ),
    "trace_rules": Internal("torch._dynamo.trace_rules", NO_MEMORY),
    "OptimizedModule": Internal("torch._dynamo.eval_frame.OptimizedModule", STEPS_ASIDE),
    "compile_counters": Internal("torch._dynamo.utils.counters", STEPS_ASIDE),
    "compilations": Internal("torch._dynamo.callback.callback_handler", STEPS_ASIDE),
    "dynamo_config": Internal("torch._dynamo.config", NO_FRACTION),
    "functorch_config": Internal("torch._functorch.config", NO_FRACTION),
    "choose_saved_values": Internal(
        "torch._functorch.partitioners.choose_saved_values_set", NO_FRACTION, replaced=True
    ),
    "compile_fx": Internal("torch._inductor.compile_fx", NO_BRANCHES),
    "dict_version": Internal(
        "torch._C._dynamo.guards.dict_version", "items of dictionaries are compared instead"
    ),
    # The profiler
    "enable_record_function": Internal("torch.autograd._enable_record_function", STEPS_ASIDE),
    "profiler_enabled": Internal("torch.autograd._profiler_enabled", STEPS_ASIDE),
    "RecordFunctionFast": Internal("torch._C._profiler._RecordFunctionFast", STEPS_ASIDE),
    # Tracing and operations of branches
    "torch_operations": Internal("torch._ops.OpOverload", NO_BRANCHES),
    "is_functional_tensor": Internal("torch._is_functional_tensor", NO_BRANCHES),
    "unsafe_view": Internal("torch.ops.aten._unsafe_view", NO_BRANCHES),
    "softmax": Internal("torch.ops.aten._softmax", NO_BRANCHES),
    "to_copy": Internal("torch.ops.aten._to_copy", NO_BRANCHES),
    "addmm_activation": Internal("torch.ops.aten._addmm_activation", NO_BRANCHES),
    "attention_math": Internal("torch.ops.aten._scaled_dot_product_attention_math", NO_BRANCHES),
    "batch_norm_inference": Internal(
        "torch.ops.aten._native_batch_norm_legit_no_training", NO_BRANCHES
    ),
    "foreach_copy": Internal(
        "torch._foreach_copy_",
        f"{NO_MEMORY}, {NO_BRANCHES}, and models with BatchNorm are not shared",
    ),
    # CUDA
    "cuda_device": Internal("torch._C._cuda_getDevice", NO_MEMORY, only_cuda=True),
    "cuda_raw_stream": Internal("torch._C._cuda_getCurrentRawStream", NO_MEMORY, only_cuda=True),
    "cuda_is_capturing": Internal(
        "torch._C._cuda_isCurrentStreamCapturing", NO_MEMORY, only_cuda=True
    ),
    "cuda_has_context": Internal("torch._C._cuda_hasPrimaryContext", STEPS_ASIDE, only_cuda=True),
    "cuda_end_pool": Internal("torch._C._cuda_endAllocateToPool", NO_BRANCHES, only_cuda=True),
    "cuda_sleep": Internal("torch.cuda._sleep", NO_MEMORY),
    # Processes
    "process_groups": Internal(
        "torch.distributed.distributed_c10d._world", "communication sections are not looked for"
    ),
    "nccl_weighted_sum": Internal(
        "torch.distributed._make_nccl_premul_sum", "gradients of shares are weighted beforehand"
    ),
    "queue_callback": Internal(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "jobs are not shared",
    ),
    "default_store": Internal(
        "torch.distributed.distributed_c10d._get_default_store", "ranks are governed one by one"
    ),
}

ATTRIBUTES = {
    "_version": "tensors: how often one was written to in place",
    "_base": "tensors: the tensor that a view is of",
    "_is_view": "tensors: whether one is a view",
    "_is_zerotensor": "tensors: whether one is all zeros and has no memory",
    "_use_count": "tensors: how many hold one (without it weights are not offloaded)",
    "_cdata": "storages: the address of what autograd and Python share",
    "_weak_ref": "storages: a reference that does not keep the memory",
    "_post_accumulate_grad_hooks": "parameters: hooks of the program on gradients",
    "_backward_hooks": "modules and tensors: hooks of the program on gradients",
    "_backward_pre_hooks": "modules: hooks of the program on gradients",
    "_forward_pre_hooks": "modules: hooks of the program before a call",
    "_forward_hooks": "modules: hooks of the program after a call",
    "_parameters": "modules: the parameters as they are stored",
    "_optimizer_step_pre_hooks": "optimizers: the order of hooks before a step",
    "_optimizer_step_post_hooks": "optimizers: the order of hooks after a step",
    "_input_metadata": "nodes of a graph: type and shape of a result",
    "_current_level": "torch.autograd.forward_ad: whether forward-mode derivatives are taken",
    "_overloadpacket": "operations: the operation of an overload",
    "_schema": "operations: names and types of arguments and results",
    "_prepare_trace": "torch.profiler.profile: the warm-up, apart from the start",
    "_start_trace": "torch.profiler.profile: the start",
    "_get_sequence_number_for_group": "process groups: how many collectives one has begun",
    "_get_fsdp_state": "modules sharded by fully_shard: what FSDP keeps for one",
    "_get_ddp_logging_data": "DDP: the name of the script's own communication hook",
    "_fsdp_param_groups": "states of FSDP: the parameters that are gathered together",
    "_fsdp_param_group": "states of FSDP: the same, where there is one at most",
    "_mp_policy": "states of FSDP: to which types inputs and outputs are cast",
    "_cast_forward_inputs": "states of FSDP: inputs are cast where a module runs again (2.13)",
    "_reduce_scatter_comm": "parameter groups of FSDP: how their gradients are summed up",
    "_is_profiler_enabled": "torch.autograd.profiler: whether somebody records",
}
"""These private attributes of PyTorch's objects are read where they are needed."""
SAVED_BY_NODES = ("_saved_", "_raw_saved_")
"""How attributes of a graph's nodes begin that hold arguments and results of the operation.
PyTorch documents the prefixes, not the names; a node without one has no recipe."""


def __getattr__(name: str) -> Any:
    """The private name behind a key of `TABLE`. `AttributeError` where this PyTorch has none."""
    entry = TABLE.get(name)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _at(entry.path)
    if not entry.replaced:
        globals()[name] = found
    return found


def uncompiled(function: Callable[..., Any]) -> Any:
    """The same function, which Dynamo leaves alone. Unlike the public `torch.compiler.disable`,
    the private name imports the compiler only when the function is called."""
    torch = importlib.import_module("torch")
    return (getattr(torch, "_disable_dynamo", None) or torch.compiler.disable)(function)


def holder_of(name: str) -> tuple[Any, str]:
    """The object that has a private name, and the name in it: to put another function there."""
    path, _, attribute = TABLE[name].path.rpartition(".")
    return _at(path), attribute


def anything_compiled() -> bool:
    """Has `torch.compile` compiled anything? The compiler is not imported for the answer."""
    imported = f"{COMPILER}.utils" in sys.modules
    return imported and __getattr__("compile_counters")["frames"]["total"] > 0


def missing() -> tuple[Internal, ...]:
    """What the installed PyTorch does not have; imports it. `ImportError` where that fails."""
    cuda = importlib.import_module("torch").version.cuda is not None
    return tuple(
        entry for entry in TABLE.values() if (cuda or not entry.only_cuda) and not _there(entry)
    )


def _at(path: str) -> Any:
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    place = first
    for part in rest:
        place = f"{place}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            if not hasattr(found, "__path__"):
                raise
            try:
                found = importlib.import_module(place)
            except ModuleNotFoundError as error:
                raise AttributeError(f"this PyTorch has no {path}") from error
    return found


def _there(entry: Internal) -> bool:
    if entry.path.startswith(SLOW_TO_IMPORT):
        (package,) = importlib.import_module("torch").__path__
        place = Path(package, *entry.path.split(".")[1:3])
        return place.is_dir() or place.with_suffix(".py").is_file()
    try:
        _at(entry.path)
    except AttributeError:
        return False
    return True
