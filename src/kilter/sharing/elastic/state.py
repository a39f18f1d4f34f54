"""The state of training from a rank that has it to ranks that were idle: parameters, buffers,
optimizers, and whatever else has a `state_dict` (schedulers, gradient scalers)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kilter.observe import torch_internals

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
        *,
        release: bool = False,
    ) -> None:
        self.modules, self.optimizers, self.others = list(modules), list(optimizers), list(others)
        self._releases = release
        self._occasion: object = None
        self._received: tuple[Any, list[torch.Tensor]] | None = None

    def broadcast(self, root: int, group: ProcessGroup, occasion: object) -> None:
        """From `root` to all others of the group. Every member has to call it.

        What may fail without the other ranks stands before or after the collectives: after an error
        there, the same call again (of the same occasion) goes on where it has failed."""
        if self._occasion != occasion:
            self._exchange(root, group, occasion)
        if self._received is not None:
            self._load(*self._received)
            self._received = None

    def _exchange(self, root: int, group: ProcessGroup, occasion: object) -> None:
        import torch
        import torch.distributed as dist

        sends = dist.get_rank() == root
        tensors = [t.data for m in self.modules for t in (*m.parameters(), *m.buffers())]
        device = tensors[0].device
        big: list[torch.Tensor] = []
        outline: list[Any] = [None]
        if sends:
            states = [optimizer.state_dict() for optimizer in self.optimizers]
            states, others = _outline(states, big), [other.state_dict() for other in self.others]
            outline[0] = (states, others, [(tensor.shape, tensor.dtype) for tensor in big])
        for tensor in tensors:
            dist.broadcast(tensor, root, group=group)
        dist.broadcast_object_list(outline, root, group=group)
        if not sends:
            big = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outline[0][2]]
        for tensor in big:
            dist.broadcast(tensor, root, group=group)
        self._received = None if sends else (outline[0][:2], big)
        self._occasion = occasion

    def _load(self, states: tuple[Any, Any], big: list[torch.Tensor]) -> None:
        filled = _filled(states[0], iter(big))
        for optimizer, state in zip(self.optimizers, filled, strict=True):
            optimizer.load_state_dict(state)
        for other, state in zip(self.others, states[1], strict=True):
            other.load_state_dict(state)

    def release(self) -> None:
        """Give back what an idle rank does not need, if that was asked for: gradients and the state
        of the optimizers."""
        import torch

        if not self._releases:
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


class _StandIn:
    """In the outline, for a tensor that follows by itself."""


_SMALL = 64
"""A tensor of up to so many elements travels inside the outline (step counters live on the CPU)."""


def _outline(value: Any, big: list[torch.Tensor]) -> Any:
    """The same structure with stand-ins for large tensors, which are collected in order."""
    import torch

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.numel() <= _SMALL:
            return leaf.detach().cpu()
        big.append(leaf.detach().contiguous())
        return _StandIn()

    return _mapped(value, replaced)


def _filled(value: Any, big: Iterator[torch.Tensor]) -> Any:
    return _mapped(value, lambda leaf: next(big) if isinstance(leaf, _StandIn) else leaf)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same dictionaries, lists and tuples, with every leaf changed."""
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)


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
        self._averaged = -1
        self._flat: torch.Tensor

    def average(self, weight: float, group: ProcessGroup | None, iteration: int) -> None:
        """Every rank of the group has to call it. After an error, the same call again does what is
        missing."""
        import torch
        import torch.distributed as dist

        if group is None or not self._tensors:
            return
        if self._averaged != iteration:
            flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in self._tensors])
            flat.mul_(weight)
            dist.all_reduce(flat, group=group)
            self._flat, self._averaged = flat, iteration
        parts = self._flat.split([tensor.numel() for tensor in self._tensors])
        torch_internals.foreach_copy(
            [tensor.data for tensor in self._tensors],
            [part.view(tensor.shape) for tensor, part in zip(self._tensors, parts, strict=True)],
        )
