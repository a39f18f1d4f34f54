"""Rank 0's link to the daemon: reports the job, and carries out the ratios that are wanted.

A thread of its own: the training never waits for the daemon. Without one, or after its end, the job
keeps its ratio; a new daemon is found by its file.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kilter.core.errors import KilterError
from kilter.sharing.elastic.agreement import propose
from kilter.sharing.elastic.meter import Guard
from kilter.sharing.elastic.share import MOST_PAUSE_S, Share, connect, resumed
from kilter.sharing.messages import Facts, Identity, JobStatus, RankStatus
from kilter.sharing.plan.snapshot import Ratios, shown
from kilter.sharing.store import TIMEOUT, Channel, read_endpoint

_EVERY_S = 0.25
_RETRY_S = 1.0
_BROKEN = (KilterError, RuntimeError, ValueError, OSError)
"""What a lost or half-written daemon makes of a call: DistNetworkError is a RuntimeError."""


class DaemonLink(threading.Thread):
    """Runs in the process of rank 0 until that ends. It has many attributes because it holds two
    conversations, one with the ranks and one with a daemon that may be replaced."""

    def __init__(
        self,
        file: Path,
        share: Share,
        facts: Facts,
        identity: Identity,
        guard: Guard,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(name="kilter-share", daemon=True)
        self._say = say
        self._file, self._share, self._facts, self._identity = file, share, facts, identity
        self._guard = guard
        self._begun_s = time.monotonic()
        self._stopped = threading.Event()
        self._store = connect(share.address)
        self._channel: Channel | None = None
        self._address: tuple[str, int] | None = None
        self._slot = 0
        self._number = 0
        self._carried_out = 0
        self._ratios: Ratios | None = None
        self._proposals = 0
        self._paused: int | None = None
        """The last pause was at this iteration."""

    def run(self) -> None:
        self._guard.run(self._follow)

    def _follow(self) -> None:
        atexit.register(self.leave)
        if self._identity.ratios is not None:
            if self._possible(self._identity.ratios):
                self._change(self._identity.ratios)
            else:
                self._say(
                    f"the job begins with an even split: with the ratio "
                    f"{shown(self._identity.ratios)} a rank would have no samples"
                )
        while not self._stopped.is_set():
            try:
                self._turn()
                self._stopped.wait(_EVERY_S)
            except _BROKEN:
                self._channel = None
                self._stopped.wait(_RETRY_S)

    def _turn(self) -> None:
        if self._channel is None or self._moved():
            self._join()
        assert self._channel is not None
        self._number += 1
        self._channel.report(self._slot, self._status())
        target = self._channel.target(self._slot)
        if target is None or target.number <= self._carried_out:
            return
        self._carried_out = target.number
        if self._paused is not None:
            self._store.set(resumed(self._paused), "1")
            self._paused = None
        if not self._possible(target.ratios):
            return
        if target.pause_s > 0.0:
            self._say(f"the job pauses for at most {target.pause_s:.0f} s ({target.reason})")
            self._paused = self._change(target.ratios, min(target.pause_s, MOST_PAUSE_S))
        elif target.ratios != self._ratios:
            self._change(target.ratios)

    def _possible(self, ratios: Ratios) -> bool:
        """Neither its user nor a daemon may ask for what this job cannot do."""
        fewest = 0 if self._facts.may_idle else 1
        return len(ratios) == self._facts.world and min(ratios) >= fewest and sum(ratios) > 0

    def _join(self) -> None:
        """Register with the daemon that the file names now."""
        endpoint = read_endpoint(self._file)
        channel = Channel.join(endpoint)
        if channel.summary() is None:
            raise KilterError(f"the token in {self._file} is not that of the daemon")
        self._slot, self._carried_out = channel.new_slot(), 0
        self._channel, self._address = channel, (endpoint.host, endpoint.port)

    def _moved(self) -> bool:
        """Whether the file names another daemon by now."""
        try:
            endpoint = read_endpoint(self._file)
        except KilterError:
            return False
        return (endpoint.host, endpoint.port) != self._address

    def _change(self, ratios: Ratios, pause_s: float = 0.0) -> int | None:
        """The iteration at which it happens; None if it does not."""
        self._proposals += 1
        verdict = propose(
            self._store,
            self._proposals,
            ratios,
            self._facts.world,
            pause_s=pause_s,
            stop=self._stopped.is_set,
        )
        if verdict.at is not None:
            self._ratios = ratios
        return verdict.at

    def _status(self) -> JobStatus:
        ranks = tuple(self._rank(rank) for rank in range(self._facts.world))
        return JobStatus(
            **msgspec.structs.asdict(self._identity) | {"ratios": self._ratios},
            number=self._number,
            pid=os.getpid(),
            facts=self._facts,
            iteration=max(rank.iteration for rank in ranks),
            elapsed_s=time.monotonic() - self._begun_s,
            ranks=ranks,
        )

    def _rank(self, rank: int) -> RankStatus:
        key = f"status/{rank}"
        if not self._store.check([key]):
            return RankStatus(0, 0, 0, 0.0, 0.0, 0.0)
        return msgspec.json.decode(self._store.get(key), type=RankStatus)

    def leave(self) -> None:
        """Say goodbye at the end of the process; a killed one is missed after a while."""
        self._stopped.set()
        self.join(2 * TIMEOUT.total_seconds())
        if self._channel is not None and not self.is_alive():
            try:
                self._channel.leave(self._slot)
            except _BROKEN:
                return
