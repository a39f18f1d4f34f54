"""Runs jobs under kilter for the rows that look at what kilter itself tells or leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kilter.core.events import AnyEvent, read_events

OUT = Path("job-out")


def kilter(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command line, as a user calls it."""
    return subprocess.run(
        [sys.executable, "-m", "kilter", *words],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | environ,
    )


def governed(script: str, *options: str, job: str = "job") -> subprocess.CompletedProcess[str]:
    """The same file again, as a job under kilter with these options."""
    return kilter("run", *options, "--out", str(OUT), script, job, HARM_SEEN=os.devnull)


def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OUT / "report.json").read_bytes())
    return found


def events() -> list[AnyEvent]:
    return list(read_events(OUT / "events-rank0.jsonl"))
