"""What the ranks tell each other about one block of iterations.

Rank 0 posts the order; every rank posts the iteration from which it may begin; rank 0 posts the
largest of these; every rank posts what it saw.
"""

from __future__ import annotations

import msgspec

from kilter.core.messages import RankMessages
from kilter.core.setting import Setting


class OrderNote(msgspec.Struct, frozen=True):
    """An order as the ranks see it."""

    setting: Setting
    """Only the knobs that are not as found: ranks may have found different limits."""
    roles: dict[str, Setting]
    """The same by role group; if not empty, a group that is not named is to be as found."""
    iterations: int

    def of(self, role: str) -> Setting:
        return self.roles.get(role, Setting()) if self.roles else self.setting


class RankResult(msgspec.Struct, frozen=True):
    """What one rank saw of a block."""

    iteration_s: float
    energy_j: float | None
    why_not: str | None
    """Why the block should be done again."""
    refused: str | None
    """Why this rank sets nothing any more."""


class BlockMessages:
    """The messages of one rank about the block of this `number`. Nothing here waits."""

    def __init__(self, messages: RankMessages, *, rank: int, world_size: int) -> None:
        self._messages = messages
        self._rank = rank
        self._world_size = world_size
        self.number = 0

    def post_role(self, role: str) -> None:
        """Once: the role group of this rank."""
        self._messages.post(f"role/{self._rank}", role.encode())

    def post_order(self, note: OrderNote) -> None:
        self._messages.post(f"order/{self.number}", msgspec.json.encode(note))

    def order(self) -> OrderNote | None:
        raw = self._messages.look(f"order/{self.number}")
        return None if raw is None else msgspec.json.decode(raw, type=OrderNote)

    def post_ready(self, index: int) -> None:
        """From this iteration on the setting acts on this rank."""
        self._messages.post(f"ready/{self.number}/{self._rank}", b"%d" % index)

    def ready(self) -> list[int] | None:
        """The same of all ranks, or None while one is missing."""
        notes = self._from_all("ready")
        return None if notes is None else [int(note) for note in notes]

    def post_begin(self, index: int) -> None:
        self._messages.post(f"begin/{self.number}", b"%d" % index)

    def begin(self) -> int | None:
        """The first iteration of the block, on all ranks."""
        raw = self._messages.look(f"begin/{self.number}")
        return None if raw is None else int(raw)

    def post_result(self, result: RankResult) -> None:
        self._messages.post(f"result/{self.number}/{self._rank}", msgspec.json.encode(result))

    def has_reported(self) -> bool:
        """This rank has posted its result."""
        return self._messages.look(f"result/{self.number}/{self._rank}") is not None

    def results(self) -> list[RankResult] | None:
        """Those of all ranks, or None while one is missing."""
        notes = self._from_all("result")
        if notes is None:
            return None
        return [msgspec.json.decode(note, type=RankResult) for note in notes]

    def next_block(self, *, leads: bool) -> None:
        """Notes of the block before this one can go: every rank has reported on this one, so has
        read those."""
        before = self.number - 1
        for name in (f"ready/{before}/{self._rank}", f"result/{before}/{self._rank}"):
            self._messages.drop(name)
        if leads:
            self._messages.drop(f"order/{before}")
            self._messages.drop(f"begin/{before}")
        self.number += 1

    def _from_all(self, what: str) -> list[bytes] | None:
        """The notes of all ranks, or None while one is missing."""
        notes = []
        for rank in range(self._world_size):
            note = self._messages.look(f"{what}/{self.number}/{rank}")
            if note is None:
                return None
            notes.append(note)
        return notes
