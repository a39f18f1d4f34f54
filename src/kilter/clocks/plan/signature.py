"""By what a job is recognised when it runs again. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def signature(*, device: str, max_slowdown: float, program: Iterable[str]) -> str:
    """The same program on the same kind of device under the same bound has the same signature,
    whatever its times in one run. `program` holds the lines that make a program the same one: its
    command and number of ranks, or the communication sections of all ranks."""
    parts = [device, f"{max_slowdown:g}", *program]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
