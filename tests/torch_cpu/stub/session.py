"""A session that does nothing but say on stderr when it begins and ends."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from kilter.core.plan import Goal


@dataclass(frozen=True)
class Options:
    goal: Goal
    device: str = "auto"
    dry_run: bool = False
    out: Path | None = None
    command: tuple[str, ...] = ()
    json_summary: bool = False


class Session:
    def __init__(self, options, ranks):
        self.options, self.ranks, self.pid = options, ranks, os.getpid()

    def __enter__(self):
        print(f"kilter: begins {self.options} {self.ranks}", file=sys.stderr)
        return self

    def __exit__(self, kind, error, frames):
        if os.getpid() == self.pid:
            print(f"kilter: ends {kind and kind.__name__}", file=sys.stderr)
