"""Cheap keys: how many collectives each process group has begun since the last iteration end.

Every process group numbers its collectives on its own, so reading the numbers costs microseconds
and adds nothing to the job. An iteration's key is what each group's number grew by. The numbers
tell neither sizes nor order: those come from the profiler's windows. Replayed CUDA graphs do not
move them.
"""

from __future__ import annotations

import sys
from typing import Any

from kilter.observe import torch_internals

CollectiveKey = tuple[tuple[str, int], ...]


def distributed() -> Any:
    """`torch.distributed`, in a process that is a member of a process group; None elsewhere. It is
    not imported: with the program in the middle of the same import, torch ends the process."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if hasattr(dist, "is_initialized") and dist.is_initialized() else None


class CollectiveCounts:
    """`since_last()` once per iteration, in the program's thread."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def since_last(self) -> CollectiveKey | None:
        """The key of the iteration that just ended; None where there are no process groups, or
        none that numbers its collectives."""
        if distributed() is None:
            return None
        now: dict[str, int] = {}
        for group, name in torch_internals.process_groups.pg_names.items():
            try:
                now[name] = group._get_sequence_number_for_group()
            except RuntimeError:  # a backend that does not count
                continue
        before, self._before = self._before, now
        if not now:
            return None
        return tuple(sorted((name, number - before.get(name, 0)) for name, number in now.items()))
