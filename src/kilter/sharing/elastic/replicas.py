"""The models of one rank: how their gradients and running statistics are summed up with those of
the other active ranks."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

from kilter.sharing.elastic.groups import Groups, Reduction
from kilter.sharing.elastic.meter import Guard, Meter
from kilter.sharing.elastic.schedule import active
from kilter.sharing.elastic.sharded import is_sharded, waiting_gradients, weigh
from kilter.sharing.elastic.state import Buffers


class Replicas:
    """While all ranks have equally many samples, DDP is left as it is: its mean over the ranks is
    that over the samples. A hook that weights gradients is registered before the first iteration in
    which that is not so, by all ranks; DDP has no way to take it out again."""

    def __init__(
        self, models: Sequence[Any], reduction: Reduction, groups: Groups, waiting: Container[Any]
    ) -> None:
        """`waiting`: the models that have gradients of batches before, not yet summed up."""
        self._reduction, self._groups, self._waiting = reduction, groups, waiting
        self._replicated = [model for model in models if not is_sharded(model)]
        self._sharded = [model for model in models if is_sharded(model)]
        self._unhooked = list(self._replicated)
        self._syncs = [model for model in self._replicated if model.broadcast_buffers]
        self._buffers = Buffers(self._syncs and models)
        self._counts: Sequence[int] = ()
        self._even = True
        self._marks: list[Any] = []

    def take_over(self, guard: Guard, meter: Meter) -> None:
        """From here on gradients are weighted and steps are timed; on all ranks at once."""

        def accumulated(_: object) -> None:
            guard.run(meter.in_backward)

        for model in self._replicated[len(self._marks) :]:
            some = next(p for p in model.parameters() if p.requires_grad)
            self._marks.append(some.register_post_accumulate_grad_hook(accumulated))
        for model in self._sharded:
            weigh(
                model,
                self._reduction,
                lambda: guard.run(meter.work_done),
                lambda: guard.run(meter.reduced),
            )

    def give_up(self) -> None:
        """The models train as without kilter; on all ranks at once, while all are up to date."""
        self.train_plainly()
        while self._marks:
            self._marks.pop().remove()

    def train_plainly(self) -> None:
        """All ranks count alike."""
        before = self._reduction.weight
        self._reduction.plain()
        self._keep_weight_of_waiting(before)
        self._count((), even=True)

    def begin(self, counts: Sequence[int], rank: int) -> None:
        """The samples of each rank in the next iteration. Every rank that has had samples in the
        one before has to call it."""
        if counts == self._counts:
            return
        even = len(set(counts)) == 1
        while self._unhooked and not even:
            # Without annotations: DDP compares those of a hook with its own classes.
            self._unhooked[-1].register_comm_hook(
                self._reduction, lambda reduction, bucket: reduction(bucket)
            )
            self._unhooked.pop()
        before = self._reduction.weight
        self._reduction.weigh(self._groups.of(active(counts)), counts[rank] / sum(counts))
        self._keep_weight_of_waiting(before)
        self._count(counts, even)

    def _keep_weight_of_waiting(self, before: float) -> None:
        """Gradients that are accumulated are summed up with those of a later batch, by its weight:
        then each still counts by that of its own."""
        if self._reduction.weight in (before, 0.0):
            return
        gradients = [p.grad for m in self._replicated if m in self._waiting for p in m.parameters()]
        gradients += itertools.chain.from_iterable(map(waiting_gradients, self._sharded))
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(before / self._reduction.weight)

    def _count(self, counts: Sequence[int], even: bool) -> None:
        self._counts, self._even = counts, even
        for model in self._syncs:
            model.broadcast_buffers = even

    def end(self, iteration: int) -> None:
        if not self._even:
            self._buffers.average(self._reduction.weight, self._reduction.group, iteration)
