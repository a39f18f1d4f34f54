"""The conductor: turns the governor's orders into settings, and iterations into outcomes.

Fed with iterations as they end, on whatever clock the device lives by: a real GPU's job, or a
simulated GPU's virtual time. Rank 0 asks the governor; every rank executes the same order on its
own device, counts the same iterations, and reports; the slowest rank's time and the sum of the
energies are the outcome. Ranks agree by iteration number through the board.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Generator
from typing import Protocol

import msgspec

from kilter.act.board import Board
from kilter.core.events import AnyEvent, Block, Decided
from kilter.core.plan import Goal
from kilter.core.setting import Setting, Supported
from kilter.plan.governor import Choice, Governor, Order, Outcome, Phase
from kilter.plan.job_clocks import space

LEAST_ITERATIONS = 5
"""Of a block: its median has to survive an outlier or two."""
SENSOR_PERIODS = 20
"""Of a block: a mean power from fewer readings is worth little."""
LEAST_BLOCK_S = 1.0
"""Settings change at most about once a second: faster switching disturbs collectives
(NVIDIA/nccl#1551)."""
STALL = 3.0
"""A block with an iteration this many times as long as its median holds something else than the
job's rhythm (a checkpoint, an evaluation): it is done again."""
REPEATS = 2
"""How often a block may be done again before it counts as it is."""


class Iteration(Protocol):
    """One iteration on the device's clock."""

    @property
    def index(self) -> int: ...
    @property
    def end_s(self) -> float: ...
    @property
    def duration_s(self) -> float: ...


class Hands(Protocol):
    """What the conductor needs of a device under a lease."""

    def apply(self, setting: Setting) -> None:
        """Ask for a setting; raises the lease's errors."""

    def settled(self) -> bool:
        """Enough time has passed for it to act."""

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        """Over a stretch of the device's clock."""

    def sustained(self) -> Setting:
        """The clocks seen lately under load."""


class _Note(msgspec.Struct, frozen=True):
    """An order as the ranks see it."""

    setting: Setting
    iterations: int


class _Result(msgspec.Struct, frozen=True):
    """What one rank saw of a block."""

    iteration_s: float
    energy_j: float | None
    stalled: bool


class Conductor:
    """One per rank. `iteration` never waits and never raises but what `Hands.apply` raises.

    `orders` is the governor's coroutine on rank 0 and None elsewhere; `record` takes the events.
    """

    def __init__(
        self,
        hands: Hands,
        board: Board,
        *,
        rank: int = 0,
        world_size: int = 1,
        sensor_period_s: float,
        orders: Generator[Order, Outcome, None] | None,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        rehearsed: bool = False,
    ) -> None:
        self._hands = hands
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._block_s = max(LEAST_BLOCK_S, SENSOR_PERIODS * sensor_period_s)
        self._orders = orders
        self._record = record
        self._clock = clock
        self.rehearsed = rehearsed
        self._number = 0
        self._order: Order | None = None
        self._note: _Note | None = None
        self._ready = False
        self._begin: int | None = None
        self._seen: deque[Iteration] = deque(maxlen=100_000)
        self._repeats = 0
        self._iteration_s: float | None = None
        self._decided: tuple[str, Setting, str] | None = None
        self.blocks = 0

    @property
    def phase(self) -> Phase | None:
        """Of the order that is being executed; None on other ranks than 0 and before the first."""
        return self._order.phase if self._order else None

    def iteration(self, iteration: Iteration) -> None:
        """Take notice of one more iteration."""
        self._seen.append(iteration)
        self.step()

    def step(self) -> None:
        """Do whatever can be done now without waiting."""
        while self._advance():
            pass

    def _advance(self) -> bool:
        """One step of the present block; False when something has to happen first."""
        number = self._number
        if self._note is None:
            if self._orders is not None and self._order is None:
                self._issue(next(self._orders))
            raw = self._board.look(f"order/{number}")
            if raw is None:
                return False
            self._note = msgspec.json.decode(raw, type=_Note)
            self._hands.apply(self._note.setting)
            return True
        if not self._ready:
            if not self._seen or not self._hands.settled():
                return False
            # the iteration that runs now began before the setting acted: it does not count
            self._board.post(f"ready/{number}/{self._rank}", b"%d" % (self._seen[-1].index + 2))
            self._ready = True
            return True
        if self._begin is None:
            if self._orders is not None:
                ready = self._from_all("ready")
                if ready is None:
                    return False
                self._board.post(f"begin/{number}", b"%d" % max(int(r) for r in ready))
            raw = self._board.look(f"begin/{number}")
            if raw is None:
                return False
            self._begin = int(raw)
            return True
        if self._board.look(f"result/{number}/{self._rank}") is None:
            if not self._seen or self._seen[-1].index < self._begin + self._note.iterations - 1:
                return False
            result = self._measure(self._begin, self._note.iterations)
            self._board.post(f"result/{number}/{self._rank}", msgspec.json.encode(result))
            if self._orders is None:
                self._next()
            return True
        raws = self._from_all("result")
        if raws is None:
            return False
        self._conclude([msgspec.json.decode(raw, type=_Result) for raw in raws])
        return True

    def _from_all(self, what: str) -> list[bytes] | None:
        """The notes of all ranks, or None while one is missing."""
        notes = []
        for rank in range(self._world_size):
            note = self._board.look(f"{what}/{self._number}/{rank}")
            if note is None:
                return None
            notes.append(note)
        return notes

    def _issue(self, order: Order) -> None:
        """Tell the ranks what to run next."""
        self._order = order
        state = (order.phase.value, order.setting, order.reason)
        if not order.baseline and state != self._decided:
            self._decided = state
            self._record(
                Decided(
                    t_s=self._clock(), state=state[0], setting=order.setting, reason=order.reason
                )
            )
        iterations = LEAST_ITERATIONS
        if self._iteration_s:
            iterations = max(iterations, round(self._block_s / self._iteration_s))
        note = _Note(setting=order.setting, iterations=iterations)
        self._board.post(f"order/{self._number}", msgspec.json.encode(note))

    def _measure(self, begin: int, count: int) -> _Result:
        block = [i for i in self._seen if begin <= i.index < begin + count]
        times = [i.duration_s for i in block] or [self._seen[-1].duration_s]
        median = statistics.median(times)
        begin_s, end_s = block[0].end_s - block[0].duration_s, block[-1].end_s
        power = self._hands.mean_power_w(begin_s, end_s)
        return _Result(
            iteration_s=median,
            energy_j=None if power is None else power * (end_s - begin_s) / len(times),
            stalled=max(times) > STALL * median,
        )

    def _conclude(self, results: list[_Result]) -> None:
        """All ranks have reported: record the block, ask for the next order."""
        assert self._order is not None
        assert self._orders is not None
        assert self._note is not None
        assert self._begin is not None
        order, note = self._order, self._note
        energies = [r.energy_j for r in results]
        known = [e for e in energies if e is not None]
        outcome = Outcome(
            iteration_s=max(r.iteration_s for r in results),
            energy_j=sum(known) if len(known) == len(energies) else None,
        )
        stalled = any(r.stalled for r in results)
        again = stalled and self._repeats < REPEATS and order.phase is not Phase.WARM
        self._iteration_s = outcome.iteration_s
        span = [i for i in self._seen if i.index >= self._begin]
        self._record(
            Block(
                t_s=self._clock(),
                number=self._number,
                pair=order.pair,
                phase=order.phase.value,
                arm="baseline" if order.baseline else "candidate",
                setting=order.setting,
                iterations=note.iterations,
                iteration_s=outcome.iteration_s,
                energy_j=outcome.energy_j,
                device_begin_s=span[0].end_s - span[0].duration_s,
                device_end_s=span[note.iterations - 1].end_s,
                clean=not again,
                why_not="an iteration far longer than the others" if again else None,
                rehearsed=self.rehearsed,
            )
        )
        self.blocks += 1
        self._next()
        if again:
            self._repeats += 1
            self._issue(order)
        else:
            self._repeats = 0
            self._issue(self._orders.send(outcome))

    def _next(self) -> None:
        """Forget the block; the iterations are kept, since the next block may have begun. Notes of
        the block before can go: every rank has reported on this one, so has read those."""
        before = self._number - 1
        for name in (f"ready/{before}/{self._rank}", f"result/{before}/{self._rank}"):
            self._board.drop(name)
        if self._orders is not None:
            self._board.drop(f"order/{before}")
            self._board.drop(f"begin/{before}")
        self._number += 1
        self._order = self._note = self._begin = None
        self._ready = False


class Program:
    """What rank 0's conductor is told to do: warm up, look at the device, then govern.

    `choice` is what stands at any moment.
    """

    def __init__(
        self, goal: Goal, found: Setting, supported: Supported, hands: Hands, *, seed: int
    ) -> None:
        self._goal = goal
        self._found = found
        self._supported = supported
        self._hands = hands
        self._seed = seed
        self._governor: Governor | None = None

    @property
    def choice(self) -> Choice:
        if self._governor is None:
            return Choice(setting=self._found, reason="the default stands: nothing tried yet")
        return self._governor.choice

    def orders(self) -> Generator[Order, Outcome, None]:
        """The coroutine for `Conductor`."""
        for _ in range(WARM_BLOCKS):
            yield Order(
                phase=Phase.WARM,
                setting=self._found,
                baseline=True,
                pair=None,
                reason="learning the rhythm",
            )
        settings = space(self._found, self._hands.sustained(), self._supported)
        self._governor = Governor(settings, self._goal, seed=self._seed)
        yield from self._governor.run()


WARM_BLOCKS = 3
"""Blocks before the first probe: to know the length of an iteration and the sustained clock."""


def watching(found: Setting) -> Generator[Order, Outcome, None]:
    """Baseline blocks for ever: what is measured when nothing may be set."""
    phase = Phase.WARM
    while True:
        yield Order(
            phase=phase, setting=found, baseline=True, pair=None, reason="the default stands"
        )
        phase = Phase.HOLD
