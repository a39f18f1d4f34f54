"""Process groups of the active ranks, and the gradient reduction over them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kilter.observe import torch_internals

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


MOST_RANKS_WITH_IDLE = 4
"""Ranks of a job up to which some may be idle: every set of active ranks needs a group."""


class Groups:
    """The groups of all sets of two or more ranks.

    They are made at once and by all ranks, because an idle rank cannot take part later: torch names
    a group after how many there are in the process, also one that only its members make.
    """

    def __init__(self, whole: ProcessGroup, world: int, *, subsets: bool) -> None:
        self._everyone = tuple(range(world))
        self._subsets = subsets
        self._made: dict[tuple[int, ...], ProcessGroup] = {self._everyone: whole}

    def make(self) -> None:
        """Make the groups that do not exist yet. A collective: every rank has to call this."""
        import torch.distributed as dist

        for size in range(2, len(self._everyone)) if self._subsets else ():
            for ranks in itertools.combinations(self._everyone, size):
                if ranks not in self._made:
                    self._made[ranks] = dist.new_group(list(ranks))

    def of(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """The group of these ranks; None for one rank, which needs none."""
        return None if len(ranks) < 2 else self._made[ranks]


class Reduction:
    """DDP's communication hook: the sum over the active ranks of weight times gradient.

    Each rank's gradient belongs to the mean loss over its own samples. With `weight = own samples /
    all samples` the sum is the gradient of the mean over the global batch, whatever the shards.
    NCCL multiplies within the sum: a product of its own would read and write all gradients again.
    """

    def __init__(self, whole: ProcessGroup) -> None:
        import torch.distributed as dist

        self._whole = whole
        self._weighted_sums = dist.get_backend(whole) == "nccl" and hasattr(
            torch_internals, "nccl_weighted_sum"
        )
        self.plain()
        self.on_last: Callable[[], object] = _nothing
        """Called when the last bucket of a backward pass is ready: the rank's own work is done."""
        self.on_reduced: Callable[[], object] = _nothing
        """Called when the last bucket is summed over the ranks."""

    def plain(self) -> None:
        """The mean over all ranks, as without kilter."""
        self.weight = 1.0 / self._whole.size()
        self.group: ProcessGroup | None = self._whole

    def __call__(self, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        import torch
        import torch.distributed as dist

        gradient = bucket.buffer()
        last = bool(bucket.is_last())
        if last:
            self.on_last()
        operation: Any = dist.ReduceOp.SUM
        if self._weighted_sums and self.group is not None and gradient.dtype == torch.float32:
            operation = torch_internals.nccl_weighted_sum(self.weight)
        elif self.weight != 1.0:
            gradient.mul_(self.weight)
        if self.group is None:
            devices = [gradient.device] if gradient.is_cuda else None
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
            done.set_result(gradient)
            if last:
                self.on_reduced()
            return done
        work = dist.all_reduce(gradient, operation, group=self.group, async_op=True)

        def finished(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if last:
                self.on_reduced()
            return future.value()[0]

        return work.get_future().then(finished)


def _nothing() -> None: ...
