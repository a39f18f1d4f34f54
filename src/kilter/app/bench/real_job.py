"""Runs a job of a benchmark as a process of its own, and says what it printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from kilter.core.errors import KilterError

SECONDS_PER_ITERATION = 5.0
"""A job that takes longer does not run."""
_MORE_S = 60.0


def run_job(
    arguments: Sequence[str], iterations: int, *, more_s: float = 0.0, **environ: str
) -> str:
    """`python ARGUMENTS`, on one thread unless the environment says otherwise. `KilterError` if
    it fails, or takes longer than its iterations, a minute and `more_s`."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env={"OMP_NUM_THREADS": "1"} | dict(os.environ) | environ,
            timeout=_MORE_S + more_s + SECONDS_PER_ITERATION * iterations,
        )
    except subprocess.TimeoutExpired as error:
        raise KilterError(f"the job does not end within {error.timeout:g} s") from error
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2]
        raise KilterError(f"the job failed (exit code {done.returncode}): {last}")
    return done.stdout
