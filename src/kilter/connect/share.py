"""`kilter.share`: fair sharing from Python, for those who prefer three lines to a launcher.

share = kilter.share(model, optimizer, global_batch=256, total_steps=10_000)
for epoch in range(epochs):
    for x, y in share.loader(dataset):
        ...                              # forward, backward, optimizer.step()
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilter.core.errors import UsageError
from kilter.session.fence import Fence
from kilter.sharing.elastic.job import ElasticJob
from kilter.sharing.elastic.sharded import is_sharded
from kilter.sharing.link import DaemonLink
from kilter.sharing.messages import Identity
from kilter.sharing.plan.snapshot import Ratios
from kilter.sharing.store import default_file

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import Dataset


def share(
    model: DistributedDataParallel | FSDPModule,
    optimizer: torch.optim.Optimizer,
    *,
    global_batch: int,
    total_steps: int | None = None,
    others: Sequence[Any] = (),
    idle_ranks: bool = False,
    min_samples: int | None = None,
    name: str | None = None,
    ratios: Ratios | None = None,
    max_slowdown: float | None = None,
    endpoint: str | os.PathLike[str] | None = None,
) -> Shared:
    """Let `kilter share serve` change how this job's batch splits over the ranks.

    The gradient of every step is that of the mean loss over the same `global_batch` samples,
    whatever the ratio, and the samples come in the same order. Call it on every rank.

    Args:
        others: learning-rate schedulers, gradient scalers, whatever has a `state_dict` that a rank
            needs when it comes back from a time without samples.
        idle_ranks: whether a rank may have no samples at all for a time. The body of the loop is
            not run on it then: keep collectives of your own out of the loop, and do not end it by
            a count of batches. Not with `fully_shard`: every rank keeps a ratio of 1 to 10.
        min_samples: the fewest samples of a rank that has any (1; 2 with BatchNorm).
        ratios: tenths for each rank to begin with; an even split if absent.
        max_slowdown: what lower clocks of the GPUs may cost this job (0.02 is 2 %). Without it, and
            without one of the daemon, the clocks stay as they are while this job runs.
        endpoint: the daemon's file, if it is not the usual one.

    Raises:
        UsageError: torch.distributed is not initialised, the model is neither wrapped in DDP nor
            sharded by fully_shard, or a number makes no sense.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("kilter.share needs torch.distributed: call init_process_group() before")
    if not (isinstance(model, DistributedDataParallel) or is_sharded(model)):
        raise UsageError(
            f"kilter.share needs a model wrapped in DistributedDataParallel, or sharded by "
            f"fully_shard, not a {type(model).__name__}"
        )
    if idle_ranks and is_sharded(model):
        raise UsageError(
            "idle_ranks: each rank holds a part of a model sharded by fully_shard, so that its "
            "ratio is 1 to 10; leave idle_ranks out"
        )
    world = dist.get_world_size()
    if global_batch < world:
        raise UsageError(f"global_batch={global_batch} is smaller than the {world} ranks")
    if total_steps is not None and total_steps < 1:
        raise UsageError(f"total_steps={total_steps}: give at least 1, or None")
    if ratios is not None:
        _check_ratios(ratios, world, idle_ranks=idle_ranks)
    if max_slowdown is not None and not 0.0 <= max_slowdown < 1.0:
        raise UsageError(f"max_slowdown={max_slowdown}: give a fraction, 0.02 for 2 %")
    identity = Identity(
        name or Path(sys.argv[0]).stem or "job",
        _gpus(world),
        max_slowdown=max_slowdown,
        ratios=ratios,
    )
    file = default_file() if endpoint is None else Path(endpoint)

    def attached(job: ElasticJob) -> None:
        if job.share is not None and job.facts is not None and job.share.rank == 0:
            DaemonLink(file, job.share, job.facts, identity, job.guard, _say).start()

    job = ElasticJob(
        guard=Fence,
        may_idle=idle_ranks,
        release=idle_ranks,
        min_samples=min_samples,
        total_steps=total_steps,
        attached=attached,
        say=_say,
    )
    job.watch(model)
    job.optimizers.append(optimizer)
    job.others += others
    optimizer.register_step_post_hook(lambda *stepped: job.guard.run(job.stepped, optimizer))
    return Shared(job, global_batch, total_steps)


def _check_ratios(ratios: Ratios, world: int, *, idle_ranks: bool) -> None:
    if len(ratios) != world or sum(ratios) != 10 or min(ratios) < 0:
        raise UsageError(f"ratios={ratios}: give {world} numbers of at least 0 that sum to 10")
    if not idle_ranks and 0 in ratios:
        raise UsageError(f"ratios={ratios}: a share of 0 needs idle_ranks=True")


class Shared:
    """This job's part in the sharing of the machine. `job` says what was refused."""

    def __init__(self, job: ElasticJob, global_batch: int, total_steps: int | None) -> None:
        self.job = job
        self._global_batch, self._total_steps = global_batch, total_steps
        self._steps = 0

    def loader(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, **options: Any
    ) -> Loader:
        """Batches of a map-style data set; each iteration over it is one pass, shuffled anew in the
        same order on all ranks. `options` are those of `torch.utils.data.DataLoader`."""
        wrong = {"sampler", "batch_sampler", "batch_size", "drop_last"} & options.keys()
        if wrong:
            raise UsageError(
                f"share.loader takes no {min(wrong)}: global_batch says how samples are drawn; or "
                "start the script by `kilter share run`, which leaves your loader as it is"
            )
        return Loader(self, dataset, shuffle, seed, options)

    def take_steps(self, count: int) -> int:
        """How many of the next steps are still part of the job; they are taken off."""
        if self._total_steps is not None:
            count = min(count, self._total_steps - self._steps)
        self._steps += count
        return count

    @property
    def global_batch(self) -> int:
        return self._global_batch


class Loader:
    """One data set of a job. Made by `Shared.loader`."""

    def __init__(
        self,
        shared: Shared,
        dataset: Any,
        shuffle: bool,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        from torch.utils.data import DataLoader

        self._shared = shared
        self._order = _Order(len(dataset), shared.global_batch, shuffle, seed)
        self._loader = DataLoader(dataset, batch_sampler=self._order, **options)

    def __iter__(self) -> Iterator[Any]:
        self._order.limit = self._shared.take_steps(self._order.batches)
        yield from self._shared.job.batches(self._loader, lambda: iter(self._loader))
        self._order.passes += 1


class _Order:
    """A batch sampler: this rank's even part of each global batch."""

    def __init__(self, samples: int, global_batch: int, shuffle: bool, seed: int) -> None:
        import torch.distributed as dist

        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._samples, self._global_batch = samples, global_batch
        self._shuffle, self._seed = shuffle, seed
        self.passes = 0
        # A last batch with fewer samples than ranks would leave ranks without any.
        full, rest = divmod(samples, global_batch)
        self.batches = full + (rest >= self._world)
        self.limit: int = self.batches

    def __len__(self) -> int:
        return self.limit

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        order = list(range(self._samples))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.passes)
            order = torch.randperm(self._samples, generator=generator).tolist()
        for batch in range(self.limit):
            whole = order[batch * self._global_batch : (batch + 1) * self._global_batch]
            yield whole[self._rank :: self._world]


def _gpus(world: int) -> tuple[int, ...]:
    """The GPU of each rank: the visible ones in order."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [int(part) for part in visible.split(",") if part.strip().isdigit()]
    return tuple(named[:world]) if len(named) >= world else tuple(range(world))


def _say(text: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0 and sys.stderr is not None:
        print(f"kilter share: {text}", file=sys.stderr, flush=True)
