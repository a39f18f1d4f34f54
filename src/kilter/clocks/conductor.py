"""The conductor: turns the governor's orders into settings, and iterations into outcomes.

Fed with iterations as they end, on whatever clock the device lives by: a real GPU's job, or a
simulated GPU's virtual time. Rank 0 asks the governor; every rank executes the same order on its
own device, counts the same iterations, and reports; the slowest rank's time and the sum of the
energies are the outcome. Ranks agree by iteration number through the board. Ranks of one role
group (pipeline stages are several) have one setting in common.

A rank that cannot set says so in its report. Then nothing more is set on any of them: the others
would only wait for it, at a clock that nobody has judged.
"""

from __future__ import annotations

import functools
import statistics
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import msgspec

from kilter.clocks.plan.governor import BlockOutcome, Choice, Governor, Order, Phase
from kilter.clocks.plan.job import space
from kilter.clocks.plan.roles import MOST_ROLES, RoleGovernor
from kilter.core.errors import DeviceError, FileError
from kilter.core.events import AnyEvent, Block, Decided, Refused
from kilter.core.messages import RankMessages
from kilter.core.plan import Goal
from kilter.core.setting import Setting, Supported
from kilter.lease.journal import KNOBS

LEAST_ITERATIONS = 5
"""Of a block: its median has to survive an outlier or two."""
SENSOR_PERIODS = 20
"""Of a block: a mean power from fewer readings is worth little."""
LEAST_BLOCK_S = 1.0
"""Settings change at most about once a second: faster switching disturbs collectives
(NVIDIA/nccl#1551)."""
MOST_ITERATIONS = 100_000
"""Of a block; more are not kept."""
STALL = 3.0
"""A block with an iteration this many times as long as its median holds something else than the
job's rhythm (a checkpoint, an evaluation): it is done again."""
BLOCK_REPEATS = 2
"""How often a block may be done again before it counts as it is."""


class TimedIteration(Protocol):
    """One iteration on the device's clock."""

    @property
    def index(self) -> int: ...
    @property
    def end_s(self) -> float: ...
    @property
    def duration_s(self) -> float: ...


class Actuator(Protocol):
    """What the conductor needs of a device under a lease."""

    def apply(self, setting: Setting) -> None:
        """Ask for a setting; open knobs are to be as found. Raises the lease's errors."""

    def check(self) -> None:
        """An iteration has ended: is the setting obeyed, and still ours? Raises the lease's
        errors."""

    def settled(self) -> bool:
        """Enough time has passed for it to act."""

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        """Over a stretch of the device's clock."""

    def sustained(self) -> Setting:
        """The clocks seen lately under load."""


class _Note(msgspec.Struct, frozen=True):
    """An order as the ranks see it."""

    setting: Setting
    """Only the knobs that are not as found: ranks may have found different limits."""
    roles: dict[str, Setting]
    """The same by role group; if not empty, a group that is not named is to be as found."""
    iterations: int

    def of(self, role: str) -> Setting:
        return self.roles.get(role, Setting()) if self.roles else self.setting


class _Result(msgspec.Struct, frozen=True):
    """What one rank saw of a block."""

    iteration_s: float
    energy_j: float | None
    why_not: str | None
    """Why the block should be done again."""
    refused: str | None
    """Why this rank sets nothing any more."""


