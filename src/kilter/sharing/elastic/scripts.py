"""Finds the job in an unmodified script: its models, optimizers, schedulers and loaders."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from kilter.observe.imports import after_import
from kilter.sharing.elastic.job import ElasticJob


def find_in_script(job: ElasticJob) -> None:
    """Tell the job of everything that the script makes from here on."""
    from torch.amp import GradScaler
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.lr_scheduler import LRScheduler

    for kind, found in (
        (DistributedDataParallel, job.watch),
        (LRScheduler, job.others.append),
        (GradScaler, job.others.append),
    ):
        _after_init(kind, functools.partial(job.guard.run, found))
    after_import("torch.distributed.fsdp", lambda: _watch_sharding(job)).install()
    _watch_steps(job)
    _watch_losses(job)
    _replace_iteration(job)


def _after_init(kind: Any, found: Any) -> None:
    """Call `found(object)` for each new object of a class, once it is whole."""
    made = kind.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if not getattr(self, "_kilter_found", False):
            self._kilter_found = True
            found(self)

    kind.__init__ = init


def _watch_sharding(job: ElasticJob) -> None:
    from torch.distributed import fsdp

    apply = fsdp.fully_shard

    @functools.wraps(apply)
    def applied(module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = apply(module, *args, **kwargs)
        for each in module if isinstance(module, list | tuple) else [module]:
            job.guard.run(job.watch, each)
        return sharded

    fsdp.fully_shard = applied

    def refuse(model: Any) -> None:
        job.refuse(
            "fsdp1",
            "the model is wrapped in FullyShardedDataParallel, whose shares cannot be uneven; use "
            "fully_shard or DistributedDataParallel",
        )

    _after_init(fsdp.FullyShardedDataParallel, functools.partial(job.guard.run, refuse))


def _watch_steps(job: ElasticJob) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        job.guard.run(job.stepped, optimizer)

    register_optimizer_step_post_hook(stepped)


def _watch_losses(job: ElasticJob) -> None:
    """Look at the losses of the first steps: a sum over samples cannot be divided."""
    import torch

    backward = torch.autograd.backward  # `Tensor.backward` calls it as well

    told = False

    def look(losses: object) -> None:
        nonlocal told
        nodes = [
            getattr(loss, "grad_fn", None)
            for loss in (losses if isinstance(losses, list | tuple) else [losses])
        ]
        if any(map(loss_is_sum, nodes)):
            job.refuse(
                "sum-loss",
                "the loss is a sum over the samples of a batch; use the mean (reduction='mean')",
            )
        elif not told and any(map(loss_divides_by_weights, nodes)):
            told = True
            job.say(
                "the loss is divided by the weights of its targets (ignore_index, weight), not by "
                "their number: as with DDP itself, gradients depend on which rank has which samples"
            )

    @functools.wraps(backward)
    def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if job.share is None and job.refused is None:
            job.guard.run(look, tensors)
        if job.share is not None or job.refused is not None:
            torch.autograd.backward = backward
        backward(tensors, *args, **kwargs)

    torch.autograd.backward = watched


_SUM = 2
"""`reduction='sum'` in what autograd saves of a loss."""


def loss_is_sum(node: Any) -> bool:
    """Whether the graph of a loss begins with a sum over samples."""
    return any(
        getattr(each, "_saved_reduction", None) == _SUM
        or (type(each).__name__.startswith("SumBackward") and not getattr(each, "_saved_dim", None))
        for each in _beginning(node)
    )


def loss_divides_by_weights(node: Any) -> bool:
    """Whether a mean of a cross entropy is over something else than the number of its targets."""
    return any(
        hasattr(each, "_saved_total_weight")
        and float(each._saved_total_weight) != each._saved_target.numel()
        for each in _beginning(node)
    )


def _beginning(node: Any) -> Iterator[Any]:
    """The nodes with which the graph of a loss begins. Factors and added terms are followed; a
    quotient is not, because `loss.sum() / len(batch)` is a mean."""
    pending, seen = [node], 0
    while pending and seen < 64:
        node, seen = pending.pop(), seen + 1
        if node is None:
            continue
        yield node
        name = type(node).__name__
        if name.startswith(("MulBackward", "AddBackward", "ToCopyBackward", "NegBackward")):
            pending += [parent for parent, _ in node.next_functions]


def _replace_iteration(job: ElasticJob) -> None:
    from torch.utils.data import DataLoader

    plain = DataLoader.__iter__

    @functools.wraps(plain)
    def iterate(self: Any) -> Iterator[Any]:
        if getattr(self, "_kilter_own", False):
            batches: Iterator[Any] = plain(self)
            return batches
        return job.batches(self, functools.partial(plain, self))

    DataLoader.__iter__ = iterate
