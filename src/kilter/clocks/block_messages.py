"""What the ranks tell each other about one block of iterations.

Rank 0 posts the order; every rank says from which iteration on it may begin; rank 0 posts the
largest of these; every rank says what it saw.

What all ranks say is gathered in a tree: a rank adds what the at most `FAN_OUT` ranks below it have
gathered to its own, and posts the sum for the one above. So no rank reads more than `FAN_OUT` notes
of a kind, however many ranks there are, and a note takes as many steps to rank 0 as the logarithm
of their number. Up to `FAN_OUT` + 1 ranks all report to rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

import msgspec

from kilter.core.messages import RankMessages
from kilter.core.setting import Setting

FAN_OUT = 32
"""So many ranks report to the same one."""


def below(rank: int, world_size: int) -> range:
    """The ranks that report to this one."""
    first = rank * FAN_OUT + 1
    return range(first, max(first, min(first + FAN_OUT, world_size)))


def height(rank: int, world_size: int) -> int:
    """How many steps a note takes to this rank, at most."""
    steps, first = 0, rank
    while (first := first * FAN_OUT + 1) < world_size:
        steps += 1
    return steps


class OrderNote(msgspec.Struct, frozen=True):
    """An order as the ranks see it."""

    setting: Setting
    """It has only the knobs that are not as found: ranks may have found different limits."""
    roles: dict[str, Setting]
    """It says the same by role group; if not empty, a group that is not named is to be as found."""
    iterations: int
    pause_s: float = 0.0
    """How much the returns from pauses may lose until the next order (`clocks/pausing`)."""

    def of(self, role: str) -> Setting:
        return self.roles.get(role, Setting()) if self.roles else self.setting


class ReadyNote(msgspec.Struct, frozen=True):
    """From which iteration on the setting acts on some ranks, and their role groups."""

    index: int
    roles: dict[str, int]
    """The first rank of each group is in it."""

    def with_(self, other: ReadyNote, /) -> ReadyNote:
        roles = dict(self.roles)
        for role, rank in other.roles.items():
            roles[role] = min(rank, roles.get(role, rank))
        return ReadyNote(index=max(self.index, other.index), roles=roles)


class RankResult(msgspec.Struct, frozen=True):
    """What one rank, or some ranks together, saw of a block."""

    iteration_s: float
    """The slowest rank took this."""
    energy_j: float | None
    """All ranks used this together; None where one cannot tell."""
    why_not: str | None
    """Why the block should be done again."""
    refused: str | None
    """Why a rank sets nothing any more, and which one if there are several."""
    lost: dict[int, float] = {}
    """Iterations have lost so many seconds by returns from pauses since the last block: by number,
    as the slowest rank has."""

    def with_(self, other: RankResult, /) -> RankResult:
        known = self.energy_j is not None and other.energy_j is not None
        lost = dict(self.lost)
        for index, seconds in other.lost.items():
            lost[index] = max(seconds, lost.get(index, 0.0))
        return RankResult(
            iteration_s=max(self.iteration_s, other.iteration_s),
            energy_j=(self.energy_j or 0.0) + (other.energy_j or 0.0) if known else None,
            why_not=self.why_not or other.why_not,
            refused=self.refused or other.refused,
            lost=lost,
        )


class _Note(Protocol):
    def with_(self, other: Self, /) -> Self: ...


N = TypeVar("N", bound=_Note)


class _Gathering(Generic[N]):
    """The notes of this rank and of all below it, as they come in."""

    def __init__(
        self,
        note_of: Callable[[int], N | None],
        own: N,
        waits_for: list[int],
        post: Callable[[N], None],
    ) -> None:
        self._note_of = note_of
        self._sum = own
        self.missing = waits_for
        self._post: Callable[[N], None] | None = post

    def sum(self, *, late: bool) -> N | None:
        """Of all, once they are there, or of those that are when it is too `late` for the rest."""
        while self.missing:
            note = self._note_of(self.missing[0])
            if note is None and not late:
                return None
            if note is None:
                break
            self._sum = self._sum.with_(note)
            self.missing.pop(0)
        if self._post is not None:
            self._post(self._sum)
            self._post = None
        return self._sum


class BlockMessages:
    """The messages of one rank about the block of this `number`. Nothing here waits."""

    def __init__(self, messages: RankMessages, *, rank: int, world_size: int) -> None:
        self._messages = messages
        self._rank = rank
        self._below = list(below(rank, world_size))
        self.height = height(rank, world_size)
        self.height_of_all = height(0, world_size)
        self.number = 0
        self._ready: _Gathering[ReadyNote] | None = None
        self._results: _Gathering[RankResult] | None = None
        self._own_order: OrderNote | None = None
        self._own_begin: int | None = None
        """What this rank itself has posted."""

    def post_order(self, note: OrderNote) -> None:
        self._own_order = note
        self._messages.post(f"order/{self.number}", msgspec.json.encode(note))

    def order(self) -> OrderNote | None:
        if self._own_order is not None:
            return self._own_order
        raw = self._messages.look(f"order/{self.number}")
        return None if raw is None else msgspec.json.decode(raw, type=OrderNote)

    def say_ready(self, index: int, role: str) -> None:
        """From this iteration on the setting acts on this rank."""
        note = ReadyNote(index=index, roles={role: self._rank})
        self._ready = self._gathering("ready", note)

    def ready(self, *, late: bool) -> ReadyNote | None:
        """The same of this rank and those below it; posted for the one above."""
        assert self._ready is not None
        return self._ready.sum(late=late)

    def post_begin(self, index: int) -> None:
        self._own_begin = index
        self._messages.post(f"begin/{self.number}", b"%d" % index)

    def begin(self) -> int | None:
        """The first iteration of the block, on all ranks."""
        if self._own_begin is not None:
            return self._own_begin
        raw = self._messages.look(f"begin/{self.number}")
        return None if raw is None else int(raw)

    def say_result(self, result: RankResult) -> None:
        self._results = self._gathering("result", result)

    @property
    def has_reported(self) -> bool:
        """This rank has said its result."""
        return self._results is not None

    def results(self, *, late: bool) -> RankResult | None:
        """Those of this rank and of all below it; posted for the one above."""
        assert self._results is not None
        return self._results.sum(late=late)

    @property
    def missing(self) -> list[int]:
        """The ranks directly below whose notes are waited for."""
        gathering = self._results or self._ready
        return [] if gathering is None else list(gathering.missing)

    def leave_out(self, ranks: list[int]) -> None:
        """Never wait for these again."""
        self._below = [rank for rank in self._below if rank not in ranks]

    def next_block(self, *, leads: bool) -> None:
        """Notes of the block before this one can go: every rank has reported on this one, so has
        read those."""
        before = self.number - 1
        if not leads:
            for name in (f"ready/{before}/{self._rank}", f"result/{before}/{self._rank}"):
                self._messages.drop(name)
        else:
            self._messages.drop(f"order/{before}")
            self._messages.drop(f"begin/{before}")
        self.number += 1
        self._ready = self._results = self._own_order = self._own_begin = None

    def _gathering(self, what: str, own: N) -> _Gathering[N]:
        number, kind = self.number, type(own)

        def look(rank: int) -> N | None:
            raw = self._messages.look(f"{what}/{number}/{rank}")
            return None if raw is None else msgspec.json.decode(raw, type=kind)

        def post(note: N) -> None:
            if self._rank != 0:
                self._messages.post(f"{what}/{number}/{self._rank}", msgspec.json.encode(note))

        return _Gathering(look, own, list(self._below), post)
