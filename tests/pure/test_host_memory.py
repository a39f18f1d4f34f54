"""What the host can still give, from the files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from kilter.act.swapper.host import available_bytes

MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\n"


def tree(root: Path, **files: str) -> Path:
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def group(path: str, limit: str, used: int, cache: int) -> dict[str, str]:
    return {
        f"{path}/memory.max": limit + "\n",
        f"{path}/memory.current": f"{used}\n",
        f"{path}/memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 7\n",
    }


def test_what_is_available_counts_and_not_what_is_free(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path)) == (800 * 1024, "free on the host")


@pytest.mark.parametrize(
    ("limit", "expected"), [("500000", 500000 - 200000 + 50000), ("max", 800 * 1024)]
)
def test_a_container_may_allow_less(tmp_path: Path, limit: str, expected: int) -> None:
    files = {"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", limit, 200000, 50000)}
    assert available_bytes(tree(tmp_path, **files))[0] == expected


def test_a_limit_above_the_own_group_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        **group("sys/fs/cgroup/job", "300000", 100000, 0),
        **group("sys/fs/cgroup/job/step", "max", 90000, 0),
    }
    found, whose = available_bytes(tree(tmp_path, **files))
    assert (found, whose) == (200000, "left of the container's limit")


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/docker/x"
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/x\n9:memory:/docker/x\n0::/\n",
        f"{folder}/memory.limit_in_bytes": "400000",
        f"{folder}/memory.usage_in_bytes": "390000",
        f"{folder}/memory.stat": "total_inactive_file 1000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0",
    }
    assert available_bytes(tree(tmp_path, **files))[0] == 11000


def test_this_machine_has_some() -> None:
    assert available_bytes()[0] > 0
