"""All ranks change the data ratio at the same iteration, without a collective.

Somebody proposes a ratio. Every rank that sees the proposal answers with the next iteration that it
has not yet handed out, and promises to hand out only `ITERATIONS_AHEAD` more until there is a
verdict. The verdict names an iteration that no rank can have passed, or none. Everything goes
through a key-value store that the process of rank 0 hosts, so the ranks agree also while a daemon
is dead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from kilter.sharing.elastic.schedule import RatioSchedule
from kilter.sharing.plan.snapshot import Ratios

if TYPE_CHECKING:
    from torch.distributed import Store

ITERATIONS_AHEAD = 4
"""A rank may begin so many iterations between its answer and the verdict."""

ANSWER_TIMEOUT_S = 120.0
"""After this time without an answer of all ranks a proposal is off."""

BETWEEN_LOOKS_S = 0.05
"""A rank that hands out iterations looks for a proposal no more often: each look is a message to
the process of rank 0 and back, 0.1 ms on a quiet host and 2 ms on a busy one."""

HELD = "held"
"""A rank sets this key after an error: from then on every proposal is off."""

_WAIT = timedelta(seconds=2 * ANSWER_TIMEOUT_S)


class Agreement(msgspec.Struct, frozen=True):
    """The end of a proposal. `at` is None if it is off."""

    ratios: Ratios
    at: int | None
    pause_s: float = 0.0
    """For so long no rank begins that iteration."""


def propose(
    store: Store,
    number: int,
    ratios: Ratios,
    world: int,
    *,
    pause_s: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> Agreement:
    """Carry a proposal through and return its verdict. Proposals are numbered from 1, and only one
    is carried through at a time."""
    answers = [f"answer/{number}/{rank}" for rank in range(world)]
    deadline = time.monotonic() + timeout_s
    verdict = Agreement(ratios, None)
    store.set(f"proposal/{number}", msgspec.json.encode(ratios))
    try:
        while not (complete := store.check(answers)):
            if time.monotonic() > deadline or stop() or store.check([HELD]):
                break
            time.sleep(0.002)
        if complete and not store.check([HELD]):
            at = max(int(store.get(key)) for key in answers) + ITERATIONS_AHEAD
            verdict = Agreement(ratios, at, pause_s)
    finally:
        # Whatever happened: a rank that has answered waits for the verdict.
        store.set(f"verdict/{number}", msgspec.json.encode(verdict))
    return verdict


class Listener:
    """The side of one rank. After an error in the middle, the same call again does it all."""

    def __init__(self, store: Store, rank: int, schedule: RatioSchedule) -> None:
        self._store, self._rank, self._schedule = store, rank, schedule
        self._number = 1
        self._limit: int | None = None
        self.look_s = BETWEEN_LOOKS_S
        self._looked_s = -math.inf

    def before(self, iteration: int) -> None:
        """Call before an iteration is handed out. Waits only if a verdict is overdue."""
        if self._limit is None and time.monotonic() < self._looked_s + self.look_s:
            return
        self._looked_s = time.monotonic()
        self.poll(iteration)
        if self._limit is not None and iteration >= self._limit:
            self._store.wait([f"verdict/{self._number}"], _WAIT)
            self.poll(iteration)

    def poll(self, iteration: int) -> None:
        """Answer and listen without waiting; an idle rank gives the iteration since which it is."""
        if self._limit is None:
            if not self._store.check([f"proposal/{self._number}"]):
                return
            self._store.set(f"answer/{self._number}/{self._rank}", str(iteration))
            self._limit = iteration + ITERATIONS_AHEAD
        verdict = f"verdict/{self._number}"
        if self._store.check([verdict]):
            self._take(self._store.get(verdict))

    def resume(self, iteration: int) -> None:
        """An idle rank takes part again, from an iteration that a verdict has named. A verdict that
        is still to come names a later one, so this one may be handed out without waiting: others
        may not be able to answer before it is."""
        if self._limit is not None:
            self._limit = max(self._limit, iteration + 1)

    def _take(self, raw: bytes) -> None:
        verdict = msgspec.json.decode(raw, type=Agreement)
        if verdict.at is not None:
            self._schedule.change(verdict.at, verdict.ratios, verdict.pause_s)
        self._number += 1
        self._limit = None
