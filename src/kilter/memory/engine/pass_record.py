"""The record of one pass: which tensors autograd keeps from forward to backward, and when.

A *pass* is one forward with its backward. Its clock is the sequence of saved-tensor events: a large
tensor is packed (saved by an operation) or unpacked (needed in backward). Operation `k` is
everything from event `k` to the next one, so the two hooks see every operation, and nothing has to
be installed around the framework's own operations.

Values and arithmetic only; the hooks are in `tensor_hooks.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

from kilter.core.label import Label
from kilter.core.trace import Datum, IterationTrace, Kind, Operation
from kilter.memory.plan.problem import IdleInterval, Link, Problem, aligned
from kilter.memory.plan.state import Visits, beside

FOREIGN = 0
"""This event says that something saved in another pass is used."""


COPIED_SHARE = 1 / 8
"""What is read to recompute may be copied up to this share of the bytes that are recomputed."""
HELD_SHARE = 1 / 2
"""What the program still holds when a segment is evicted is copied, once a pass, up to this share
of what the segment makes."""


def use_code(number: int) -> int:
    """Event: tensor `number` is used. (The event of its first save is its size in bytes.)"""
    return -1 - 2 * number


def again_code(number: int) -> int:
    """Event: tensor `number` is saved once more."""
    return -2 - 2 * number


def is_use(code: int) -> bool:
    """Whether a tensor is used at an event with this code."""
    return code == FOREIGN or (code < 0 and code % 2 == 1)


@dataclass(slots=True)
class SavedTensor:
    """One storage that autograd keeps, however many views of it were saved."""

    name: str
    size_bytes: int
    packed_at: int
    """It was saved for the first time at this event."""
    free_at: int | None = None
    """At this event only autograd held it for the first time; None: the program holds it all the
    time."""
    needed_at: int | None = None
    """Backward uses it at this event for the first time; None if backward does not need it."""
    recipe: str | None = None
    """How it could be recomputed (`gelu`, `cast`, ...)."""
    sources: tuple[int, ...] = ()
    """The recipe reads the tensors with these numbers."""
    closed: tuple[int, ...] = ()
    """Only autograd may hold these of the sources when this one is evicted."""
    in_backward: bool = False
    """It may be evicted and recomputed inside backward only."""
    version: int = 0
    """How often it had been written to when it was saved."""
    recompute_s: float | None = None
    """The recipe was measured to take this, once its result was found bitwise equal."""
    module: str = ""
    """It was saved in the call of the module with this path, as `ModulePaths` has it."""
    most_bytes: int = 0
    """Passes that differ from this one in sizes alone have saved up to so much here; 0 where they
    have saved as much as this one."""


class HeldBytes(NamedTuple):
    """A storage that autograd has not saved, and that a segment holds, since it reads it."""

    size_bytes: int
    until: int
    """From this event on nobody else holds it."""
    number: int
    """Segments that read the same storage have this number in common."""


@dataclass(slots=True, kw_only=True)
class SavedSegment:
    """The call of a module that is recomputed at one time."""

    name: str
    """It is the class of the module."""
    module: Any
    """It gives the module, for the engine alone."""
    first: int
    last: int
    """`first` and `last` are the first and the last event inside."""
    members: frozenset[int]
    """The tensors with these numbers are made together."""
    sources: frozenset[int]
    """The tensors with these numbers are read for that."""
    closed: frozenset[int]
    """Only autograd may hold these of them when the members are evicted."""
    operations: tuple[str, ...]
    """Operations of these names have to run, in order."""
    held: tuple[HeldBytes, ...]
    """It reads these, which only this segment holds once the program has let go of them."""
    copied_bytes: int
    """It keeps copies of so much that is small, and not saved by the engine; a part at most so
    much."""
    extra_bytes: int
    """Running it again takes at most so much memory, beside what it makes."""
    recompute_s: float
    """This was measured; all that it makes was bitwise equal then."""
    reads: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """For each member that can be made without all the others, it has the tensors that the member
    is made from then."""
    copied: frozenset[int] = frozenset()
    """Under a plan the call keeps a copy of these of the sources."""


HELD_EVENTS = 3
"""Tensors that are held for more events than this after the end of a call are no part of the
segment."""


@dataclass(slots=True)
class PassRecord:
    """Passes with the same events. Operation times are the shortest seen, levels
    the highest seen (gradients and optimizer state appear after the first pass)."""

    events: tuple[int, ...]
    """What happened: the size of a storage saved for the first time, `again_code`, `use_code`, or
    `FOREIGN`. Passes are distinguished by it."""
    names: tuple[str, ...]
    """Each operation is named by the framework's node at its event."""
    backward_from: int
    """Backward begins at this event."""
    data: tuple[SavedTensor, ...]
    operation_s: list[float]
    level_bytes: list[int]
    """Each operation has this peak with everything kept."""
    passes: int = 1
    segments: tuple[SavedSegment, ...] = ()
    """These calls of modules were tried with success."""
    begin_bytes: int = 0
    """At least so much was in use when a pass began."""
    older_bytes: int = 0
    """Saved tensors of older graphs that the engine follows had up to so many bytes then, on the
    device and on the host."""
    tried_as: tuple[int, ...] = ()
    """How tensors are recomputed was tried in a pass with these events, last of all."""

    @property
    def whole(self) -> bool:
        """Each tensor that was saved is there. It is not where an exception of the program's (of
        a signal handler) ended a hook between the event and its tensor."""
        return sum(code > 0 for code in self.events) == len(self.data)

    @property
    def fingerprint(self) -> str:
        """Of the events, by which another run recognises passes of this kind."""
        return hashlib.sha256(repr(self.events).encode()).hexdigest()[:16]

    @property
    def saved_bytes(self) -> int:
        """What autograd keeps in such a pass."""
        return sum(datum.size_bytes for datum in self.data)

    @property
    def varies(self) -> bool:
        """Passes were seen that differ from this one in sizes alone."""
        return any(datum.most_bytes for datum in self.data)

    @property
    def peak_bytes(self) -> int:
        return max(self.level_bytes)

    @property
    def peak_at(self) -> int:
        """The first event with that peak."""
        return self.level_bytes.index(self.peak_bytes) if self.level_bytes else 0

    def numbers(self) -> list[int]:
        """The tensor of each event, -1 for `FOREIGN`."""
        found, count = [], 0
        for code in self.events:
            if code > 0:
                found.append(count)
                count += 1
            else:
                found.append(-1 if code == FOREIGN else (-code - 1) // 2)
        return found

    def merge(self, other: PassRecord) -> None:
        """Take over what another pass has seen that differs in sizes alone, or not at all."""
        self.passes += other.passes
        self.begin_bytes = min(self.begin_bytes, other.begin_bytes)
        self.older_bytes = max(self.older_bytes, other.older_bytes)
        times = zip(self.operation_s, other.operation_s, strict=True)
        self.operation_s = [min(pair) for pair in times]
        levels = zip(self.level_bytes, other.level_bytes, strict=True)
        self.level_bytes = [max(pair) for pair in levels]
        for mine, theirs in zip(self.data, other.data, strict=True):
            most_bytes = max(mine.most_bytes, theirs.most_bytes)
            if most_bytes or mine.size_bytes != theirs.size_bytes:
                mine.most_bytes = max(most_bytes, mine.size_bytes, theirs.size_bytes)
            for moment in ("free_at", "needed_at"):
                seen = (getattr(mine, moment), getattr(theirs, moment))
                known = [event for event in seen if event is not None]
                latest = moment == "free_at"
                both = len(known) == 2 or not latest
                setattr(mine, moment, (max if latest else min)(known) if known and both else None)

    def learn(self, tried: PassRecord) -> bool:
        """Take over what a trial has found out about recomputing tensors. Whether that is enough:
        where the pass that was tried had other sizes, one of again other sizes has to show the
        same."""
        tried_as = tried.tried_as or tried.events
        of_this = tried_as == self.events
        again = self.tried_as not in ((), tried_as)
        for mine, theirs in zip(self.data, tried.data, strict=True):
            refuted = again and mine.recompute_s is None
            mine.recipe, mine.sources = theirs.recipe, theirs.sources
            mine.recompute_s = None if refuted else theirs.recompute_s
            mine.version = theirs.version
            mine.closed, mine.in_backward = theirs.closed, theirs.in_backward
        self.segments = tried.segments if of_this else ()
        self.tried_as = tried_as
        return of_this or again

    def absence(
        self, datum: SavedTensor, peak_at: int, *, offload: bool = True, recompute: bool = True
    ) -> tuple[int, int, float | None] | None:
        """The last event before the tensor may be evicted, the event that needs it, and the time to
        recompute it; None if it is held too long. Before it may be recomputed its sources must be
        free as well; where that is not before the peak of the pass, at the event `peak_at`, it is
        better offloaded."""
        if datum.free_at is None or datum.needed_at is None:
            return None
        before = datum.needed_at
        after = latest = max(datum.free_at - 1, datum.packed_at)
        if datum.recompute_s is None or not recompute:
            return after, before, None
        if datum.in_backward:
            latest = max(latest, self.backward_from - 1)
        for source in datum.closed:
            free_at = self.data[source].free_at
            latest = max(latest, before if free_at is None else free_at - 1)
        if before - latest < 2 or (offload and after < peak_at - 1 <= latest):
            return after, before, None
        return latest, before, datum.recompute_s

    def problem(
        self,
        *,
        link: Link,
        budget_bytes: int,
        min_bytes: int,
        host_room_bytes: int | None = None,
        recompute: bool = True,
        segments: Sequence[SavedSegment] = (),
        state: Visits | None = None,
    ) -> tuple[Problem, tuple[int, ...]]:
        """What the planners need, and for each interval the number of its tensor; behind them
        intervals of optimizer state that streams.

        Where host memory is limited to `host_room_bytes`, the tensors for which that is worth most
        may be offloaded, and the others are recomputed or stay. With `recompute` false nothing is
        recomputed. Each of the `segments` is one interval in the place of its tensors, with the
        number of the first of them.
        """
        to_host = None if host_room_bytes is None else self._worth_offloading(host_room_bytes)
        found, levels = self._intervals(segments, min_bytes, to_host, recompute=recompute)
        problem = Problem(
            operation_s=tuple(self.operation_s),
            resident_bytes=tuple(levels),
            intervals=tuple(found.intervals),
            link=link,
            budget_bytes=budget_bytes,
        )
        return beside(problem, state, seen=True), tuple(found.numbers)

    def _intervals(
        self,
        segments: Sequence[SavedSegment],
        min_bytes: int,
        to_host: frozenset[int] | None = None,
        *,
        recompute: bool = True,
    ) -> tuple[_Intervals, list[int]]:
        """The intervals with these segments, and the levels with what they take beside them."""
        found = _Intervals(self, min_bytes, to_host, recompute=recompute)
        levels = list(self.level_bytes)
        prepared = [self.prepared(segment) for segment in segments]
        sources = _SegmentSources(self, prepared)
        for segment in prepared:
            own_bytes = segment.copied_bytes + sources.own_bytes(segment)
            interval = found.put_together(segment, own_bytes)
            if interval is not None:
                levels[interval.before] += segment.extra_bytes + own_bytes
                sources.are_needed(segment, interval)
        for event, size_bytes in sources.shared_bytes():
            levels[event] += size_bytes
        for number in range(len(self.data)):
            found.put(number)
        return found, levels

    def members(self, segment: SavedSegment) -> tuple[int, ...]:
        """The tensors that are evicted and recomputed together. Those that the program holds for
        longer, or backward does not need, are left out."""
        return tuple(
            number
            for number in sorted(segment.members)
            if self._freed_by(segment, number) and self.data[number].needed_at is not None
        )

    def part(self, segment: SavedSegment, chosen: Set[int]) -> SavedSegment:
        """The same call, of which only the chosen tensors are recomputed: what it ran made the same
        bits, and now less of it runs, from more of what was saved."""
        members = segment.members & chosen & segment.reads.keys()
        if members == segment.members:
            return segment
        sources = frozenset[int]().union(*(segment.reads[number] for number in members)) - members
        took_s = self._took_s(segment)
        return replace(
            segment,
            members=members,
            sources=sources,
            closed=sources - (segment.sources - segment.closed),
            recompute_s=sum(took_s[number] for number in members),
        )

    def taken_apart(self, segments: Sequence[SavedSegment]) -> PassRecord:
        """As if what these calls have saved could be recomputed one by one."""
        data = list(self.data)
        for segment in segments:
            took_s = self._took_s(segment)
            casts = segment.sources - segment.closed
            for number, read in segment.reads.items():
                data[number] = replace(
                    data[number],
                    recompute_s=took_s[number],
                    sources=tuple(sorted(read)),
                    closed=tuple(sorted(read - casts)),
                    in_backward=False,
                )
        return replace(self, data=tuple(data))

    def _took_s(self, segment: SavedSegment) -> dict[int, float]:
        """What each tensor of a call takes. What is not known of single ones is the rest of the
        call, by bytes."""
        known = {
            number: recompute_s
            for number in segment.members
            if (recompute_s := self.data[number].recompute_s) is not None
        }
        unknown = segment.members - known.keys()
        rest_s = max(0.0, segment.recompute_s - sum(known.values()))
        rest_bytes = sum(self.data[number].size_bytes for number in unknown)
        return known | {n: rest_s * self.data[n].size_bytes / rest_bytes for n in unknown}

    def prepared(self, segment: SavedSegment) -> SavedSegment:
        """The same with the tensors that are evicted and recomputed together, and the sources that
        are copied: those that the program holds for longer than the call (a mask for all layers,
        say), if they are few enough bytes beside what is made. Where the copies alone are too many
        bytes, nothing is recomputed together."""
        members = frozenset(self.members(segment))
        held = frozenset(n for n in segment.closed if not self._freed_by(segment, n))
        held_bytes = sum(self.data[number].size_bytes for number in held)
        made_bytes = sum(self.data[number].size_bytes for number in members)
        room_bytes = COPIED_SHARE * made_bytes - segment.copied_bytes
        copied = held if held_bytes <= room_bytes else frozenset()
        return replace(segment, members=members if room_bytes >= 0 else frozenset(), copied=copied)

    def most_copied_bytes(self, segment: SavedSegment) -> float:
        """A storage of at most so many bytes is copied if the program still holds it."""
        return HELD_SHARE * sum(self.data[number].size_bytes for number in segment.members)

    def _freed_by(self, segment: SavedSegment, number: int) -> bool:
        """Only autograd holds this tensor soon after the call."""
        free_at = self.data[number].free_at
        return free_at is not None and free_at <= segment.last + HELD_EVENTS

    def _worth_offloading(self, room_bytes: int) -> frozenset[int]:
        """The tensors that cannot be recomputed, those with the longest gap first, then the dearest
        to recompute: as many as there is room for."""

        def worth(number: int) -> tuple[float, int]:
            datum = self.data[number]
            price = (
                float("inf") if datum.recompute_s is None else datum.recompute_s / datum.size_bytes
            )
            return price, (datum.needed_at or 0) - datum.packed_at

        chosen = set()
        for number in sorted(range(len(self.data)), key=worth, reverse=True):
            size_bytes = aligned(self.data[number].size_bytes)
            if size_bytes <= room_bytes:
                room_bytes -= size_bytes
                chosen.add(number)
        return frozenset(chosen)

    def as_it_runs(self, problem: Problem, min_bytes: int) -> Problem:
        """The problem of this pass, or what is left of it where tensors leave on demand."""
        return self.on_demand(problem, min_bytes) or problem

    def on_demand(self, problem: Problem, min_bytes: int) -> Problem | None:
        """The problem of this pass as it is where tensors that backward does not need leave on
        demand, if that is better than a plan: no plan moves them, since it would have nothing to
        load them for. It is where no plan keeps the budget, and most of the excess is of those."""
        over_bytes = problem.floor_bytes - problem.budget_bytes
        if over_bytes <= 0:
            return None
        change = [0] * (len(self.events) + 1)
        for datum in self.data:
            unneeded = datum.free_at is not None and datum.needed_at is None
            if unneeded and datum.size_bytes >= min_bytes:
                change[max(datum.free_at or 0, datum.packed_at + 1)] -= datum.size_bytes
        levels = zip(problem.resident_bytes, accumulate(change), strict=False)
        left = replace(problem, resident_bytes=tuple(level + less for level, less in levels))
        return left if 2 * (left.floor_bytes - problem.budget_bytes) < over_bytes else None

    def trace(
        self,
        *,
        device: str,
        source: str = "",
        segments: Sequence[SavedSegment] = (),
        planned: tuple[Problem, tuple[int, ...]] | None = None,
    ) -> IterationTrace:
        """The pass as an iteration trace, for `kilter plan memory`: what `problem_of` makes of it
        is what `problem` makes of the record. Operations carry their level of memory; weights,
        gradients and workspace are in it and are not listed. What one of the `segments` makes is
        listed as one. `planned`, a problem with these segments, stays as it is: its intervals come
        first."""
        found, levels = self._intervals(segments, min_bytes=1)
        intervals = dict(zip(found.numbers, found.intervals, strict=True))
        order = [*found.numbers, *sorted({*range(len(self.data))} - found.index.keys())]
        if planned is not None:
            problem, numbers = planned
            levels = problem.resident.tolist()
            intervals |= zip(numbers, problem.intervals, strict=False)  # state comes behind
            order = list(dict.fromkeys([*numbers, *order]))
        place = {number: index for index, number in enumerate(order)}
        place |= {member: place[found.numbers[index]] for member, index in found.index.items()}
        count = len(self.operation_s)
        reads: list[list[int]] = [[] for _ in range(count)]
        writes: list[list[int]] = [[] for _ in range(count)]
        data = []
        for index, number in enumerate(order):
            one, interval = self.data[number], intervals.get(number)
            first, last = one.packed_at, count - 1
            held_until = last  # by the program: it cannot be evicted
            if interval is not None:
                held_until, last = max(first, interval.after), interval.before
            elif one.free_at is not None and one.needed_at is not None:
                held_until = last = one.needed_at
            writes[first].append(index)
            for event in {*range(first + 1, held_until + 1), last}:
                reads[event].append(index)
            data.append(
                Datum(
                    name=one.name if interval is None else interval.name,
                    kind="feature_map",
                    size_bytes=one.size_bytes if interval is None else interval.size_bytes,
                    first_use=first,
                    last_use=last,
                    recompute_s=None if interval is None else interval.recompute_s,
                    sources=tuple(dict.fromkeys(place[n] for n in found.sources(number))),
                    together=0 if interval is None else interval.together,
                )
            )
        operations, start_s = [], 0.0
        for k, duration_s in enumerate(self.operation_s):
            operations.append(
                Operation(
                    name=self.names[k],
                    kind=Kind.BACKWARD if k >= self.backward_from else Kind.FORWARD,
                    start_s=start_s,
                    duration_s=duration_s,
                    reads=tuple(reads[k]),
                    writes=tuple(writes[k]),
                    level_bytes=levels[k],
                )
            )
            start_s += duration_s
        return IterationTrace(
            iteration_s=start_s,
            operations=tuple(operations),
            data=tuple(data),
            timeline="gpu" if device != "cpu" else "host",
            device=device,
            label=Label.MEASURED,
            iterations=self.passes,
            source=source,
        )


@dataclass(slots=True)
class PassRecorder:
    """Builds the record of one pass from its events."""

    events: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    data: list[SavedTensor] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    segments: list[SavedSegment] = field(default_factory=list)
    backward_from: int | None = None
    begin_bytes: int = 0
    older_bytes: int = 0

    @property
    def event(self) -> int:
        """Index of the present event."""
        return len(self.events) - 1

    def note(self, code: int, name: str, *, backward: bool) -> int:
        """A hook event; its index."""
        self.events.append(code)
        self.names.append(name)
        if backward and self.backward_from is None:
            self.backward_from = self.event
        return self.event

    def level(self, peak_bytes: int, evicted_bytes: int) -> None:
        """The operation that now ends had this peak, while so many saved bytes were evicted."""
        self.levels.append(peak_bytes + evicted_bytes)

    def record(self, operation_s: list[float]) -> PassRecord:
        """The finished pass. The last operation has no end of its own: it takes no time."""
        count = len(self.events)
        last = self.levels[-1] if self.levels else 0
        return PassRecord(
            events=tuple(self.events),
            names=tuple(self.names),
            backward_from=count if self.backward_from is None else self.backward_from,
            data=tuple(self.data),
            operation_s=(operation_s + [0.0] * count)[:count],
            level_bytes=(self.levels + [last] * count)[:count],
            segments=tuple(self.segments),
            begin_bytes=self.begin_bytes,
            older_bytes=self.older_bytes,
        )


_Source: TypeAlias = tuple[Literal["held", "copy", "copy of saved"], int]
"""What a segment holds in order to be run again, and its number: a storage that autograd has not
saved, a copy of one, or a copy of a saved tensor."""


class _SegmentSources:
    """The storages that only segments hold while what they make is evicted: those that the engine
    has not saved, and copies. What several segments read is there once."""

    def __init__(self, record: PassRecord, segments: Sequence[SavedSegment]) -> None:
        self._record = record
        readers = Counter(key for segment in segments for key in self._sizes(segment))
        self._shared = {key for key, count in readers.items() if count > 1}
        self._needed: dict[_Source, tuple[int, int, int]] = {}
        """A shared source takes so many bytes, after this event, up to that one."""

    def own_bytes(self, segment: SavedSegment) -> int:
        """What this segment holds and no other one."""
        sizes = self._sizes(segment)
        return sum(size_bytes for key, size_bytes in sizes.items() if key not in self._shared)

    def are_needed(self, segment: SavedSegment, interval: IdleInterval) -> None:
        """A plan may recompute this segment, which reads its sources then."""
        for key, size_bytes in self._sizes(segment).items():
            if key in self._shared:
                _, after, before = self._needed.get(key, (0, interval.after, interval.before))
                after, before = min(after, interval.after), max(before, interval.before)
                self._needed[key] = size_bytes, after, before

    def shared_bytes(self) -> Iterator[tuple[int, int]]:
        """At each event the bytes of a shared source that is there for segments alone."""
        for size_bytes, after, before in self._needed.values():
            yield from ((event, size_bytes) for event in range(after + 1, before + 1))

    def _sizes(self, segment: SavedSegment) -> dict[_Source, int]:
        record, limit_bytes = self._record, self._record.most_copied_bytes(segment)
        sizes: dict[_Source, int] = {
            ("held" if held.size_bytes > limit_bytes else "copy", held.number): held.size_bytes
            for held in segment.held
        }
        return sizes | {("copy of saved", n): record.data[n].size_bytes for n in segment.copied}


class _Intervals:
    """The intervals of a pass. Each stands behind those that it needs."""

    def __init__(
        self,
        record: PassRecord,
        min_bytes: int,
        to_host: frozenset[int] | None,
        *,
        recompute: bool,
    ) -> None:
        self._record = record
        self._min_bytes = min_bytes
        self._to_host = to_host
        self._recompute = recompute
        self._peak_at = record.peak_at
        self._together: dict[int, tuple[SavedSegment, IdleInterval]] = {}
        """The segment makes the tensor of this number."""
        self._read: set[int] = set()
        """A segment reads these tensors of its own call, but for casts of weights. Their recipes
        may read what the segment makes."""
        self.index: dict[int, int] = {}
        """The tensor of this number has that interval."""
        self.intervals: list[IdleInterval] = []
        self.numbers: list[int] = []
        """Each interval has its tensor here, or the first of them."""

    def put_together(self, segment: SavedSegment, own_bytes: int) -> IdleInterval | None:
        """Have all that a segment makes be one interval, but for `own_bytes`, which it holds for
        that. None where nothing would be gained: its tensors stay on their own."""
        record = self._record
        members = sorted(segment.members)
        data = [record.data[number] for number in members]
        limit_bytes = record.most_copied_bytes(segment)
        waits_for = [held.until for held in segment.held if held.size_bytes > limit_bytes]
        after = max([segment.last, *waits_for, *(datum.free_at or 0 for datum in data)])
        for source in segment.closed - segment.copied:
            free_at = record.data[source].free_at
            after = max(after, len(record.events) if free_at is None else free_at)
        before = min((datum.needed_at or 0 for datum in data), default=0)
        size_bytes = sum(datum.size_bytes for datum in data) - own_bytes
        if before - after < 2 or size_bytes < self._min_bytes:
            return None
        interval = IdleInterval(
            name=f"{members[0]}: all of {segment.name}",
            size_bytes=size_bytes,
            after=after,
            before=before,
            recompute_s=segment.recompute_s,
            to_host=False,
            together=len(members),
        )
        self._together.update(dict.fromkeys(members, (segment, interval)))
        self._read.update(n for n in segment.closed if record.data[n].packed_at >= segment.first)
        return interval

    def put(self, number: int) -> None:
        """The interval of a tensor, if it has one."""
        if number in self.index:
            return
        found = self._together.get(number)
        if found is None:
            self._put_alone(number)
            return
        segment, interval = found
        sources = self.sources(number)
        for source in sources:
            self.put(source)
        members = [m for m, (of, _) in self._together.items() if of is segment]
        needs = self._needs(sources)
        self.index.update(dict.fromkeys(members, len(self.intervals)))
        self.intervals.append(replace(interval, needs=needs))
        self.numbers.append(number)

    def sources(self, number: int) -> tuple[int, ...]:
        """The tensors that this one, or the call that makes it, is recomputed from."""
        found = self._together.get(number)
        if found is None:
            return self._record.data[number].sources
        return tuple(sorted(found[0].sources - found[0].copied))

    def _put_alone(self, number: int) -> None:
        datum = self._record.data[number]
        offloads = self._to_host is None or number in self._to_host
        recompute = self._recompute and number not in self._read
        absence = self._record.absence(datum, self._peak_at, offload=offloads, recompute=recompute)
        if absence is None or datum.size_bytes < self._min_bytes:
            return
        after, before, recompute_s = absence
        if before - after < 2 or not (offloads or recompute_s is not None):
            return
        interval = IdleInterval(
            name=datum.name,
            size_bytes=datum.size_bytes,
            after=after,
            before=before,
            recompute_s=recompute_s,
            needs=self._needs(datum.sources),
            to_host=offloads,
        )
        self.index[number] = len(self.intervals)
        self.intervals.append(interval)
        self.numbers.append(number)

    def _needs(self, sources: tuple[int, ...]) -> tuple[int, ...]:
        """The intervals of these tensors, each once."""
        return tuple(dict.fromkeys(self.index[s] for s in sources if s in self.index))
