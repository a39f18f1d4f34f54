"""Where the files of a run are: one directory for all ranks of a job, and never one used before."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
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
        raise UsageError(f"{out}: holds a run already; choose another place, or delete it")


def make_out(out: Path) -> None:
    """Raises `UsageError` if nothing can be written there, before a long job has begun."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out}: cannot be made ({error.strerror})") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise UsageError(f"{out}: cannot be written to")


def events_name(ranks: Ranks) -> str:
    return f"events-rank{ranks.rank}.jsonl"


def _attempt(out: Path) -> Path:
    """Workers that torchrun has started again do not write where the first ones did."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return out if restarts == "0" else out / f"restart-{restarts}"


def run_directory(out: Path | None, ranks: Ranks) -> tuple[Path, str | None]:
    """Where the files of this run go, and why that is not below the working directory, if so.

    What was asked for; else `runs/<date>-<time>-<pid>`, and for several ranks the name of their
    job in place of the pid. Where that cannot be made (a read-only place, a deleted directory), a
    directory of the user's own among the temporary files.
    """
    if out is not None:
        return _made(_attempt(out)), None
    try:
        return _below(Path.cwd() / "runs", ranks), None
    except OSError as error:
        refused = f"runs/ cannot be made in the working directory ({error.strerror})"
    home = Path(tempfile.gettempdir(), f"kilter-{os.getuid()}")
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        if home.is_symlink() or home.stat().st_uid != os.getuid():
            raise FileError(
                f"{refused}, and {home} is somebody else's; name another directory for the run"
            )
        return _below(home / "runs", ranks), refused
    except OSError as error:
        raise FileError(
            f"{refused}, and {home} neither ({error.strerror}); name a directory for the run"
        ) from error


def _made(path: Path) -> Path:
    try:
        path = path.absolute()  # the script may change its directory
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"{path}: cannot be made ({error.strerror}); choose another directory"
        ) from error
    return path


def _below(runs: Path, ranks: Ranks) -> Path:
    """A new directory in `runs`, which keeps itself out of version control if it is ours."""
    try:
        runs.mkdir()
        (runs / ".gitignore").write_text("*\n")
    except FileExistsError:
        if not runs.is_dir():
            raise
    date = f"{datetime.now():%Y%m%d-%H%M%S}"
    if ranks.world_size == 1:
        return _new(runs / f"{date}-{os.getpid()}")
    path = runs / _agreed(runs, date, _job_name(os.environ), events_name(ranks))
    path.mkdir(exist_ok=True)
    return path


def _new(path: Path) -> Path:
    """A process may begin several runs in one second."""
    for again in itertools.count(2):
        try:
            path.mkdir()
        except FileExistsError:
            path = path.with_name(f"{path.name.partition('_')[0]}_{again}")
        else:
            break
    return path


def _agreed(runs: Path, date: str, job: str, events: str) -> str:
    """`<date>-<job>`, with one date for all ranks: that of the rank that came first, whose link
    `.<job>` to the directory the others read. A link is made at once with what it says."""
    link = runs / f".{job}"
    with contextlib.suppress(FileNotFoundError):
        if (link / events).exists():  # of an earlier job of that name
            link.unlink()
    with contextlib.suppress(FileExistsError):
        link.symlink_to(f"{date}-{job}")
    return os.readlink(link)


def _job_name(environ: Mapping[str, str]) -> str:
    names = [value for key in _JOB_NAMES if (value := environ.get(key))]
    if environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
        # torchrun's run id is "none" unless given: the next job would have the same name
        names.append(str(os.getppid()))
    return re.sub(r"[^\w.-]", "_", "-".join(names) or "job")
