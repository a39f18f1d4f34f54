"""Optimizer state that streams through the device, in the one problem of memory and link.

The optimizer's work is cut into *buckets*: parameters whose gradients arrive one after the other in
backward. When the last gradient of a bucket has arrived, the bucket is *visited*: its state is
waited for, its parameters are updated, and the copy of its state to the host starts. The state of a
bucket that is not streamed stays on the device; that of one that streams is an interval which wraps
around the iteration.

State that is offloaded while memory peaks leaves room for activations, which then need not be
recomputed; its copies share the link with theirs, in backward. Which buckets stream is searched,
with as little memory reserved for them in flight as pays; the planner of activations plans both,
and the simulator decides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from kilter.core.errors import BudgetTooSmall, PlanError
from kilter.memory.plan.mix import mix, roughly
from kilter.memory.plan.problem import IdleInterval, Link, Problem
from kilter.memory.plan.simulate import Move, SimulatedPass, simulate

VISITS = 48
"""An iteration has so many buckets: each costs the host one call of the optimizer, and the device
one bucket of gradients."""
STEP_VISITS = 192
"""Where gradients are kept it has so many: only what streams costs a call, and less of it streams,
since less memory is kept for the buckets in flight."""
STATE_PARTS = 64
COARSE_PARTS = 8
"""The state is divided into so many parts. Multiples of `COARSE_PARTS` are tried, and then fewer
more or less of them than the best has."""
ALIKE = 0.003
"""More state streams only if that saves this share of the iteration: about what the rough plans
behind the comparison are worth."""
STREAMING_WORTH = 0.01
"""Streaming has to save this share of the iteration."""
RESERVES = (0, 1, 2, 3)
"""These are tried for the memory that is kept for buckets in flight."""
ENDS = ((0, 0), (1, 0), (0, 1), (2, 2))
"""So many buckets at either end are tried as not streamed."""
EVEN = 2.0
"""Buckets of more than so many times the mean, such as an embedding's, stream only if there is no
plan without: memory for one in flight is memory for several others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The update of one parameter, in the order in which gradients arrive."""

    gradient_bytes: int
    state_bytes: int
    arrives_s: float = 0.0
    """When the gradient is there, from the first one's arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive updates that are done together."""

    first: int
    """It is the index of the first update."""
    count: int
    gradient_bytes: int
    state_bytes: int
    due_s: float
    """When its last gradient is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """Which buckets stream, and what is issued when. Predicted numbers, SI units."""

    streamed: frozenset[int]
    begin: tuple[int, ...]
    """These buckets are loaded when the first gradient is there, in this order."""
    release: tuple[tuple[int, ...], ...]
    """After each visit the memory of these buckets is freed, before the loads of that visit."""
    load: tuple[tuple[int, ...], ...]
    """After each visit the loads of these buckets start."""
    resident_bytes: int
    """So much state is on the device while no bucket is being copied: during forward."""
    peak_bytes: int
    """It is the most state on the device at one time."""
    moved_bytes: int
    """So much moves each way, in each iteration."""
    iteration_s: float
    """Simulated: forward and backward take this, with all waiting."""
    stall_s: float
    """Simulated wait of the computation for copies."""

    def suits(self, buckets: Sequence[Bucket]) -> bool:
        """It was made for so many buckets with so much state."""
        total_bytes = self.resident_bytes + self.moved_bytes
        return (len(self.load), total_bytes) == (len(buckets), sum(b.state_bytes for b in buckets))


class Visits(NamedTuple):
    """Buckets of state in the order of their visits."""

    buckets: Sequence[Bucket]
    at: Sequence[int]
    """Their last gradients arrive in these operations of the pass."""
    plan: StatePlan | None
    """They stream by it now."""


def in_buckets(
    updates: Sequence[Update], size_bytes: int | None = None, *, visits: int = VISITS
) -> tuple[Bucket, ...]:
    """Cut where the gradients of a bucket reach `size_bytes` (by default a share of `1/visits`)."""
    if size_bytes is None:
        size_bytes = max(1, sum(u.gradient_bytes for u in updates) // visits)
    found: list[Bucket] = []
    first = 0
    for last, _ in enumerate(updates):
        members = updates[first : last + 1]
        gradient_bytes = sum(u.gradient_bytes for u in members)
        if gradient_bytes < size_bytes and last + 1 < len(updates):
            continue
        found.append(
            Bucket(
                first=first,
                count=len(members),
                gradient_bytes=gradient_bytes,
                state_bytes=sum(u.state_bytes for u in members),
                due_s=max(u.arrives_s for u in members),
            )
        )
        first = last + 1
    return tuple(found)


def plan_state(buckets: Sequence[Bucket], *, room_bytes: int, link: Link) -> StatePlan:
    """At most `room_bytes` of state on the device at any time, and as little waiting as was found,
    where nothing else moves. `PlanError` if not even one bucket at a time fits.

    Each visit is two operations here: the time until its gradients are there, and the visit.
    """
    due_s = [0.0, *(b.due_s for b in buckets)]
    steps_s = [step for a, b in pairwise(due_s) for step in (max(0.0, b - a), 0.0)]
    count, total_bytes = len(buckets), sum(b.state_bytes for b in buckets)
    at = range(1, 2 * count, 2)
    problem = Problem(tuple(steps_s), (total_bytes,) * 2 * count, (), link, room_bytes)
    return stream(replace(problem, visits=tuple(range(0, 2 * count + 1, 2))), buckets, at)


def plan_step(
    buckets: Sequence[Bucket],
    updates_s: Sequence[float],
    *,
    room_bytes: int,
    step_room_bytes: int,
    link: Link,
) -> StatePlan:
    """At most `room_bytes` of state on the device between the optimizer's steps, and
    `step_room_bytes` in a step, which updates one bucket after the other, each in so much time.
    `PlanError` if not even one bucket at a time fits.

    What is between two steps is one operation here, in which no state moves; the others are the
    updates.
    """
    total_bytes, count = sum(b.state_bytes for b in buckets), len(buckets)
    levels = (total_bytes + step_room_bytes - room_bytes, *[total_bytes] * count)
    problem = Problem((0.0, *updates_s), levels, (), link, step_room_bytes)
    return stream(replace(problem, visits=tuple(range(1, count + 2))), buckets, range(1, count + 1))


def stream(problem: Problem, buckets: Sequence[Bucket], at: Sequence[int]) -> StatePlan:
    """The state that streams, so that the iteration takes least time; none, if that is fast enough
    (`STREAMING_WORTH`).

    `problem` has all state on the device; `at` are the operations in which the buckets' last
    gradients arrive. `PlanError` if no choice of buckets is enough for the budget.
    """
    if not problem.visits:
        problem = replace(problem, visits=_visits(at))
    return _Search(problem, buckets, at).best()


class _Choice(NamedTuple):
    """What streams: so many parts of the state."""

    parts: int = 0
    head: int = 1
    """So many buckets at the front stay: no computation hides their loads."""
    tail: int = 1
    """So many at the back stay: no computation hides their copies to the host."""
    ahead: int = 1
    """There is memory for a bucket from so many visits on before the last moment, or earlier."""


class _Search:
    """Choices are planned roughly and compared; the best is planned thoroughly."""

    def __init__(self, problem: Problem, buckets: Sequence[Bucket], at: Sequence[int]) -> None:
        self._problem, self._buckets, self._at = problem, buckets, at
        self._total_bytes = sum(b.state_bytes for b in buckets)
        self._holders = [i for i, b in enumerate(buckets) if b.state_bytes]
        even_bytes = EVEN * self._total_bytes / max(1, len(self._holders))
        self._pool = [i for i in self._holders if buckets[i].state_bytes <= even_bytes]
        """These may stream; all, where there is no plan for that."""
        self._tried: set[tuple[tuple[int, ...], int]] = set()
        self._best, self._best_s = _Choice(), inf

    def best(self) -> StatePlan:
        self._coarse()
        if self._best_s == inf:
            self._pool = self._holders
            self._coarse()
        if self._best_s == inf:
            raise BudgetTooSmall(
                f"the budget of {self._problem.budget_bytes} bytes is out of reach even with "
                "optimizer state on the host"
            )
        self._beside(COARSE_PARTS // 2)
        choice = self._best if self._best.parts else _Choice(COARSE_PARTS)
        for ahead in RESERVES:
            self._consider(choice._replace(ahead=ahead))
        choice = self._best if self._best.parts else choice
        quarter = len(self._buckets) // 4
        for head, tail in (*ENDS, (quarter, 1), (2 * quarter, 1)):
            self._consider(choice._replace(head=head, tail=tail))
        for parts in (COARSE_PARTS // 4, COARSE_PARTS // 8):
            self._beside(parts)
        found = self._plan(self._best)
        assert found is not None
        whole = self._plan(_Choice()) if self._best.parts else None
        worth_s = (1 + STREAMING_WORTH) * found.iteration_s
        return found if whole is None or worth_s < whole.iteration_s else whole

    def _coarse(self) -> None:
        """Multiples of some parts, with as much memory as possible left to what stays."""
        for parts in range(0, STATE_PARTS + 1, COARSE_PARTS):
            for ends, ahead in ((1, 1), (1, 0), (0, 1), (0, 0)):
                if self._consider(_Choice(parts, ends, ends, ahead), 1 / (1 + ALIKE)):
                    break

    def _beside(self, parts: int) -> None:
        """A little more state, or less."""
        best = self._best
        if best.parts > parts:
            self._consider(best._replace(parts=best.parts - parts), 1 + ALIKE)
            self._consider(best._replace(parts=best.parts + parts), 1 / (1 + ALIKE))

    def _consider(self, choice: _Choice, share: float = 1.0) -> bool:
        """Take this choice if it takes less than this share of the best one's time. `False` if it
        is none: it is known, does not fit, or streams less since there is less between its ends."""
        moved = self._moved(choice)
        if (moved, choice.ahead) in self._tried:
            return False
        self._tried.add((moved, choice.ahead))
        problem = self._streaming(moved, choice.ahead)
        if problem.floor_bytes > problem.budget_bytes:
            return False
        with suppress(PlanError):
            _, outcome = roughly(problem, share * self._best_s)
            if outcome.iteration_s < share * self._best_s:
                self._best, self._best_s = choice, outcome.iteration_s
        bytes_ = sum(self._buckets[i].state_bytes for i in moved)
        return bytes_ * STATE_PARTS >= self._total_bytes * choice.parts - STATE_PARTS

    def _plan(self, choice: _Choice) -> StatePlan | None:
        """Thoroughly planned; None if there is no plan."""
        moved = self._moved(choice)
        problem = self._streaming(moved, choice.ahead)
        try:
            schedule = mix(problem)
        except PlanError:
            return None
        outcome = simulate(problem, schedule)
        first = len(self._problem.intervals)
        moves = [(moved[m.interval - first], m) for m in schedule.moves if m.interval >= first]
        return self._by_visit(moves, outcome)

    def _by_visit(self, moves: Sequence[tuple[int, Move]], outcome: SimulatedPass) -> StatePlan:
        """What is done with these buckets after each visit: what the schedule begins before an
        operation is issued after the last visit before it."""
        sizes = [b.state_bytes for b in self._buckets]
        release: list[list[int]] = [[] for _ in sizes]
        load: list[list[int]] = [[] for _ in (None, *sizes)]
        for i, move in sorted(moves):
            release[bisect_left(self._at, move.release) - 1].append(i)
            load[bisect_left(self._at, move.load)].append(i)
        moved_bytes = sum(sizes[i] for i, _ in moves)
        held_bytes = self._total_bytes - moved_bytes
        peak_bytes = 0
        for released, loaded in zip([[], *release], load, strict=True):
            held_bytes += sum(sizes[i] for i in loaded) - sum(sizes[i] for i in released)
            peak_bytes = max(peak_bytes, held_bytes)
        return StatePlan(
            streamed=frozenset(i for i, _ in moves),
            begin=tuple(load[0]),
            release=tuple(map(tuple, release)),
            load=tuple(map(tuple, load[1:])),
            resident_bytes=self._total_bytes - moved_bytes,
            peak_bytes=peak_bytes,
            moved_bytes=moved_bytes,
            iteration_s=outcome.iteration_s,
            stall_s=outcome.stall_s,
        )

    def _moved(self, choice: _Choice) -> tuple[int, ...]:
        """The buckets that stream: all between the ends, if there are not enough bytes."""
        bytes_ = self._total_bytes * choice.parts // STATE_PARTS
        pool = self._pool[choice.head : len(self._pool) - choice.tail] if choice.parts else []
        return tuple(_spread(pool, self._buckets, bytes_))

    def _streaming(self, moved: Iterable[int], ahead: int) -> Problem:
        visits = self._problem.visits
        wrapping = [
            IdleInterval(
                name=f"optimizer state {i}",
                size_bytes=self._buckets[i].state_bytes,
                after=self._at[i],
                before=visits[max(0, bisect_right(visits, self._at[i]) - 1 - ahead)],
            )
            for i in moved
        ]
        return replace(self._problem, intervals=(*self._problem.intervals, *wrapping))


def _spread(pool: Sequence[int], buckets: Sequence[Bucket], offloaded_bytes: int) -> Iterator[int]:
    """Members of `pool` with at least `offloaded_bytes` in all, evenly spread."""
    pool_bytes = sum(buckets[i].state_bytes for i in pool)
    seen_bytes = taken_bytes = 0
    for i in pool:
        seen_bytes += buckets[i].state_bytes
        if (
            taken_bytes * pool_bytes < offloaded_bytes * seen_bytes
            and taken_bytes < offloaded_bytes
        ):
            taken_bytes += buckets[i].state_bytes
            yield i


def _visits(at: Sequence[int]) -> tuple[int, ...]:
    """State is moved when the first gradient is there, and after each visit."""
    return tuple(sorted({at[0], *(operation + 1 for operation in at)}))


def beside(problem: Problem, state: Visits | None, *, seen: bool = False) -> Problem:
    """`problem` with the state that streams; its levels have all state on the device, or were
    `seen` while it streamed."""
    if state is None or (plan := state.plan) is None:
        return problem
    buckets, at, _ = state
    visits = _visits(at)
    load = dict.fromkeys(plan.begin, at[0])
    load |= {i: at[visit] + 1 for visit, loaded in enumerate(plan.load) for i in loaded}
    wrapping = []
    for visit, released in enumerate(plan.release):
        for i in released:
            before = min(load[i], visits[bisect_right(visits, at[i]) - 1])
            wrapping.append(
                IdleInterval(
                    name=f"optimizer state {i}",
                    size_bytes=buckets[i].state_bytes,
                    after=at[i],
                    before=before,
                    moved=(at[visit] + 1, before),
                )
            )
    found = replace(problem, intervals=(*problem.intervals, *wrapping), visits=visits)
    if not seen:
        return found
    offloaded = found.resident_bytes - found.resident
    return replace(found, resident_bytes=tuple((found.resident_bytes + offloaded).tolist()))
