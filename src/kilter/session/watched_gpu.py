"""A real GPU with somebody else's job on it: which GPU, its sensors, and when the job is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import monotonic

from kilter.core.errors import DeviceError, NoDevice, NotPermitted, NotSupported, UsageError
from kilter.core.units import show_duration
from kilter.device.find import find
from kilter.device.nvidia import Gpu, NvidiaDevice, survey
from kilter.lease.journal import start_ticks
from kilter.observe.sampler import Sampler

TICK_READINGS = 2
"""With one reading for each tick of the sensors now and then one holds two ticks, or none."""
WATCH_EVERY_S = 0.05
"""How often to look for a new reading."""
OCCUPANTS_EVERY_S = 0.5
"""How often to look who computes on the GPU."""
ABSENT_LOOKS = 2
"""A job that the driver does not list any more is taken for ended after so many looks in a row."""


class Occupants:
    """Who computes on one GPU. `pids` lists them now; `pid` is the process to watch, if one was
    named, else whoever computes there at first."""

    def __init__(self, pids: Callable[[], Iterable[int]], pid: int | None) -> None:
        self._pids = pids
        self._pid = pid
        self._ticks = None if pid is None else start_ticks(pid)
        self._known: set[int] = set() if pid is None else {pid}
        self._seen = False
        self._absent = 0

    def why_over(self) -> str | None:
        """Why this job need not be watched any more; None as long as it is there, alone, or where
        the driver does not tell. Raises device errors."""
        if self._pid is not None and start_ticks(self._pid) != self._ticks:
            return f"process {self._pid} has ended"
        try:
            now = set(self._pids())
        except (NotSupported, NotPermitted):
            return None
        if not self._known:
            self._known = now
        for pid in sorted(now - self._known):
            if not descends(pid, self._known):
                return f"process {pid} has come onto the GPU, beside the job that was watched"
            self._known.add(pid)
        self._seen = self._seen or bool(now)
        self._absent = 0 if now or not self._seen else self._absent + 1
        if self._absent >= ABSENT_LOOKS:
            return "the job has left the GPU"
        return None


def descends(pid: int, ancestors: set[int]) -> bool:
    """Whether a process is one of these, or was started by one, or by one of its children."""
    while pid > 1 and pid not in ancestors:
        pid = _parent(pid)
    return pid in ancestors


def _parent(pid: int) -> int:
    """0 for a process that is gone, or of another namespace."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(status.rpartition(b")")[2].split()[1])


class WatchedGpu:
    """A `WatchedJob` of `session.watch`: a GPU of somebody else. `stop` ends it from any thread
    or signal handler; `seconds` is the longest that it is watched."""

    def __init__(
        self,
        uuid: str,
        *,
        pid: int | None,
        seconds: float,
        stop: threading.Event,
        environ: Mapping[str, str],
    ) -> None:
        self.device = find("nvml", uuid=uuid, environ=environ)
        self._reader = NvidiaDevice(uuid)
        # the counter tells an alias from a period: it is read at each change of the sensors
        self.sensors = Sampler(self.device, counter_every_s=0.0, readings_per_tick=TICK_READINGS)
        self._occupants = Occupants(self._reader.compute_pids, pid)
        self._seconds = seconds
        self._stop = stop

    def clock(self) -> float:
        return monotonic()

    def drive(self, step: Callable[[], bool]) -> str:
        self.sensors.start()
        end_s, look_s, last = monotonic() + self._seconds, 0.0, None
        while not self._stop.wait(WATCH_EVERY_S):
            if monotonic() >= end_s:
                return f"its time is over ({show_duration(self._seconds)})"
            if self.sensors.why_ended is not None:
                raise DeviceError(f"the GPU cannot be read: {self.sensors.why_ended}")
            if monotonic() >= look_s:
                look_s = monotonic() + OCCUPANTS_EVERY_S
                if (over := self._occupants.why_over()) is not None:
                    return over
            latest = self.sensors.record.latest
            if latest is not None and latest is not last:
                last = latest
                if not step():
                    return ""
        return "it was stopped"

    def close(self) -> None:
        self.sensors.stop()
        self.device.close()
        self._reader.close()


def choose_gpu(gpu: str | None, pid: int | None) -> str:
    """The UUID of the GPU to watch: the one of this number or UUID, as `nvidia-smi` lists them,
    or on which the process computes, or the only one. Raises `UsageError` and device errors."""
    if pid is not None and start_ticks(pid) is None:
        raise UsageError(f"--pid {pid}: there is no such process (in this container)")
    gpus = survey().gpus
    if gpu is not None:
        gpus = tuple(each for each in gpus if gpu == str(each.index) or _begins(each, gpu))
        if len(gpus) != 1:
            raise UsageError(
                f"--gpu {gpu}: no GPU of this number or UUID; nvidia-smi -L lists them"
            )
    if pid is not None:
        there = [each for each in gpus if _computes(pid, each)]
        where = "any GPU" if gpu is None else f"GPU {gpu}"
        if not there:
            raise UsageError(
                f"--pid {pid}: neither this process nor a child of it computes on {where} yet; "
                "wait until it does, or name the GPU alone, with --gpu"
            )
        gpus = tuple(there)
    if not gpus:
        raise NoDevice("there is no GPU on this machine")
    if len(gpus) > 1:
        numbers = ", ".join(str(each.index) for each in gpus)
        one = "choose one with --gpu, and watch the others with a kilter watch of their own"
        if pid is not None:
            raise UsageError(f"--pid {pid}: computes on GPUs {numbers}; {one}")
        raise UsageError(f"there are GPUs {numbers}: {one}")
    if gpus[0].fault is not None:
        raise NoDevice(f"GPU {gpus[0].index} cannot be used: {gpus[0].fault}")
    return gpus[0].uuid


def _begins(gpu: Gpu, text: str) -> bool:
    return text.startswith("GPU-") and gpu.uuid.startswith(text)


def _computes(pid: int, gpu: Gpu) -> bool:
    if gpu.fault is not None:
        return False
    device = NvidiaDevice(gpu.uuid)
    try:
        return any(descends(one, {pid}) for one in device.compute_pids())
    finally:
        device.close()
