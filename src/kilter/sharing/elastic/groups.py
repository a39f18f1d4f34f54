"""Process groups of the active ranks, and the gradient reduction over them."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from kilter.observe import torch_internals

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


MOST_RANKS_WITH_IDLE = 4
"""Some ranks may be idle in jobs of up to so many: every set of active ranks needs a group."""

_DROP_TENSORS_S = 0.1
"""Gloo's threads need microseconds, but may have to wait for a processor first."""


def let_threads_drop_tensors() -> None:
    """Call before the interpreter ends: release its lock, so that gloo's threads can drop the
    tensors of the last collective. Python ends a thread that asks for the lock later, and in the
    middle of C++ that aborts the process (pytorch/pytorch#179291). A group waits for its threads
    when it is freed, but the groups of a shared job live until the process ends."""
    time.sleep(_DROP_TENSORS_S)


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

    DDP waits for what a hook returns, bucket by bucket. A future that depends on the sum would cost
    a callback, a stream and two events for each bucket. So the futures are complete at once, and
    the sums are waited for before DDP asks for the first: DDP does so in a callback at the end of
    the backward pass, which it queues right after this hook has taken the last bucket.
    """

    def __init__(self, whole: ProcessGroup) -> None:
        import torch.distributed as dist

        self._whole = whole
        self._by_nccl = dist.get_backend(whole) == "nccl" and hasattr(
            torch_internals, "nccl_weighted_sum"
        )
        self._queue = torch_internals.queue_callback
        self._sum = dist.AllreduceOptions()
        self._weighted_sum: Any = None
        self._works: list[Any] = []
        self.plain()

    def plain(self) -> None:
        """The mean over all ranks, as without kilter."""
        self.weigh(self._whole, 1.0 / self._whole.size())

    def weigh(self, group: ProcessGroup | None, weight: float) -> None:
        """What this rank's gradients count in the next sums, which are over this group."""
        import torch.distributed as dist

        self.group, self.weight = group, weight
        if self._by_nccl:
            self._weighted_sum = dist.AllreduceOptions()
            self._weighted_sum.reduceOp = torch_internals.nccl_weighted_sum(weight)

    def __call__(self, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        import torch

        gradient = bucket.buffer()
        in_sum = self._by_nccl and self.group is not None and gradient.dtype == torch.float32
        if not in_sum and self.weight != 1.0:
            gradient.mul_(self.weight)
        if self.group is not None:
            options = self._weighted_sum if in_sum else self._sum
            self._works.append(self.group.allreduce([gradient], options))
            if bucket.is_last():
                self._queue(self._wait)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(gradient)
        return done

    def _wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
