"""A plan made ready to run: for each event what is expected, and which moves are due.

With this list an ordinary event under a plan costs the host one look-up.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kilter.memory.engine.aliases import view_of
from kilter.memory.engine.pass_record import (
    FOREIGN,
    PassRecord,
    SavedSegment,
    is_use,
    use_code,
)
from kilter.memory.engine.position import StepKind
from kilter.memory.engine.resolved import ResolvedRecipes
from kilter.memory.engine.waits import Waits
from kilter.memory.plan.choose import MemoryPlan
from kilter.memory.plan.problem import Problem


class Due(NamedTuple):
    """What an event starts: numbers of tensors, in the order that the plan counts on. To be evicted
    may also be all that a call has saved (`in_place_of`)."""

    offload: tuple[int, ...]
    evict: tuple[int, ...]
    prefetch: tuple[int, ...]


NOTHING_DUE = Due((), (), ())


def in_place_of(first: int) -> int:
    """In the place of the numbers of all tensors that a call has saved; `first` is the first event
    inside."""
    return -1 - first


class ReadyStep(NamedTuple):
    """One event of the pass."""

    expected: int | None
    """It is the storage's size where something is saved, and its `use_code` where it is used."""
    number: int = -1
    due: Due | None = None
    followed: bool = False
    """It is offloaded or recomputed, or another one is recomputed from it. All others are left to
    autograd."""
    read: bool = False
    """Another tensor is recomputed from it."""
    recomputed: bool = False
    """It is recomputed itself."""
    called: bool = False
    """A call is recomputed that makes it."""
    version: int = 0
    """How often a tensor that is saved had been written to before, when recipes were tried."""
    varies: bool = False
    """The tensor that is saved has other sizes in other passes."""

    @property
    def kind(self) -> StepKind:
        if not self.followed:
            return StepKind.KEPT
        return StepKind.RECOMPUTED if self.recomputed else StepKind.TAKEN


def packed_steps(steps: Sequence[ReadyStep]) -> tuple[bytes, bytes]:
    """What the compiled library needs of these events, as `moves.h` reads it, and the numbers of
    the tensors that are due at them."""
    packed, due = [], list[int]()
    for step in steps:
        numbers = use_code(step.number), step.kind, step.called, step.read, step.version
        moves = step.due or NOTHING_DUE
        packed.append(struct.pack("=10q", step.expected, *numbers, len(due), *map(len, moves)))
        for several in moves:
            due += several
    return b"".join(packed), struct.pack(f"={len(due)}q", *due)


@dataclass(slots=True)
class PlanInUse:
    """What passes under a plan have shown."""

    tuned: int = 0
    """The peak of so many was measured."""
    peak_bytes: int = 0
    """It is the largest of them."""
    waits: list[Waits] = field(default_factory=list)
    """They are those of passes in which waiting for copies was timed."""
    quiet: int = 0
    """Waiting is not timed in so many coming passes."""


@dataclass(slots=True)
class Ready:
    """One kind of pass under its plan."""

    value: MemoryPlan
    problem: Problem
    numbers: tuple[int, ...]
    """The tensor with this number is behind each interval that was planned."""
    events: tuple[int, ...]
    modules: tuple[str, ...]
    """Each tensor was saved, or is used, that was saved in the call of the module with this path,
    when the pass was watched."""
    steps: list[ReadyStep]
    """There is one for each event, and one after the last that matches no event."""
    packed_steps: tuple[bytes, bytes]
    """What the compiled library needs of them."""
    places: dict[int, tuple[int, int]]
    """Each tensor, by number, has its offset and so much room in the arena."""
    beside_bytes: list[int]
    """What is held at each event by tensors that are not followed."""
    hosts: dict[int, torch.Tensor] = field(default_factory=dict)
    """It holds the host memory at these places, in the shape of the tensor once it is known."""
    recipes: ResolvedRecipes = field(default_factory=ResolvedRecipes)
    segments: dict[int, SavedSegment] = field(default_factory=dict)
    """It holds the calls of modules that are recomputed, by the first event inside."""
    last_save: int = 0
    """The number of the last event at which a tensor is saved."""
    use: PlanInUse = field(default_factory=PlanInUse)
    """Passes of other sizes, which the same plan serves, have this in common."""
    others: dict[int, Ready] = field(default_factory=dict)
    """It serves these too, by their first event."""

    @property
    def ends_in_use(self) -> bool:
        """Backward uses a tensor last. In a pass without a backward one is saved last."""
        return is_use(self.events[-1])

    def settle_in(self, arena: torch.Tensor) -> None:
        """From here on tensors are offloaded to this arena."""
        saves = zip(self.events, self.steps, strict=False)
        sizes = {step.number: code for code, step in saves if code > 0}
        self.hosts = {
            number: arena[offset : offset + sizes[number]]
            for number, (offset, _) in self.places.items()
        }
        for other in self.others.values():
            other.settle_in(arena)

    def fit(self, number: int, size_bytes: int) -> bool:
        """Have the tensor with this number offloaded in this size from here on. `False` if there is
        no room for it in the arena."""
        host = self.hosts.get(number)
        if host is None:
            return True
        begin, room_bytes = host.storage_offset() * host.itemsize, self.places[number][1]
        if size_bytes <= room_bytes:
            self.hosts[number] = view_of(host, torch.uint8, (size_bytes,), (1,), begin)
        return size_bytes <= room_bytes


