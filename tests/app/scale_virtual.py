"""The ranks of `kilter bench scale` in virtual time: what a decision takes where each rank has a
processor of its own, which the processors of one machine cannot show.

The conductors, their messages and the pace of their looks are the real ones; sessions tick at
phases of their own. The store is one server that answers one call after the other, each in the
time that was measured of a real one.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from kilter.app.bench.scale_ranks import MadeUpGpu, RanksJob, conductor_of
from kilter.observe.end_times import Iteration
from kilter.session.live import TICK_S
from kilter.session.messages import LookPace

ROUND_TRIP_S = 0.5e-3
"""Assumed of the network between a rank and the store."""


SLOT_S = 1e-3
"""Of the server's time. Within one, calls are answered in any order."""


@dataclass(slots=True)
class VirtualStore:
    """A server with one processor."""

    service_s: float
    calls: int = 0
    values: dict[str, tuple[float, bytes]] = field(default_factory=dict)
    """Since when each message is there."""
    _busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """How much of each slot is taken: ranks are not simulated in the order of their calls."""

    def serve(self, at_s: float) -> float:
        """When a call that arrives then is done."""
        self.calls += 1
        slot = int(at_s / SLOT_S)
        while self._busy_s[slot] + self.service_s > SLOT_S:
            slot += 1
        self._busy_s[slot] += self.service_s
        return max(at_s, slot * SLOT_S) + self.service_s


class VirtualMessages:
    """What `StoreMessages` is of a real store. `now_s` is the rank's own time, which goes on while
    it waits for an answer."""

    def __init__(self, store: VirtualStore, world_size: int) -> None:
        self._store = store
        self._pace = LookPace(world_size)
        self.now_s = 0.0

    def post(self, name: str, message: bytes) -> None:
        self._store.values[name] = self._serve(), message

    def look(self, name: str) -> bytes | None:
        began_s = self.now_s
        if not self._pace.due(name, began_s):
            return None
        done_s = self._serve()
        self.now_s = done_s + ROUND_TRIP_S / 2
        since_s, message = self._store.values.get(name, (done_s + 1.0, b""))
        self._pace.looked(name, began_s, found=since_s <= done_s)
        return message if since_s <= done_s else None

    def drop(self, name: str) -> None:
        self._serve()
        self._store.values.pop(name, None)

    def close(self) -> None: ...

    def _serve(self) -> float:
        return self._store.serve(self.now_s + ROUND_TRIP_S / 2)


class VirtualRank:
    """One rank, whose session ticks at its own moments."""

    def __init__(self, rank: int, job: RanksJob, store: VirtualStore, phase_s: float) -> None:
        self._job = job
        self.phase_s = phase_s
        self.messages = VirtualMessages(store, job.world_size)
        self.gpu = MadeUpGpu(lambda: self.messages.now_s)
        clock = lambda: self.messages.now_s  # noqa: E731
        self._conductor = conductor_of(rank, job, self.gpu, self.messages, clock)
        self._done = 0

    def tick(self, at_s: float) -> None:
        self.messages.now_s = max(self.messages.now_s, at_s)
        while (end_s := (self._done + 1) * self._job.iteration_s) <= at_s:
            self._conductor.iteration(Iteration(self._done, end_s, self._job.iteration_s))
            self._done += 1
        self._conductor.step()


def drive_virtual(job: RanksJob, service_s: float) -> tuple[list[MadeUpGpu], VirtualStore]:
    """All ranks of a job for that long, none of them silent: what their GPUs were told."""
    store, phases = VirtualStore(service_s), random.Random(job.world_size)
    ranks = [
        VirtualRank(rank, job, store, phases.uniform(0.0, TICK_S)) for rank in range(job.world_size)
    ]
    in_turn = sorted(ranks, key=lambda rank: rank.phase_s)
    for turn in range(round(job.seconds / TICK_S)):
        for rank in in_turn:
            rank.tick(turn * TICK_S + rank.phase_s)
    return [rank.gpu for rank in ranks], store
