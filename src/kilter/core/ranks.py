"""Which process of a job this one is, as torchrun or Slurm's srun say in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranks:
    """Place of a process in its job; a process on its own is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The process has this number on its node: it chooses the GPU, and 0 speaks for the node."""


_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    # SLURM_PROCID alone is also set in a batch script outside of srun, where one process runs.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def ranks(environ: Mapping[str, str]) -> Ranks:
    """The ranks that the environment states; alone if it states none, or none that make sense."""
    for names in _LAUNCHERS:
        rank, world_size, local_rank = (_count(environ.get(name)) for name in names)
        if rank is not None and world_size is not None and rank < world_size:
            return Ranks(rank, world_size, local_rank or 0)
    return Ranks()


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
