"""Forks jobs that die at a line, one for each line of stdin: without a new Python for each."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sitecustomize import Lines  # of this directory

from kilter.core.setting import Setting
from kilter.device.nvidia import NvidiaDevice
from kilter.lease.lease import Lease
from kilter.testing.box import kill_watcher


def job(uuid: str) -> None:
    """All that a lease is for; nothing here waits."""
    device = NvidiaDevice(uuid)
    with Lease(device) as lease:
        lease.set(Setting(sm_clock_hz=1.2e9))
        lease.verify(device.sample())
        lease.set(Setting(sm_clock_hz=0.9e9, power_limit_w=400.0))
        lease.renew()


def die_low(uuid: str, hold_s: float) -> None:
    """Leaves all to the watcher."""
    with Lease(NvidiaDevice(uuid)) as lease:
        lease.set(Setting(sm_clock_hz=1.2e9, power_limit_w=400.0), hold_s=hold_s)
        if hold_s < 60.0:
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)


def live(order: dict[str, Any]) -> None:
    os.environ.update(order["environ"])
    directory = Path(order["environ"]["KILTER_STATE_DIR"])
    if order["role"] == "job":
        both = partial(kill_watcher, directory) if order["both"] else lambda: None
        lines = Lines(order["at"], Path(order["report"]), both)
        lines.start()
        job(order["uuid"])
        lines.stop()
    else:
        die_low(order["uuid"], order["hold_s"])


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                live(json.loads(line))
            finally:
                os._exit(0)  # also when the watcher is dead before it is up, and the lease refuses
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("over", flush=True)


main()