class Conductor:
    """One per rank. Neither `iteration` nor `step` waits; they raise what the board raises.

    `orders` is the governor's coroutine on rank 0 and None elsewhere; it is thrown a `DeviceError`
    when a rank cannot set. `role` is the group of this rank. `record` takes the events.
    `refused`: why this rank sets nothing; what its lease raises becomes the reason.
    """

    def __init__(
        self,
        actuator: Actuator,
        messages: RankMessages,
        *,
        found: Setting,
        rank: int = 0,
        world_size: int = 1,
        sensor_period_s: float,
        orders: Generator[Order, BlockOutcome, None] | None,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        role: str = "",
        rehearsed: bool = False,
        refused: str | None = None,
    ) -> None:
        self._actuator = actuator
        self._messages = messages
        self._found = found
        self._rank = rank
        self._world_size = world_size
        self._block_s = max(LEAST_BLOCK_S, SENSOR_PERIODS * sensor_period_s)
        self._orders = orders
        self._record = record
        self._clock = clock
        self._role = role
        self.rehearsed = rehearsed
        self.refused = refused
        self._given_up = refused is not None
        self._number = 0
        self._order: Order | None = None
        self._note: _Note | None = None
        self._ready = False
        self._begin: int | None = None
        self._seen: deque[TimedIteration] = deque(maxlen=MOST_ITERATIONS)
        self._repeats = 0
        self._iteration_s: float | None = None
        self._decided: tuple[str, Setting, str] | None = None
        self.blocks = 0

    @property
    def phase(self) -> Phase | None:
        """Of the order that is being executed; None on other ranks than 0 and before the first."""
        return self._order.phase if self._order else None

    def iteration(self, iteration: TimedIteration) -> None:
        """Take notice of one more iteration."""
        self._seen.append(iteration)
        self._set(self._actuator.check)
        self.step()

    def step(self) -> None:
        """Do whatever can be done now without waiting."""
        while self._advance():
            pass

    def _set(self, act: Callable[[], None]) -> None:
        """Something with the lease, which ends with its first error."""
        if self.refused is not None:
            return
        try:
            act()
        except (DeviceError, FileError) as error:
            self.refused = str(error)
            self._record(Refused(t_s=self._clock(), what="setting clocks", reason=self.refused))

    def _advance(self) -> bool:
        """One step of the present block; False when something has to happen first."""
        number = self._number
        if self._note is None:
            if self._orders is not None and self._order is None:
                self._issue(next(self._orders))
            raw = self._messages.look(f"order/{number}")
            if raw is None:
                return False
            if number == 0:
                self._messages.post(f"role/{self._rank}", self._role.encode())
            self._note = msgspec.json.decode(raw, type=_Note)
            self._set(functools.partial(self._actuator.apply, self._note.of(self._role)))
            return True
        if not self._ready:
            if not self._seen or not self._actuator.settled():
                return False
            # the iteration that runs now began before the setting acted: it does not count
            self._messages.post(f"ready/{number}/{self._rank}", b"%d" % (self._seen[-1].index + 2))
            self._ready = True
            return True
        if self._begin is None:
            if self._orders is not None:
                ready = self._from_all("ready")
                if ready is None:
                    return False
                self._messages.post(f"begin/{number}", b"%d" % max(int(r) for r in ready))
            raw = self._messages.look(f"begin/{number}")
            if raw is None:
                return False
            self._begin = int(raw)
            return True
        if self._messages.look(f"result/{number}/{self._rank}") is None:
            if not self._seen or self._seen[-1].index < self._begin + self._note.iterations - 1:
                return False
            self._messages.post(
                f"result/{number}/{self._rank}", msgspec.json.encode(self._measure())
            )
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
            note = self._messages.look(f"{what}/{self._number}/{rank}")
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
        note = _Note(
            setting=_changes(self._found, order.setting),
            roles={role: _changes(self._found, s) for role, s in order.roles.items()},
            iterations=min(iterations, MOST_ITERATIONS),
        )
        self._messages.post(f"order/{self._number}", msgspec.json.encode(note))

    def _block(self) -> list[TimedIteration]:
        """The iterations of the present block, less those that were not timed."""
        assert self._begin is not None
        assert self._note is not None
        end = self._begin + self._note.iterations
        return [i for i in self._seen if self._begin <= i.index < end]

    def _measure(self) -> _Result:
        block = self._block() or [self._seen[-1]]
        times = [i.duration_s for i in block]
        median = statistics.median(times)
        power_w = self._actuator.mean_power_w(block[0].end_s - times[0], block[-1].end_s)
        return _Result(
            iteration_s=median,
            energy_j=None if power_w is None else power_w * statistics.fmean(times),
            why_not=_STALLED if max(times) > STALL * median else None,
            refused=self.refused,
        )

    def _conclude(self, results: list[_Result]) -> None:
        """All ranks have reported: record the block, ask for the next order."""
        assert self._order is not None
        assert self._orders is not None
        assert self._note is not None
        order, note = self._order, self._note
        energies = [r.energy_j for r in results]
        known = [e for e in energies if e is not None]
        outcome = BlockOutcome(
            iteration_s=max(r.iteration_s for r in results),
            energy_j=sum(known) if len(known) == len(energies) else None,
        )
        refused = None if self._given_up else _refusal(results)
        why_not = refused or next((r.why_not for r in results if r.why_not), None)
        if order.phase is Phase.WARM or self._repeats >= BLOCK_REPEATS:
            why_not = refused
        self._iteration_s = outcome.iteration_s
        block = self._block() or [self._seen[-1]]
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
                device_begin_s=block[0].end_s - block[0].duration_s,
                device_end_s=block[-1].end_s,
                clean=why_not is None,
                why_not=why_not,
                rehearsed=self.rehearsed,
            )
        )
        self.blocks += 1
        self._next()
        if refused:
            self._given_up = True
            order = self._orders.throw(DeviceError(refused))
        elif why_not is None:
            order = self._orders.send(outcome)
        self._repeats = 0 if why_not is None else self._repeats + 1
        self._issue(order)

    def _next(self) -> None:
        """Forget the block and its iterations: the next one begins later on all ranks. Notes of
        the block before can go: every rank has reported on this one, so has read those."""
        before = self._number - 1
        for name in (f"ready/{before}/{self._rank}", f"result/{before}/{self._rank}"):
            self._messages.drop(name)
        if self._orders is not None:
            self._messages.drop(f"order/{before}")
            self._messages.drop(f"begin/{before}")
        self._number += 1
        self._order = self._note = self._begin = None
        self._ready = False
        last = self._seen[-1]
        self._seen.clear()
        self._seen.append(last)


