"""How much host memory the job may use for what is offloaded, and how much the host can give.

Needs neither torch nor numpy: a session says the limit before the script has imported anything.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kilter.core.errors import DeviceError
from kilter.core.units import show_bytes

_UNLIMITED = 2**60
"""Version 1 of cgroups says "no limit" with a huge number."""
DEFAULT_SHARE = 0.5
"""The job's processes may use this share of what the host can give, if nobody says."""
LOCAL_PROCESSES = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
"""How many processes of the job share the host, as launchers say in the environment."""


class HostMemoryError(DeviceError):
    """The host has not enough memory for what the schedule moves there."""

    code = "host_memory"


class HostLimit:
    """What all that one process offloads may take of the host's memory, together."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """Without a number there is no limit."""
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self._idle: list[Callable[[int], None]] = []

    @property
    def left_bytes(self) -> int | None:
        return None if self.limit_bytes is None else self.limit_bytes - self.taken_bytes

    def when_short(self, give_back: Callable[[int], None]) -> None:
        """It is called with a number of bytes where so many are missing, to give back what is kept
        for later."""
        self._idle.append(give_back)

    def take(self, size_bytes: int) -> None:
        """`HostMemoryError` if that is more than is left; nothing is taken then."""
        for give_back in self._idle:
            if self.left_bytes is not None and size_bytes > self.left_bytes:
                give_back(size_bytes - self.left_bytes)
        left_bytes = self.left_bytes
        if left_bytes is not None and size_bytes > left_bytes:
            raise HostMemoryError(
                f"the limit of {show_bytes(self.limit_bytes)} of host memory (--host-memory) is "
                "reached: what does not fit stays on the device or is recomputed"
            )
        self.taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.taken_bytes -= size_bytes


def default_limit_bytes(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """This process's part of half of what the host can give now."""
    counts = (environ.get(name, "") for name in LOCAL_PROCESSES)
    processes = next((int(text) for text in counts if text.isdecimal() and int(text)), 1)
    return int(DEFAULT_SHARE * available_bytes(root)[0]) // processes


def available_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that can be taken without pushing anybody out, and whose limit that is, in words.

    Page cache counts as available in both places: the kernel drops it for the asking.
    """
    limits = [(_meminfo(root), "free on the host")]
    limits += [(left, "left of the container's limit") for left in _cgroups(root)]
    return min(limits)


def large_pages(size_bytes: int) -> mmap.mmap:
    """Fresh memory, of this process alone, in large pages where the system has them for the asking:
    there are fewer of them to find and to pin. `OSError` if there is no memory."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


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
