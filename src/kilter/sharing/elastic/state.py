"""The state of training from a rank that has it to ranks that were idle: parameters, buffers,
optimizers, and whatever else has a `state_dict` (schedulers, gradient scalers)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class RankState:
    """What has to be the same on all active ranks."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        others: Sequence[Any],
    ) -> None:
        self.modules, self.optimizers, self.others = list(modules), list(optimizers), list(others)

    def broadcast(self, root: int, group: ProcessGroup) -> None:
        """From `root` to all others of the group. Every member has to call it."""
        import torch
        import torch.distributed as dist

        sends = dist.get_rank() == root
        with torch.no_grad():
            for module in self.modules:
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor.data, root, group=group)
        big: list[torch.Tensor] = []
        outline: list[Any] = [None]
        if sends:
            states = [optimizer.state_dict() for optimizer in self.optimizers]
            outline[0] = (_outline(states, big), [other.state_dict() for other in self.others])
        dist.broadcast_object_list(outline, root, group=group)
        states, others = outline[0]
        device = self._device()
        if not sends:
            big = [torch.empty(s.shape, dtype=s.dtype, device=device) for s in _stand_ins(states)]
        for tensor in big:
            dist.broadcast(tensor, root, group=group)
        if not sends:
            filled = _filled(states, iter(big))
            for optimizer, state in zip(self.optimizers, filled, strict=True):
                optimizer.load_state_dict(state)
            for other, state in zip(self.others, others, strict=True):
                other.load_state_dict(state)

    def release(self) -> None:
        """Give back what an idle rank does not need: gradients and the state of the optimizers."""
        import torch

        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _device(self) -> torch.device:
        return next(self.modules[0].parameters()).device


class _StandIn:
    """In the outline, for a tensor that follows by itself."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


_SMALL = 64
"""Elements up to which a tensor travels inside the outline (step counters live on the CPU)."""


def _outline(value: Any, big: list[torch.Tensor]) -> Any:
    """The same structure with stand-ins for large tensors, which are collected in order."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.numel() <= _SMALL:
            return value.detach().cpu()
        big.append(value.detach().contiguous())
        return _StandIn(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _outline(item, big) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_outline(item, big) for item in value)
    return value


def _stand_ins(value: Any) -> list[_StandIn]:
    if isinstance(value, _StandIn):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return (
        [s for i in items for s in _stand_ins(i)] if isinstance(value, dict | list | tuple) else []
    )


def _filled(value: Any, big: Any) -> Any:
    if isinstance(value, _StandIn):
        return next(big)
    if isinstance(value, dict):
        return {key: _filled(item, big) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(item, big) for item in value)
    return value


class Buffers:
    """Running statistics (BatchNorm): after each iteration the mean over the active ranks, weighted
    by their samples. The running mean is then that of the global batch, whatever the shards; the
    running variance is the mean variance within the shards."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._tensors = [
            buffer
            for module in modules
            for buffer in module.buffers()
            if buffer.is_floating_point()
        ]

    def average(self, weight: float, group: ProcessGroup | None) -> None:
        import torch
        import torch.distributed as dist

        if group is None or not self._tensors:
            return
        flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in self._tensors])
        flat.mul_(weight)
        dist.all_reduce(flat, group=group)
        position = 0
        for tensor in self._tensors:
            part = flat[position : position + tensor.numel()]
            tensor.data.copy_(part.reshape(tensor.shape))
            position += tensor.numel()
