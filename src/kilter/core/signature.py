"""By what a job is recognised when it runs again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence

from kilter.core.secrets import masked

NO_FILE = ("-m", "-c", "-", "")
"""A command that names no script begins with one of these words."""


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """The command with the script by its absolute path and secrets masked. To be asked before the
    script may change its directory."""
    first = words[0] if words else ""
    script = first if first in NO_FILE else os.path.abspath(first)
    return masked((script, *words[1:]))


def signature(*, device: str, max_slowdown: float, program: Iterable[str]) -> str:
    """The same program on the same kind of device under the same bound has the same signature,
    whatever its times in one run. `program` holds the lines that make a program the same one: its
    command and number of ranks, or the communication sections of all ranks."""
    parts = [device, f"{max_slowdown:g}", *program]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
