"""A budget holds for all that a training really allocates."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kilter.memory.engine import compiled_recorder

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory_allocated.py"
NOISE = 0.002
"""Blocks of Python's own count as well."""

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or shutil.which("cc") is None,
    reason="counting what malloc gives needs glibc and a C compiler",
)


def test_passes_under_plans_allocate_no_more_than_the_budget(recorder_is_built: Path) -> None:
    """Both those that the engine measures, and those that the compiled library sees to, for which
    no other test knows the peak."""
    command = [sys.executable, str(SCRIPT), "--shares", "30,50", "--autocast", "on"]
    state = {"XDG_STATE_HOME": str(recorder_is_built), compiled_recorder.BUILD: "on"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | state
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert row["over"] <= NOISE, row
        assert row["planned_bytes"] <= row["budget_bytes"] < row["plain_bytes"], row
        assert row["offloaded"] + row["recomputed"] > 0, row
        assert row["deviations"] == 0, row
