"""Process groups of the active ranks, and the gradient reduction over them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

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
        import torch.distributed as dist

        everyone = tuple(range(world))
        self._made: dict[tuple[int, ...], ProcessGroup] = {everyone: whole}
        for size in range(2, world) if subsets else ():
            for ranks in itertools.combinations(everyone, size):
                self._made[ranks] = dist.new_group(list(ranks))

    def of(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """The group of these ranks; None for one rank, which needs none."""
        return None if len(ranks) < 2 else self._made[ranks]


class Reduction:
    """DDP's communication hook: the sum over the active ranks of weight times gradient.

    Each rank's gradient belongs to the mean loss over its own samples. With `weight = own samples /
    all samples` the sum is the gradient of the mean over the global batch, whatever the shards.
    """

    def __init__(self, whole: ProcessGroup) -> None:
        self.weight = 1.0 / whole.size()
        self.group: ProcessGroup | None = whole
        self.on_last: Callable[[], None] = _nothing
        """Called when the last bucket of a backward pass is ready: the rank's own work is done."""
        self.on_reduced: Callable[[], None] = _nothing
        """Called when the last bucket is summed over the ranks."""

    def __call__(self, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        import torch
        import torch.distributed as dist

        gradient = bucket.buffer()
        last = bool(bucket.is_last())
        if last:
            self.on_last()
        gradient.mul_(self.weight)
        if self.group is None:
            devices = [gradient.device] if gradient.is_cuda else None
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
            done.set_result(gradient)
            if last:
                self.on_reduced()
            return done
        work = dist.all_reduce(gradient, group=self.group, async_op=True)

        def finished(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if last:
                self.on_reduced()
            return future.value()[0]

        return work.get_future().then(finished)


def _nothing() -> None: ...
