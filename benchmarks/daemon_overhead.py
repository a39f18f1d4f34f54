"""What a set costs through `kilter daemon`, against a lease of one's own and the bare driver call;
and what the daemon takes while it is idle.

    python benchmarks/daemon_overhead.py [--sets 300] [--idle-s 60] [--json]

The processes are real, the card is fake: each of its calls takes a few milliseconds of file access,
so that the differences count, not the sums.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kilter.core.setting import Setting
from kilter.device.find import find
from kilter.device.nvidia import NvidiaDevice
from kilter.lease.lease import Lease
from kilter.testing.daemon_box import DaemonBox

PAIR = (Setting(sm_clock_hz=1.2e9), Setting(sm_clock_hz=1.5e9))


def timed(set_: Callable[[Setting], None], count: int) -> list[float]:
    times = []
    for number in range(count + 1):
        begin_s = time.perf_counter()
        set_(PAIR[number % 2])
        times.append(time.perf_counter() - begin_s)
    return times


def client(way: str, uuid: str, count: int) -> None:
    """In a process of its own, once it counts as one that computes on the card."""
    sys.stdin.readline()
    if way == "driver":
        device = NvidiaDevice(uuid)
        times = timed(device.set, count)
        device.reset()
    else:
        with Lease(find("nvml", uuid=uuid, environ=os.environ)) as lease:
            times = timed(lease.set, count)
    # The first starts the watcher, or takes the GPU.
    first, *rest = times
    found = {"median_s": statistics.median(rest), "p95_s": sorted(rest)[int(0.95 * len(rest))]}
    print(json.dumps({"first_s": first, **found}))


def measure(box: DaemonBox, way: str, count: int) -> dict[str, float]:
    more = {} if way == "daemon" else {"KILTER_SOCKET": ""}
    with subprocess.Popen(
        [sys.executable, __file__, "--client", way, "--uuid", box.uuid, "--sets", str(count)],
        env=box.environ(**more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        with box.fake.edit() as state:
            state.cards[0].pids = (process.pid,)
        out, _ = process.communicate("go\n", timeout=600)
    found: dict[str, float] = json.loads(out)
    return found


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def idle(box: DaemonBox, seconds: float) -> dict[str, float]:
    before_s = cpu_s(box.daemon.pid)
    time.sleep(seconds)
    status = Path(f"/proc/{box.daemon.pid}/status").read_text()
    rss_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    used_s = cpu_s(box.daemon.pid) - before_s
    return {"cpu_s_per_hour": used_s * 3600.0 / seconds, "memory_bytes": rss_kib * 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=300)
    parser.add_argument("--idle-s", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--uuid", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        client(given.client, given.uuid, given.sets)
        return
    with tempfile.TemporaryDirectory(prefix="kilter-overhead-") as root:
        box = DaemonBox(Path(root))
        try:
            found = {way: measure(box, way, given.sets) for way in ("driver", "lease", "daemon")}
            found["idle"] = idle(box, given.idle_s)
        finally:
            box.close()
            box.end_daemon()
    if given.json:
        print(json.dumps({"schema": "kilter.daemon-overhead/1", "label": "measured", **found}))
        return
    for way, row in found.items():
        print(way, ", ".join(f"{name} {value:.4g}" for name, value in row.items()))


if __name__ == "__main__":
    main()
