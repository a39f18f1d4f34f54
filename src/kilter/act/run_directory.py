"""Where the files of a run are: one directory for all ranks of a job, and never one used before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from kilter.core.errors import FileError, UsageError
from kilter.core.ranks import Ranks

_JOB_NAMES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
)


def check_out(out: Path | None, ranks: Ranks) -> None:
    """Raises `UsageError` if the directory of a run holds one already: records are never mixed,
    and never overwritten."""
    if out is not None and (_attempt(out) / events_name(ranks)).exists():
        raise UsageError(f"--out {out}: holds a run already; choose another place, or delete it")


def make_out(out: Path) -> None:
    """Raises `UsageError` if nothing can be written there, before a long job has begun."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be made ({error.strerror})") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: cannot be written to")


def events_name(ranks: Ranks) -> str:
    return f"events-rank{ranks.rank}.jsonl"


def _attempt(out: Path) -> Path:
    """Workers that torchrun has started again do not write where the first ones did."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return out if restarts == "0" else out / f"restart-{restarts}"


def run_directory(out: Path | None, ranks: Ranks) -> Path:
    """What was asked for, or `runs/<time>-<pid>`; for several ranks the name of their job, which
    they have in common."""
    if out is not None:
        path = _attempt(out)
    elif ranks.world_size == 1:
        path = Path("runs", f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}")
    else:
        path = Path("runs", _job_name(os.environ))
    try:
        path = path.absolute()  # the script may change its directory
        path.mkdir(parents=True, exist_ok=out is not None or ranks.world_size > 1)
    except OSError as error:
        raise FileError(
            f"{path}: cannot be made ({error.strerror}); choose a place with --out DIR"
        ) from error
    return path


def _job_name(environ: Mapping[str, str]) -> str:
    names = [value for key in _JOB_NAMES if (value := environ.get(key))]
    if environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
        # torchrun's run id is "none" unless given: the next job would have the same name
        names.append(str(os.getppid()))
    return "-".join(names) or "job"
