"""Some ranks of a simulated job, in one process: what `kilter bench scale` starts several of.

Every rank is the real thing but for its GPU: a conductor with its own connection to the store, its
own thread of messages, and a clock of iterations; rank 0 runs the governor as well. Only the device
is made up. The iterations of all ranks end at the same instants of the machine's clock, as those of
a data-parallel job do.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kilter.clocks.conductor import Conductor, GovernorProgram
from kilter.core.errors import UsageError
from kilter.core.messages import RankMessages
from kilter.core.plan import Goal
from kilter.core.setting import Sample, Setting, Supported
from kilter.core.units import MHZ
from kilter.observe.end_times import Iteration
from kilter.session.live import TICK_S
from kilter.session.messages import StoreMessages

MADE_UP_TOP_HZ = 1500.0 * MHZ
CLOCKS_HZ = tuple(mhz * MHZ for mhz in range(900, 1501, 60))


class RanksJob(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to do."""

    port: int
    world_size: int
    ranks: tuple[int, ...]
    seconds: float
    iteration_s: float
    sensor_period_s: float
    silent: tuple[tuple[int, float, float], ...]
    """Each is a rank that nobody drives from one time after the begin to another."""


class RankSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one rank. Times are of the machine's monotonic clock."""

    rank: int
    ordered_s: tuple[float, ...]
    """When each order was taken."""
    measured_s: tuple[float, ...]
    """When each block was over."""
    notes: int
    """So many messages were posted, read and dropped."""
    looks: int
    """So many questions were for messages that were not there yet."""
    blocks: int
    longest_step_s: float
    """The program's session would have waited this long for the conductor."""


class RanksSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one process."""

    ranks: tuple[RankSeen, ...]
    cpu_s: float
    """The whole process used this, from the begin on."""
    late_ticks: int
    """This machine was too slow to begin so many rounds in time."""
    ticks: int


class MadeUpGpu:
    """The actuator of a rank: lower clocks take less power and, down to a point, no more time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.setting = Setting()
        self.ordered_s: list[float] = []
        self.measured_s: list[float] = []

    def apply(self, setting: Setting) -> None:
        self.setting = setting
        self.ordered_s.append(self._clock())

    def check(self) -> None: ...

    def settled(self) -> bool:
        return True

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        self.measured_s.append(self._clock())
        clock_hz = self.setting.sm_clock_hz or MADE_UP_TOP_HZ
        return 100.0 + 200.0 * (clock_hz / MADE_UP_TOP_HZ) ** 3

    def sustained(self) -> Setting:
        return Setting(sm_clock_hz=MADE_UP_TOP_HZ)

    def recent(self) -> Sequence[Sample]:
        return ()


def conductor_of(
    rank: int,
    job: RanksJob,
    gpu: MadeUpGpu,
    messages: RankMessages,
    clock: Callable[[], float],
) -> Conductor:
    orders = None
    if rank == 0:
        supported = Supported(sm_clocks_hz=CLOCKS_HZ)
        goal = Goal(max_slowdown=0.05)
        orders = GovernorProgram(goal, Setting(), supported, gpu, seed=0).orders()
    return Conductor(
        gpu,
        messages,
        found=Setting(),
        rank=rank,
        world_size=job.world_size,
        sensor_period_s=job.sensor_period_s,
        orders=orders,
        record=lambda event: None,
        clock=clock,
    )


