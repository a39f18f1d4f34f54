"""The ranks of a job change how they recompute at the same iteration end, or none of them does.

A block that runs again in backward may gather sharded weights again: a rank that changed alone
would wait for the others for ever. So each change is agreed on in a round:

    every rank   says what its turn has shown
    rank 0       puts that together, and names an iteration end that is still to come
    every rank   says that it has read this in time
    rank 0       settles "yes" once all have
    every rank   at that iteration end settles "no", unless it has heard of the yes

What is settled first is what all ranks find. After a no comes another round with more time ahead.
Nobody waits for another rank, and no collective is used: the messages are in a store of ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import msgspec

from kilter.core.messages import MessagesGone, RankMessages
from kilter.core.ranks import Ranks
from kilter.memory.iteration_times import IterationTimes
from kilter.memory.kept_recompute import KeptRecompute

LEAD_S = 0.5
"""How far ahead the first named iteration end lies: our threads look ten times a second, and five
messages follow each other. Twice as far after each no."""
ROUNDS = 6
"""After so many noes the ranks stay as they are: the last was given 16 seconds."""
YES, NO = b"yes", b"no"
_sessions = itertools.count()


class TurnNote(msgspec.Struct, frozen=True):
    """What a rank, or all of them together, say at the end of a turn."""

    models: str
    """They are those with checkpointing of their own."""
    share: float
    """This share of their blocks is to be checkpointed."""
    tensors: int
    """So many are saved in the largest pass."""
    seconds: float | None
    """An iteration took this; None: it was not measured."""
    why_not: str
    """Why the other way is not measured; empty: it is."""
    changing: bool = False
    """Shapes keep changing: iterations were measured with a plan or without."""
    kept: KeptRecompute | None = None
    """What an earlier run of the job has chosen, of which rank 0 alone hears."""
    keeps_up: bool = False
    """Under the plan for single operations no pass waits for the host or for copies."""

    def with_(self, other: TurnNote) -> TurnNote:
        """The slowest rank counts, and the one that is shortest of memory."""
        both = self.seconds is not None and other.seconds is not None
        unlike = "the ranks train different models" if self.models != other.models else ""
        return TurnNote(
            models=self.models,
            share=max(self.share, other.share),
            tensors=max(self.tensors, other.tensors),
            seconds=max(self.seconds or 0.0, other.seconds or 0.0) if both else None,
            why_not=self.why_not or other.why_not or unlike,
            changing=self.changing or other.changing,
            kept=self.kept or other.kept,
            keeps_up=self.keeps_up and other.keeps_up,
        )


class _Round:
    """The program's thread makes a new one; ours fills it."""

    def __init__(self, name: str, own: TurnNote) -> None:
        self.name = name
        self.own = own
        self.said = self.read = False
        """This rank has."""
        self.notes: list[TurnNote] = []
        self.readers = 0
        """On rank 0, `notes` holds what the first ranks have said, and so many of them have read
        the answer."""
        self.answer: tuple[int, TurnNote] | None = None
        """It holds the iteration end at which all ranks change, and what they say together."""
        self.settled: bytes | None = None


class RankAgreement:
    """`say` and `heard` at iteration ends in the program's thread, `tick` in the session's."""

    def __init__(
        self, messages: Callable[[], RankMessages | None], ranks: Ranks, times: IterationTimes
    ) -> None:
        self._messages = messages
        self._ranks = ranks
        self._times = times
        self._name = f"recompute/{next(_sessions)}"
        self._number = 0
        self._noes = 0
        self._iteration_s = 1.0
        self._round: _Round | None = None
        """It is None before something is said, and once all ranks were heard."""
        self.lost = ""
        """Why nothing can be agreed on any more; empty: it can."""

    @property
    def alone(self) -> bool:
        """There is no other rank."""
        return self._ranks.world_size == 1

    @property
    def said(self) -> bool:
        """The turn of this rank is over, and not all were heard yet."""
        return self._round is not None

    def say(self, note: TurnNote) -> None:
        """The turn of this rank is over."""
        self._round = _Round(f"{self._name}/{self._number}", note)

    def heard(self) -> TurnNote | None:
        """What all ranks say together, at the iteration end at which they go on; else None."""
        now = self._round
        if now is None or self.lost:
            return None
        if self.alone:
            self._round = None
            return now.own
        if now.answer is None or self._times.index < now.answer[0]:
            return None
        if self._settle(now, NO) is None:
            return None
        self._number += 1
        if now.settled == YES:
            self._noes = 0
            self._round = None
            return now.answer[1]
        self._noes += 1
        if self._noes == ROUNDS:
            self.lost = "the ranks did not hear of each other in time"
        self.say(now.own)
        return None

    def tick(self) -> None:
        """See what the others have said."""
        now, messages = self._round, self._messages()
        if now is None or messages is None or self.alone or self.lost:
            return
        try:
            self._advance(messages, now)
        except MessagesGone as error:
            self.lost = str(error)

    def _advance(self, messages: RankMessages, now: _Round) -> None:
        rank = self._ranks.rank
        if not now.said:
            messages.post(f"{now.name}/said/{rank}", msgspec.json.encode(now.own))
            now.said = True
        if rank == 0:
            self._lead(messages, now)
        if now.answer is None and (raw := messages.look(f"{now.name}/answer")) is not None:
            now.answer = msgspec.json.decode(raw, type=tuple[int, TurnNote])
        if now.answer is None:
            return
        if not now.read and self._times.index < now.answer[0]:
            messages.post(f"{now.name}/read/{rank}", b"")
            now.read = True
        now.settled = now.settled or messages.look(f"{now.name}/settled")

    def _lead(self, messages: RankMessages, now: _Round) -> None:
        """Take the notes of all ranks, in their order, each once."""
        ranks = self._ranks.world_size
        notes = now.notes
        while len(notes) < ranks:
            raw = messages.look(f"{now.name}/said/{len(notes)}")
            if raw is None:
                return
            notes.append(msgspec.json.decode(raw, type=TurnNote))
            if len(notes) == ranks:
                note = reduce(TurnNote.with_, notes)
                self._iteration_s = note.seconds or self._times.usual_s or self._iteration_s
                ahead = 2 + math.ceil(LEAD_S * 2**self._noes / self._iteration_s)
                answer = msgspec.json.encode((self._times.index + ahead, note))
                messages.post(f"{now.name}/answer", answer)
        while now.readers < ranks and messages.look(f"{now.name}/read/{now.readers}") is not None:
            now.readers += 1
        if now.readers == ranks:
            self._settle(now, YES)

    def _settle(self, now: _Round, proposal: bytes) -> bytes | None:
        """What holds: the first proposal. None where that cannot be found out any more."""
        messages: Any = self._messages()
        try:
            now.settled = now.settled or messages.settle(f"{now.name}/settled", proposal)
        except MessagesGone as error:
            self.lost = str(error)
        return now.settled
