"""Times of a step that jobs were seen to take alone on the machine, kept for their next run."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from kilter.core.codec import read, write_atomically
from kilter.core.errors import FileError

_MOST_JOBS = 1000

AloneTimes = dict[str, float]
"""It maps a job (see `job_key`) to seconds."""


def job_key(name: str, global_batch: int, ranks: int) -> str:
    """A job of this name, batch and number of GPUs is taken for the same job the next time."""
    return f"{name}: {global_batch} samples on {ranks} GPUs"


def load_alone(path: Path) -> AloneTimes:
    """The times in a file; none if there is no file. `FileError` if the file is something else."""
    if not path.exists():
        return {}
    try:
        found = msgspec.json.decode(read(path), type=AloneTimes)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not a history of shared jobs ({error})") from error
    if any(not (math.isfinite(step_s) and step_s > 0.0) for step_s in found.values()):
        raise FileError(f"{path}: not a history of shared jobs (a time is not above 0)")
    return found


def save_alone(path: Path, times: AloneTimes) -> None:
    """The newest of the times."""
    kept = dict(list(times.items())[-_MOST_JOBS:])
    write_atomically(path, msgspec.json.encode(kept))