class CountingStore:
    """A store that counts what is asked of it. Each call is one round trip."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.notes = self.looks = 0

    def set(self, name: str, value: bytes) -> None:
        self.notes += 1
        self._store.set(name, value)

    def compare_set(self, name: str, expected: str, desired: str) -> bytes:
        value = bytes(self._store.compare_set(name, expected, desired))
        there = value != expected.encode()
        self.notes += there
        self.looks += not there
        return value

    def delete_key(self, name: str) -> bool:
        self.notes += 1
        return bool(self._store.delete_key(name))


class SimulatedRankOfMany:
    """One rank, driven as a session drives its controllers: once a tick."""

    begin_s = math.inf
    """It counts by the monotonic clock of the machine, which all processes share."""

    def __init__(self, rank: int, job: RanksJob, connect: Callable[[], Any]) -> None:
        self.rank = rank
        self._job = job
        self._gpu = MadeUpGpu()
        self._store: CountingStore | None = None

        def counted() -> CountingStore:
            self._store = CountingStore(connect())
            return self._store

        messages = StoreMessages(counted, world_size=job.world_size)
        self._conductor = conductor_of(rank, job, self._gpu, messages, time.monotonic)
        self._done = 0
        self._longest_s = 0.0

    @property
    def connected(self) -> bool:
        return self._store is not None

    def tick(self, now_s: float) -> None:
        job = self._job
        if any(
            rank == self.rank and begin_s <= now_s - self.begin_s < end_s
            for rank, begin_s, end_s in job.silent
        ):
            return
        begin_s = time.monotonic()
        while (end_s := self.begin_s + (self._done + 1) * job.iteration_s) <= now_s:
            self._conductor.iteration(Iteration(self._done, end_s, job.iteration_s))
            self._done += 1
        self._conductor.step()
        self._longest_s = max(self._longest_s, time.monotonic() - begin_s)

    def seen(self) -> RankSeen:
        store = self._store
        return RankSeen(
            rank=self.rank,
            ordered_s=tuple(self._gpu.ordered_s),
            measured_s=tuple(self._gpu.measured_s),
            notes=0 if store is None else store.notes,
            looks=0 if store is None else store.looks,
            blocks=self._conductor.blocks,
            longest_step_s=self._longest_s,
        )


def drive(job: RanksJob, begin: Callable[[], float]) -> RanksSeen:
    """Be these ranks for that long, from when `begin` says, which is called when all are there."""
    import torch.distributed as dist

    def connect() -> Any:
        store = dist.TCPStore("127.0.0.1", job.port, is_master=False, wait_for_workers=False)
        return dist.PrefixStore("kilter", store)

    ranks = [SimulatedRankOfMany(rank, job, connect) for rank in job.ranks]
    while not all(rank.connected for rank in ranks):
        time.sleep(TICK_S)
    begin_s = begin()
    for rank in ranks:
        rank.begin_s = begin_s
    time.sleep(max(0.0, begin_s - time.monotonic()))
    cpu_s = time.process_time()
    due_s, late, ticks = begin_s, 0, 0
    while (now_s := time.monotonic()) < begin_s + job.seconds:
        for rank in ranks:
            rank.tick(now_s)
        ticks += 1
        due_s += TICK_S
        if due_s < time.monotonic():
            late += 1
            due_s = time.monotonic()
        time.sleep(due_s - time.monotonic() if due_s > time.monotonic() else 0.0)
    return RanksSeen(
        ranks=tuple(rank.seen() for rank in ranks),
        cpu_s=time.process_time() - cpu_s,
        late_ticks=late,
        ticks=ticks,
    )


def serve() -> None:
    """Be the store until standard input ends: the port first, then the processor time."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.readline()
    cpu_s = time.process_time()
    sys.stdin.read()
    print(time.process_time() - cpu_s, flush=True)


def main() -> None:
    if sys.argv[1] == "serve":
        serve()
    elif sys.argv[1] == "drive":
        job = msgspec.json.decode(sys.stdin.buffer.readline(), type=RanksJob)

        def begin() -> float:
            print("connected", flush=True)
            return float(sys.stdin.readline())

        sys.stdout.buffer.write(msgspec.json.encode(drive(job, begin)))
        sys.stdout.flush()
        # The threads of messages are daemons that wait inside the store's client.
        os._exit(0)
    else:
        raise UsageError(f"{sys.argv[1]}: serve or drive")


def quantile(values: list[float], share: float) -> float:
    """Of these values; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
