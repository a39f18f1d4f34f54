"""What the host can still give, from the files of the kernel; the limit; and the pool's blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.memory.engine.host import GROWTH, PART_UNIT, HostBlock, HostPool
from kilter.memory.host_memory import (
    HostLimit,
    HostMemoryError,
    available_bytes,
    default_limit_bytes,
    large_pages,
)

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


@given(st.integers(1, 5_000_000))
def test_memory_in_large_pages_is_writable_and_of_this_size(size_bytes: int) -> None:
    with large_pages(size_bytes) as memory:
        assert len(memory) == size_bytes
        memory[-1] = 7
        assert memory[: size_bytes - 1].count(0) == size_bytes - 1


def test_memory_that_the_system_does_not_have_is_an_error() -> None:
    with pytest.raises(OSError, match="memory"):
        large_pages(2**62)


def test_this_machine_has_some() -> None:
    assert available_bytes()[0] > 0


def test_the_default_is_this_process_share_of_half(tmp_path: Path) -> None:
    root = tree(tmp_path)
    assert default_limit_bytes({}, root) == 400 * 1024
    assert default_limit_bytes({"LOCAL_WORLD_SIZE": "8"}, root) == 50 * 1024
    assert default_limit_bytes({"SLURM_NTASKS_PER_NODE": "4"}, root) == 100 * 1024
    assert default_limit_bytes({"LOCAL_WORLD_SIZE": "nonsense"}, root) == 400 * 1024


class Host:
    """A backend's host memory: what it has given out, and what was given back."""

    def __init__(self, limit: HostLimit) -> None:
        self.host = limit
        self.out: dict[int, int] = {}
        self.number = 0

    def reserve(self, size_bytes: int) -> int:
        self.host.take(size_bytes)
        self.number += 1
        self.out[self.number] = size_bytes
        return self.number

    def give_back(self, memory: int) -> None:
        self.host.give_back(self.out.pop(memory))


SIZES = st.one_of(st.integers(1, 200), st.integers(1, 10**6), st.sampled_from([64, 65, 4096]))


@given(
    limit_bytes=st.one_of(st.none(), st.integers(0, 4 * 10**6)),
    requests=st.lists(st.one_of(SIZES, st.integers(-40, -1)), max_size=120),
)
def test_the_pool_against_a_model(limit_bytes: int | None, requests: list[int]) -> None:
    """A positive number takes a block of that size, a negative one puts one of those in use back.
    The model knows which blocks are in use, for how many bytes each."""
    host = Host(HostLimit(limit_bytes))
    pool = HostPool(host)  # type: ignore[arg-type]
    used: list[HostBlock] = []
    for request in requests:
        if request < 0:
            if used:
                pool.put(used.pop(request % len(used)))
            continue
        needed_bytes = -(-request // PART_UNIT) * PART_UNIT
        before_bytes = pool.taken_bytes
        free_bytes = largest_gap(host, used)
        try:
            block = pool.take(request)
        except HostMemoryError:
            # Only where no part that is free would do, and a new piece is beyond the limit, even
            # with all that is unused given back.
            assert limit_bytes is not None
            assert free_bytes < needed_bytes
            held = {block.piece.memory for block in used}
            in_use = sum(size for memory, size in host.out.items() if memory in held)
            assert in_use + needed_bytes > limit_bytes
            continue
        assert block.piece.memory in host.out
        assert block.begin % PART_UNIT == 0
        assert request <= block.size_bytes == needed_bytes
        assert block.begin + block.size_bytes <= host.out[block.piece.memory]
        for other in used:
            assert (
                block.piece is not other.piece
                or block.begin >= other.begin + other.size_bytes
                or other.begin >= block.begin + block.size_bytes
            )
        used.append(block)
        if free_bytes >= needed_bytes:
            assert pool.taken_bytes == before_bytes  # nothing is reserved while there is room
        elif limit_bytes is None:
            more_bytes = pool.taken_bytes - before_bytes
            assert more_bytes == max(needed_bytes, before_bytes // GROWTH)
        assert pool.taken_bytes == sum(host.out.values()) == host.host.taken_bytes
        assert limit_bytes is None or pool.taken_bytes <= limit_bytes
    pool.empty()
    assert sorted(host.out) == sorted({block.piece.memory for block in used})


def largest_gap(host: Host, used: list[HostBlock]) -> int:
    """The most bytes side by side that are reserved and not in use."""
    gaps = [0]
    for memory, size_bytes in host.out.items():
        at = 0
        inside = sorted(
            (block.begin, block.begin + block.size_bytes)
            for block in used
            if block.piece.memory == memory
        )
        for begin, end in inside:
            gaps.append(begin - at)
            at = end
        gaps.append(size_bytes - at)
    return max(gaps)


def test_sizes_that_change_reserve_nothing_anew() -> None:
    """Texts of changing lengths: once the longest was there, all others find room."""
    host = Host(HostLimit(None))
    pool = HostPool(host)  # type: ignore[arg-type]
    for length in (1000, 70, 333, 901, 64, 1000, 512, 777):
        blocks = [pool.take(length * 4096) for _ in range(20)]
        for block in blocks:
            pool.put(block)
    assert pool.taken_bytes <= (1 + 1 / GROWTH) * 20 * 1000 * 4096
    reserved = host.number
    for length in range(999, 60, -7):
        blocks = [pool.take(length * 4096) for _ in range(20)]
        for block in reversed(blocks):
            pool.put(block)
    assert host.number == reserved


def test_what_the_pool_keeps_for_later_is_given_back_to_others() -> None:
    """As much as is missing, in whole pieces; what tensors use stays."""
    unit = PART_UNIT
    host = Host(HostLimit(100 * unit))
    pool = HostPool(host)  # type: ignore[arg-type]
    used = [pool.take(40 * unit), pool.take(20 * unit), pool.take(30 * unit)]
    for block in used[1:]:
        pool.put(block)
    host.reserve(10 * unit)  # it was left
    assert pool.taken_bytes == 90 * unit
    host.reserve(15 * unit)
    assert pool.taken_bytes == 70 * unit
    host.reserve(20 * unit)
    assert pool.taken_bytes == 40 * unit
    with pytest.raises(HostMemoryError):
        host.reserve(20 * unit)
    assert host.out[used[0].piece.memory] == 40 * unit


def test_a_larger_piece_than_is_needed_costs_nobody_anything() -> None:
    unit = PART_UNIT
    host = Host(HostLimit(122 * unit))
    pool = HostPool(host)  # type: ignore[arg-type]
    pool.take(80 * unit)
    pool.put(pool.take(8 * unit))
    pool.take(21 * unit)  # a quarter of what there is would be more than is left
    assert sorted(host.out.values()) == [20 * unit, 21 * unit, 80 * unit]
