"""Vendor calls with a time-out: one daemon thread per device makes them, the caller waits so long.

Vendors' libraries are known to hang (for NVML: open-gpu-kernel-modules#1333). A thread inside such
a call cannot be stopped, only left behind; being a daemon, it does not keep the process alive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kilter.core.errors import DeviceError, DeviceHung

T = TypeVar("T")


class Worker:
    """Makes calls one at a time, in the order of arrival, for any number of threads."""

    def __init__(self, describe: Callable[[], str]) -> None:
        """Starts the thread. `describe` names the call that runs now, for the error message."""
        self._describe = describe
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._hung: str | None = None
        threading.Thread(target=self._run, name="kilter-device", daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()

    def do(self, act: Callable[[], T], timeout_s: float) -> T:
        """The result of `act`, made in the thread; its `DeviceError` is raised here.

        Raises `DeviceHung` if it takes longer than `timeout_s`, and at once ever after.
        """
        with self._turn:
            if self._hung is None:
                job = _Job(act)
                self._jobs.put(job)
                if job.done.acquire(timeout=timeout_s):
                    if job.error is not None:
                        raise job.error
                    return cast(T, job.result)
                self._hung = f"{self._describe()} did not return within {timeout_s:g} s"
            raise DeviceHung(
                f"{self._hung}; this device is left alone from now on: see dmesg for its driver's "
                "messages, and restart the job when the device answers again"
            )

    def stop(self) -> None:
        """Let the thread end after what it does now; not waited for."""
        self._jobs.put(None)


class _Job:
    """One call on its way through the thread, and what came of it."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act
        self.result: Any = None
        self.error: DeviceError | None = DeviceError("an unforeseen error, shown on stderr")
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        try:
            self.result = self.act()
            self.error = None
        except DeviceError as error:
            self.error = error
        finally:
            self.done.release()