def ready(
    record: PassRecord,
    problem: Problem,
    numbers: tuple[int, ...],
    value: MemoryPlan,
    places: dict[int, tuple[int, int]],
    *,
    retained: bool = False,
    segments: Sequence[SavedSegment] = (),
) -> Ready:
    """`numbers` are the tensors behind the problem's intervals, those of `segments` among them by
    the first of their tensors. `retained`: passes that begin like this one may retain their graph;
    so all tensors are followed, and can be offloaded."""
    count = len(record.events)
    offload: list[list[int]] = [[] for _ in range(count + 1)]
    evict: list[list[int]] = [[] for _ in range(count + 1)]
    prefetch: list[list[int]] = [[] for _ in range(count + 1)]
    deadlines = problem.deadlines(frozenset(value.schedule.recomputed))
    for move in value.schedule.moves:
        number = numbers[move.interval]
        offload[problem.intervals[move.interval].after + 1].append(number)
        evict[move.release].append(number)
    for move in sorted(value.schedule.moves, key=lambda m: (deadlines[m.interval], m.interval)):
        prefetch[move.load].append(numbers[move.interval])
    by_first = {record.members(segment)[:1]: segment for segment in segments}
    called: list[SavedSegment] = []
    alone: list[int] = []
    for index in value.schedule.recomputed:
        interval, number = problem.intervals[index], numbers[index]
        segment = by_first[number,] if interval.together else None
        if segment is None:
            alone.append(number)
            evict[interval.after + 1].append(number)
        else:
            called.append(record.prepared(segment))
            evict[interval.after + 1].append(in_place_of(segment.first))
    recomputed = frozenset(alone)
    moved = frozenset(numbers[move.interval] for move in value.schedule.moves)
    read = frozenset(source for number in recomputed for source in record.data[number].sources)
    read = read.union(*(segment.sources for segment in called))
    members = frozenset[int]().union(*(segment.members for segment in called))
    followed = recomputed | moved | read | members
    if retained:
        followed = frozenset(range(len(record.data)))

    steps: list[ReadyStep] = []
    modules: list[str] = []
    for event, (code, number) in enumerate(zip(record.events, record.numbers(), strict=True)):
        # The last one first: who has waited for its copy has waited for all copies before it.
        due = Due(tuple(offload[event]), tuple(reversed(evict[event])), tuple(prefetch[event]))
        used = code in (FOREIGN, use_code(number))
        expected = code if used else record.data[number].size_bytes
        roles = (number in followed, number in read, number in recomputed, number in members)
        version = 0 if used else record.data[number].version
        varies = not used and record.data[number].most_bytes > 0
        step = ReadyStep(expected, number, due if any(due) else None, *roles, version, varies)
        steps.append(step)
        modules.append(record.data[number].module if number >= 0 else "")
    change = [0] * (count + 1)
    for number, datum in enumerate(record.data):
        if number not in followed:
            change[datum.packed_at] += datum.size_bytes
            change[count if datum.needed_at is None else datum.needed_at + 1] -= datum.size_bytes
    beside, running = [], 0
    for difference in change[:count]:
        running += difference
        beside.append(running)
    return Ready(
        value=value,
        problem=problem,
        numbers=numbers,
        events=record.events,
        modules=tuple(modules),
        steps=[*steps, ReadyStep(None)],
        packed_steps=packed_steps(steps),
        places=places,
        beside_bytes=beside,
        segments={segment.first: segment for segment in called},
        last_save=max(event for event, code in enumerate(record.events) if not is_use(code)),
    )
