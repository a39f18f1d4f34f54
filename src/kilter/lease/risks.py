"""What could keep a GPU that this process sets itself from being put back.

The watcher is started by the job. What ends all of a job's processes at once, as the end of a
container or of a batch job does, ends the watcher, too, and a container takes the journal along.
`kilter daemon` on the host outlives both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from kilter.lease.machine import LOCK_VARIABLE, MACHINE, machine_directory

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel gives the machine's own this number (PROC_PID_INIT_INO)."""
_KILLED_AS_A_WHOLE = re.compile(r"slurm|pbs|kubepods|docker|libpod|containerd|crio|lxc|job_?\d")
"""It finds parts of the names of cgroups that are ended with the job: of batch systems and
containers."""


def risks(environ: Mapping[str, str], proc: Path = Path("/proc")) -> list[str]:
    """A sentence for each; none where nothing is known."""
    found = []
    shared = _shared_with_the_job(proc)
    if shared is not None:
        found.append(
            f"the process that would put the GPU back after a kill dies with the job: {shared}; "
            "kilter daemon on the host outlives both"
        )
    if machine_directory(environ) is None:
        path = environ.get(LOCK_VARIABLE) or MACHINE
        found.append(
            f"jobs of other users are not kept from setting the same GPU: {path} is not there, or "
            f"not root's; as root: install -d -m 1777 {path}"
        )
    return found


def _shared_with_the_job(proc: Path) -> str | None:
    try:
        if os.readlink(proc / "self/ns/pid") != _FIRST_PID_NAMESPACE:
            return "both are in one container"
        groups = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in groups:
        group = line.rpartition(":")[2]
        if _KILLED_AS_A_WHOLE.search(group):
            return f"both are in the cgroup {group}"
    return None