_STALLED = "an iteration far longer than the others"


def _changes(found: Setting, setting: Setting) -> Setting:
    """The knobs of a setting that are not as found."""
    knobs = {knob: getattr(setting, knob) for knob in KNOBS}
    return Setting(**{k: value for k, value in knobs.items() if value != getattr(found, k)})


def _refusal(results: Sequence[_Result]) -> str | None:
    """Why a rank sets nothing any more, and which one, or None."""
    for rank, result in enumerate(results):
        if result.refused:
            return result.refused if len(results) == 1 else f"rank {rank}: {result.refused}"
    return None


class GovernorProgram:
    """What rank 0's conductor is told to do: warm up, look at the device, then govern.

    `choice` is what stands at any moment; `roles` tells the role groups, and is asked once every
    rank has run a block.
    """

    def __init__(
        self,
        goal: Goal,
        found: Setting,
        supported: Supported,
        actuator: Actuator,
        *,
        seed: int,
        roles: Callable[[], Sequence[str]] = lambda: ("",),
    ) -> None:
        self._goal = goal
        self._found = found
        self._supported = supported
        self._actuator = actuator
        self._seed = seed
        self._roles = roles
        self._governor: Governor | RoleGovernor | None = None
        self._refused: str | None = None

    @property
    def choice(self) -> Choice:
        if self._refused is not None:
            return Choice(setting=self._found, reason=f"the default stands: {self._refused}")
        if self._governor is None:
            return Choice(setting=self._found, reason="the default stands: nothing tried yet")
        return self._governor.choice

    def orders(self) -> Generator[Order, BlockOutcome, None]:
        """The coroutine for `Conductor`."""
        try:
            yield from self._govern()
        except DeviceError as error:
            self._refused = str(error)
            yield from watching(self._found, self.choice.reason)

    def _govern(self) -> Generator[Order, BlockOutcome, None]:
        for _ in range(WARM_BLOCKS):
            yield Order(
                phase=Phase.WARM,
                setting=self._found,
                baseline=True,
                pair=None,
                reason="learning the rhythm",
            )
        settings = space(self._found, self._actuator.sustained(), self._supported)
        roles = self._roles()
        if 1 < len(roles) <= MOST_ROLES:
            self._governor = RoleGovernor(roles, settings, self._goal, seed=self._seed)
        else:
            self._governor = Governor(settings, self._goal, seed=self._seed)
        yield from self._governor.run()


WARM_BLOCKS = 3
"""Blocks before the first probe: to know the length of an iteration and the sustained clock."""


def roles_on(messages: RankMessages, world_size: int) -> tuple[str, ...]:
    """The role groups of a job, in order of their first rank; those known so far."""
    notes = (messages.look(f"role/{rank}") for rank in range(world_size))
    return tuple(dict.fromkeys(note.decode() for note in notes if note is not None))


def watching(
    found: Setting, reason: str = "the default stands"
) -> Generator[Order, BlockOutcome, None]:
    """Baseline blocks for ever: what is measured when nothing may be set."""
    while True:
        yield Order(phase=Phase.HOLD, setting=found, baseline=True, pair=None, reason=reason)
