"""How much memory the host can still give: what is available, and what the container allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 2**60
"""Version 1 of cgroups says "no limit" with a huge number."""


def available_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that can be taken without pushing anybody out, and whose limit that is, in words.

    Page cache counts as available in both places: the kernel drops it for the asking.
    """
    limits = [(_meminfo(root), "free on the host")]
    limits += [(left, "left of the container's limit") for left in _cgroups(root)]
    return min(limits)


def _meminfo(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not a Linux; what is not in use at all is known everywhere
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroups(root: Path) -> Iterator[int]:
    """What is left in this process's cgroup and in each above it that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            left = _left(folder, *names)
            if left is not None:
                yield left
            if folder == top:
                break


def _left(folder: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        limit_bytes = int((folder / limit).read_text())  # "max" is not a number
        used_bytes = int((folder / used).read_text())
        stat = (folder / "memory.stat").read_text().split()
        cache_bytes = int(stat[stat.index(cache) + 1])
    except (OSError, ValueError):
        return None
    return None if limit_bytes > _UNLIMITED else max(0, limit_bytes - used_bytes + cache_bytes)
