"""Models sharded by `fully_shard` (FSDP2): gradients of uneven shards, weighted.

Each rank holds a part of the parameters and takes part in every gathering of them. So a rank
without samples would stop the others: the data ratio of every rank is 1 to 10.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kilter.observe.torch_internals.fsdp import groups_of
from kilter.sharing.elastic.groups import Reduction

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule


def is_sharded(model: Any) -> bool:
    """Whether `fully_shard` was applied to the model. FSDP is not imported for the answer."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def waiting_gradients(model: FSDPModule) -> Iterator[torch.Tensor | None]:
    """Those that `set_requires_gradient_sync(False)` has left unsummed, each once: in PyTorch 2.15
    what FSDP calls accumulated is the parameter's own gradient."""
    for module in _modules(model):
        for parameter in (each for group in _groups(module) for each in group.fsdp_params):
            accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
            own = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            yield own
            if accumulated is not own:
                yield accumulated


def sharding_flaw(
    model: FSDPModule, optimizers: Iterable[torch.optim.Optimizer], world: int
) -> tuple[str, str] | None:
    """Why the gradients of uneven shards cannot be weighted, as a code and a sentence."""
    from torch.distributed.tensor import DTensor

    if not hasattr(model, "set_custom_reduce_scatter"):
        return (
            "torch-version",
            "the model is sharded by fully_shard, whose gradients can be weighted from torch 2.9 "
            "on; use a newer torch, or DistributedDataParallel",
        )
    trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in trained}
    if any(mesh is None or mesh.ndim > 1 or mesh.size() != world for mesh in meshes) or any(
        len(_groups(module)) > 1 for module in _modules(model)
    ):
        return (
            "mesh",
            "not all parameters are sharded by fully_shard over all ranks of the job; give it a "
            "mesh of one dimension with all ranks, and no ignored_params",
        )
    return None


def weigh(
    model: FSDPModule,
    reduction: Reduction,
    before: Callable[[], object],
    after: Callable[[], object],
) -> None:
    """Reduce the gradients of the model, and of all modules in it that are sharded by themselves,
    by the weights of `reduction`; call `before` and `after` each reduction. Twice is once."""
    for module in _modules(model):
        for group in _groups(module):
            plain = group._reduce_scatter_comm
            if not isinstance(plain, WeightedReduceScatter):
                scatter = WeightedReduceScatter(plain, reduction, before, after)
                module.set_custom_reduce_scatter(scatter)


class WeightedReduceScatter:
    """FSDP2's reduction with each rank's gradient taken times its weight.

    FSDP2 takes the mean over the ranks (or another multiple of the sum, as the script has set it).
    With each gradient times `weight * ranks` before that, the mean is the weighted sum."""

    def __init__(
        self,
        plain: Any,
        reduction: Reduction,
        before: Callable[[], object],
        after: Callable[[], object],
    ) -> None:
        """`plain` is the model's own reduce-scatter, which does the rest."""
        self._plain, self._reduction = plain, reduction
        self._before, self._after = before, after

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        memory: torch.Tensor = self._plain.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> torch.distributed.Work | None:
        self._before()
        factor = self._reduction.weight * group.size()
        if factor != 1.0:
            input_tensor.mul_(factor)
        work: torch.distributed.Work | None = self._plain(
            output_tensor, input_tensor, group, op, async_op
        )
        self._after()
        return work


def _modules(model: FSDPModule) -> list[Any]:
    """The modules of the model to which `fully_shard` was applied, itself included."""
    return [module for module in model.modules() if is_sharded(module)]


def _groups(module: Any) -> list[Any]:
    """FSDP's parameter groups of one module."""
    return groups_of(module._get_fsdp_state())
