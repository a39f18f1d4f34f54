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
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

import msgspec

from kilter.clocks.block_messages import BlockMessages, OrderNote, RankResult
from kilter.clocks.pausing import PausingActuator
from kilter.clocks.plan.governor import BlockOutcome, Choice, Governor, Order, Phase
from kilter.clocks.plan.job import Space, space
from kilter.clocks.plan.job_class import first_settings, job_by_readings
from kilter.clocks.plan.known import PairBook, RecurringGovernor
from kilter.clocks.plan.predictor import Predictor
from kilter.clocks.plan.roles import MOST_ROLES, RoleGovernor
from kilter.clocks.search_leader import MOST_ITERATIONS, SearchLeader
from kilter.core.errors import DeviceError, FileError
from kilter.core.events import AnyEvent, Refused
from kilter.core.messages import RankMessages
from kilter.core.past_run import KnownSetting
from kilter.core.plan import Goal
from kilter.core.reasons import CLOCKS_REFUSED
from kilter.core.setting import Sample, Setting, Supported
from kilter.core.trace import IterationTrace
from kilter.model.stats import stalled, usual_time
from kilter.observe.end_times import Iteration

LATE_BLOCKS = 5
LATE_AFTER_S = 30.0
"""A rank that has not answered for so many blocks and so long, and as much again for each rank on
the way, is waited for no longer. The ranks of a job keep pace: the others answer within a block."""
STALLED = "an iteration far longer than the others"
"""Such a block is done again."""
PAUSED = "an iteration at the low clock of a pause"


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

    def recent(self) -> Sequence[Sample]:
        """The readings of the last few seconds."""


