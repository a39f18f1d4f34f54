"""What the program waits for where none of its iterations is seen: work in other processes."""

from __future__ import annotations

import resource
import sys

_WAITS = {
    "/multiprocessing/process.py": "multiprocessing",
    "/torch/multiprocessing/spawn.py": "torch.multiprocessing.spawn",
}
"""File in which a thread stands that waits for a process -> how the process was started. Not
`subprocess`: scripts wait for compilers and downloads before their first iteration."""


def waits_for(thread: int) -> str | None:
    """How the process was started that a thread waits for; None if it waits for none."""
    frame, found = sys._current_frames().get(thread), None
    while frame is not None:
        for ending, how in _WAITS.items():
            if frame.f_code.co_filename.endswith(ending):
                found = how
        frame = frame.f_back
    return found


def children_cpu_s() -> float:
    """CPU time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
