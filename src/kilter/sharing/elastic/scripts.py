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
    from torch.optim.swa_utils import AveragedModel

    for kind, found in (
        (DistributedDataParallel, job.watch),
        (LRScheduler, job.others.append),
        (GradScaler, job.others.append),
        (AveragedModel, job.others.append),
    ):
        _after_init(kind, functools.partial(job.guard.run, found))
    after_import("torch.distributed.fsdp", lambda: _watch_sharding(job)).install()
    _watch_steps(job)
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