class Conductor:
    """One per rank. Neither `iteration` nor `step` waits; they raise what the board raises.

    `orders` is the governor's coroutine on rank 0 and None elsewhere; it is thrown a `DeviceError`
    when a rank cannot set. `role` is the group of this rank. `record` takes the events.
    `refused`: why this rank sets nothing; what its lease raises becomes the reason. `pauses` lowers
    the clock between the iterations; `pauses_left_s` (device time, what iterations have lost), on
    rank 0, tells how much all ranks may lose by that until the next order.

    It has many attributes because nothing waits: how far the present block has come is kept from
    one iteration to the next.
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
        refused: str | None = None,
        pauses: PausingActuator | None = None,
        pauses_left_s: Callable[[float, Mapping[int, float]], float] | None = None,
    ) -> None:
        self._actuator = actuator
        self._pauses, self._pauses_left_s = pauses, pauses_left_s
        self._messages = BlockMessages(messages, rank=rank, world_size=world_size)
        self._record = record
        self._clock = clock
        self._role = role
        self._rank, self._world_size = rank, world_size
        self.rehearsed = False
        """The script is over, and a rehearsal goes on."""
        self.refused = refused
        self._names_a_rank = False
        """`refused` says which rank it is about, and needs no name of this one."""
        self._leader: SearchLeader | None = None
        if orders is not None:
            self._leader = SearchLeader(
                orders,
                found=found,
                sensor_period_s=sensor_period_s,
                record=record,
                clock=clock,
                given_up=refused is not None,
            )
        self._note: OrderNote | None = None
        """It is the order of the present block."""
        self._ready = False
        self._begin: int | None = None
        """It is the first iteration of the present block."""
        self._seen: deque[Iteration] = deque(maxlen=MOST_ITERATIONS)
        self.blocks = 0
        self.roles: tuple[str, ...] = ("",)
        """These are the role groups of this rank and those that report to it, in order of their
        first rank; on rank 0 they are all of them, once every rank has run a block."""
        self._waits_from: Iteration | None = None
        """At this iteration the last step of the present block was done."""
        self._block_iterations = MOST_ITERATIONS
        """The last order asked for so many."""
        self._left = False
        """This rank has waited too long for the others, and sets nothing any more."""

    @property
    def phase(self) -> Phase | None:
        """Of the order that is being executed; None on other ranks than 0 and before the first."""
        if self._leader is None or self._leader.order is None:
            return None
        return self._leader.order.phase

    def iteration(self, iteration: Iteration) -> None:
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
            self.refuse(str(error))

    def refuse(self, why: str) -> None:
        """This rank sets nothing any more."""
        if self.refused is None:
            self.refused = why
            self._record(
                Refused(t_s=self._clock(), what="setting clocks", reason=why, code=CLOCKS_REFUSED)
            )

    def _advance(self) -> bool:
        """One step of the present block; False when something has to happen first."""
        if self._left:
            return False
        if self._waits_from is None and self._seen:
            self._waits_from = self._seen[-1]
        if self._step():
            self._waits_from = self._seen[-1] if self._seen else None
            return True
        if self._leader is None and self._late(self._messages.height_of_all + 2):
            self._leave()
        return False

    def _step(self) -> bool:
        if self._note is None:
            return self._take_order()
        if not self._ready:
            return self._get_ready()
        if self._begin is None:
            return self._agree_on_begin()
        if not self._messages.has_reported:
            return self._report(self._begin + self._note.iterations - 1)
        return self._conclude()

    def _late(self, steps: int) -> bool:
        """Whether so many steps of the other ranks should have been done long ago."""
        if self._waits_from is None or self._world_size == 1 or steps == 0:
            return False
        now, then = self._seen[-1], self._waits_from
        blocks = (now.index - then.index) / self._block_iterations
        return blocks > LATE_BLOCKS * steps and now.end_s - then.end_s > LATE_AFTER_S * steps

    def _leave(self) -> None:
        """The orders do not come any more, or not to this rank: back to the default, for good."""
        self._left = True
        self._give_up(f"rank {self._rank} has heard nothing of the other ranks for too long")

    def _give_up(self, why: str) -> None:
        """Back to the default, and set nothing any more."""
        self._set(functools.partial(self._actuator.apply, Setting()))
        self._names_a_rank = self._names_a_rank or self.refused is None
        self.refuse(why)

    def _take_order(self) -> bool:
        if self._leader is not None and self._leader.order is None:
            self._messages.post_order(self._leader.first())
        self._note = self._messages.order()
        if self._note is None:
            return False
        self._block_iterations = self._note.iterations
        if self._pauses is not None:
            self._pauses.allow(self._note.pause_s)
        self._set(functools.partial(self._actuator.apply, self._note.of(self._role)))
        return True

    def _get_ready(self) -> bool:
        if not self._seen or not self._actuator.settled():
            return False
        # the iteration that runs now began before the setting acted: it does not count
        self._messages.say_ready(self._seen[-1].index + 2, self._role)
        self._ready = True
        return True

    def _agree_on_begin(self) -> bool:
        ready = self._messages.ready(late=self._give_up_missing())
        if ready is None:
            return False
        if self._leader is not None:
            self.roles = tuple(sorted(ready.roles, key=ready.roles.__getitem__))
            self._messages.post_begin(max(ready.index, self._seen[-1].index + 1))
        self._begin = self._messages.begin()
        return self._begin is not None

    def _give_up_missing(self) -> bool:
        """Whether it is too late for the ranks below that have not answered. They are not waited
        for again, and nothing more is set: nobody could judge it."""
        missing = self._messages.missing
        if not missing or not self._late(self._messages.height):
            return False
        self._messages.leave_out(missing)
        through = " (or one that reports through it)" if self._messages.height > 1 else ""
        self._give_up(f"rank {missing[0]}{through} does not answer any more")
        return True

    def _report(self, last: int) -> bool:
        """Once the last iteration of the block has ended."""
        if not self._seen or self._seen[-1].index < last:
            return False
        self._messages.say_result(self._measure())
        return True

    def _conclude(self) -> bool:
        late = self._give_up_missing()
        result = self._messages.results(late=late)
        if result is None:
            return False
        if late:
            result = result.with_(self._measure())
        if self._leader is None:
            self._next()
            return True
        assert self._note is not None
        block = self._block() or [self._seen[-1]]
        note = self._leader.conclude(
            result,
            number=self._messages.number,
            iterations=self._note.iterations,
            device_begin_s=block[0].end_s - block[0].duration_s,
            device_end_s=block[-1].end_s,
            rehearsed=self.rehearsed,
        )
        if self._pauses_left_s is not None:
            left_s = self._pauses_left_s(self._seen[-1].end_s, result.lost)
            note = msgspec.structs.replace(note, pause_s=left_s)
        self.blocks += 1
        self._next()
        self._messages.post_order(note)
        return True

    def _block(self) -> list[Iteration]:
        """The iterations of the present block, less those that were not timed."""
        assert self._begin is not None
        assert self._note is not None
        end = self._begin + self._note.iterations
        return [i for i in self._seen if self._begin <= i.index < end]

    def _measure(self) -> RankResult:
        block = self._block() or [self._seen[-1]]
        times = [i.duration_s for i in block]
        usual_s = usual_time(times)
        power_w = self._actuator.mean_power_w(block[0].end_s - times[0], block[-1].end_s)
        return RankResult(
            iteration_s=usual_s,
            energy_j=None if power_w is None else power_w * usual_s,
            why_not=STALLED if stalled(times) else self._paused(block),
            refused=self._refused_by(),
            lost={} if self._pauses is None else self._pauses.take_lost(),
        )

    def _paused(self, block: Sequence[Iteration]) -> str | None:
        """Whether the return from a pause has slowed a part of the block. Iterations most of which
        hold a pause are like that under any setting."""
        pauses = self._pauses
        if pauses is None:
            return None
        slowed = sum(pauses.touched(i.end_s - i.duration_s, i.end_s) for i in block)
        return PAUSED if 0 < 2 * slowed <= len(block) else None

    def _refused_by(self) -> str | None:
        """Why this rank sets nothing, with its name where there are several."""
        if self.refused is None or self._world_size == 1 or self._names_a_rank:
            return self.refused
        return f"rank {self._rank}: {self.refused}"

    def _next(self) -> None:
        """Forget the block and its iterations: the next one begins later on all ranks."""
        self._messages.next_block(leads=self._leader is not None)
        self._note = self._begin = None
        self._ready = False
        last = self._seen[-1]
        self._seen.clear()
        self._seen.append(last)


class GovernorProgram:
    """What rank 0's conductor is told to do: warm up, look at the device, then govern.

    `choice` is what stands at any moment; `roles` tells the role groups, and is asked once every
    rank has run a block. `warm_blocks` come before the first probe (default: `WARM_BLOCKS`).
    `known` is what an earlier run of this job has chosen; `predictor` orders the first probes of a
    search, and `trace` is asked for the iteration that it is to order them for. `book` holds what
    was compared.
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
        warm_blocks: int | None = None,
        known: KnownSetting | None = None,
        predictor: Predictor | None = None,
        trace: Callable[[], IterationTrace | None] = lambda: None,
    ) -> None:
        self._trace = trace
        self._warm_blocks = WARM_BLOCKS if warm_blocks is None else warm_blocks
        self._goal = goal
        self._found = found
        self._supported = supported
        self._actuator = actuator
        self._seed = seed
        self._roles = roles
        self._known = known
        self._predictor = predictor
        self._governor: Governor | RecurringGovernor | RoleGovernor | None = None
        self._refused: str | None = None
        self.book = PairBook()
        self.space: Space | None = None
        """It is None until the device has told it."""

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
            yield from self.book.note(self._govern())
        except DeviceError as error:
            self._refused = str(error)
            yield from watching(self._found, self.choice.reason)

    def _govern(self) -> Generator[Order, BlockOutcome, None]:
        for _ in range(self._warm_blocks):
            yield Order(
                phase=Phase.WARM,
                setting=self._found,
                baseline=True,
                pair=None,
                reason="learning the rhythm",
            )
        settings = self.space = space(self._found, self._actuator.sustained(), self._supported)
        self.book.trace, self.book.readings = self._trace(), self._actuator.recent()
        roles = self._roles()
        if 1 < len(roles) <= MOST_ROLES:
            self._governor = RoleGovernor(roles, settings, self._goal, seed=self._seed)
        elif self._known is not None:
            self._governor = RecurringGovernor(settings, self._goal, self._known, seed=self._seed)
        else:
            expected = None
            if self._predictor is not None:
                features = self.book.features
                expected = self._predictor.expected(
                    settings.candidates, settings.reference, features
                )
            job = job_by_readings(self.book.readings)
            self._governor = Governor(
                settings,
                self._goal,
                seed=self._seed,
                expected=expected,
                first=first_settings(job, settings),
            )
        yield from self._governor.run()


WARM_BLOCKS = 3
"""So many blocks run before the first probe, to know the length of an iteration and the sustained
clock."""


def watching(
    found: Setting, reason: str = "the default stands"
) -> Generator[Order, BlockOutcome, None]:
    """Baseline blocks for ever: what is measured when nothing may be set."""
    while True:
        yield Order(phase=Phase.HOLD, setting=found, baseline=True, pair=None, reason=reason)
