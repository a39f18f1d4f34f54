"""Process groups of the active ranks, and the gradient reduction over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Groups:
    """Groups by their ranks, made when first needed and kept. Only members make a group, so that an
    idle rank is not asked."""

    def __init__(self, whole: ProcessGroup, world: int) -> None:
        self._made: dict[tuple[int, ...], ProcessGroup] = {tuple(range(world)): whole}

    def of(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """The group of these ranks; None for one rank, which needs none."""
        import torch.distributed as dist

        if len(ranks) < 2:
            return None
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._made[ranks]


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
