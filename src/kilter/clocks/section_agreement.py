"""The ranks of a job search the clocks of their communication sections together.

    every rank   offers what it could slow down
    rank 0       puts the offers together, and orders blocks of iterations: from which iteration
                 on, with which depths
    every rank   has its conductor change the clocks at those iterations, and reports what it saw
    rank 0       judges by the slowest rank, orders the next blocks, and in the end what is held

No collective, and nobody waits: an order names iterations that are still to come on every rank. A
rank that reads it too late says so, and the blocks are done again with more time ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kilter.clocks.plan.section_job import BLOCK, SETTLING, RankOffer, own_depths
from kilter.clocks.plan.section_search import Depths, SearchTarget, Seen, default_depths
from kilter.clocks.section_leader import BlocksSeen, HoldFound, SectionLeader, TryBlocks
from kilter.core.messages import RankMessages
from kilter.core.section_record import SectionsFound

FollowDepths = Callable[[Sequence[int], Sequence[tuple[int, Sequence[int]]]], None]
"""It has the conductor follow these depths of this rank's stretches, and others from the iterations
on that begin with these iteration ends."""


class BlockMeter(Protocol):
    """What a rank sees of its iterations."""

    def block(self, first: int, count: int) -> Seen | None:
        """Of the iterations that begin with these iteration ends; None: something else than the
        job's rhythm was in them, and they do not count."""


_ORDERS = msgspec.json.Decoder(TryBlocks | HoldFound)
_SEEN = msgspec.json.Decoder(BlocksSeen)
_OFFER = msgspec.json.Decoder(RankOffer)
_TARGETS = msgspec.json.Decoder(tuple[SearchTarget, ...])


class SectionAgreement:
    """One rank's part in one search, from its offer on. `leader` is rank 0's.

    `step` raises `MessagesGone` when the other ranks cannot be reached any more.
    """

    def __init__(
        self,
        messages: RankMessages,
        offer: RankOffer,
        *,
        generation: int,
        world_size: int,
        meter: Callable[[Sequence[SearchTarget]], BlockMeter],
        follow: FollowDepths,
        leader: SectionLeader | None,
    ) -> None:
        self._messages = messages
        self._offer = offer
        self._name = f"sections/{generation}"
        self._world_size = world_size
        self._make_meter = meter
        self._follow = follow
        self._leader = leader
        self._meter: BlockMeter | None = None
        self._targets: tuple[SearchTarget, ...] | None = None
        self._standing: Depths = ()
        self._number = 0
        self._order: TryBlocks | None = None
        self._late = False
        self.refused: str | None = None
        self.found: SectionsFound | None = None
        """What is held; None: the search is not over."""
        messages.post(f"{self._name}/offer/{offer.rank}", msgspec.json.encode(offer))

    @property
    def own(self) -> tuple[int, ...]:
        """The depths of this rank's stretches that stand."""
        if self._targets is None:
            return (0,) * len(self._offer.keys)
        return own_depths(self._targets, self._standing, self._offer)

    def reopen(self) -> None:
        """Tell all ranks that this search is of no use any more."""
        self._messages.post(f"{self._name}/again", b"1")

    @property
    def reopened(self) -> bool:
        """Whether a rank has told that the search is void."""
        return self._messages.look(f"{self._name}/again") is not None

    def step(self, index: int, passed: int | None = None) -> None:
        """Do what can be done now; `index` is the last iteration end whose time is known, `passed`
        the last one that the program has passed: on a GPU times become known later."""
        while self._advance(index, index if passed is None else passed):
            pass

    def _advance(self, index: int, passed: int) -> bool:
        if self._targets is None:
            return self._take_targets()
        if self._order is None:
            return self._take_order(passed)
        return self._report(index)

    def _take_targets(self) -> bool:
        if self._leader is not None:
            offers = self._from_all("offer", _OFFER)
            if offers is None:
                return False
            targets = self._leader.begin(offers)
            self._messages.post(f"{self._name}/targets", msgspec.json.encode(targets))
        raw = self._messages.look(f"{self._name}/targets")
        if raw is None:
            return False
        self._targets = _TARGETS.decode(raw)
        self._standing = default_depths(self._targets)
        self._meter = self._make_meter(self._targets)
        return True

    def _take_order(self, index: int) -> bool:
        if self._leader is not None and not self._leader.posted and not self._leader.over:
            order = self._leader.order(index)
            self._messages.post(f"{self._name}/order/{self._number}", msgspec.json.encode(order))
        raw = self._messages.look(f"{self._name}/order/{self._number}")
        if raw is None:
            return False
        order = _ORDERS.decode(raw)
        if isinstance(order, HoldFound):
            self._hold(order.found)
            return True
        self._order, self._late = order, index >= order.first
        if not self._late:
            block = SETTLING + BLOCK
            arms = [(order.first + n * block, self._own(arm)) for n, arm in enumerate(order.arms)]
            self._follow(self.own, [*arms, (order.end, self.own)])
        return True

    def _own(self, depths: Depths) -> tuple[int, ...]:
        assert self._targets is not None
        return own_depths(self._targets, depths, self._offer)

    def _hold(self, found: SectionsFound) -> None:
        assert self._targets is not None
        self.found = found
        self._standing = found.depths or default_depths(self._targets)
        self._follow(self.own, [])
        self._next()

    def _report(self, index: int) -> bool:
        order = self._order
        assert order is not None
        assert self._meter is not None
        mine = f"{self._name}/seen/{self._number}/{self._offer.rank}"
        if index < order.end and not (self._late or self.refused):
            return False
        if self._messages.look(mine) is None:
            seen = BlocksSeen(blocks=(), late=self._late, refused=self.refused)
            if not (self._late or self.refused):
                block = SETTLING + BLOCK
                begins = [order.first + n * block + SETTLING for n in range(len(order.arms))]
                blocks = tuple(self._meter.block(begin, BLOCK) for begin in begins)
                seen = BlocksSeen(blocks=blocks)
            self._messages.post(mine, msgspec.json.encode(seen))
        if self._leader is not None:
            results = self._from_all(f"seen/{self._number}", _SEEN)
            if results is None:
                return False
            self._leader.conclude(results)
        self._next()
        return True

    def _next(self) -> None:
        """Every rank has read what came before the present order."""
        before = self._number - 1
        self._messages.drop(f"{self._name}/seen/{before}/{self._offer.rank}")
        if self._leader is not None:
            self._messages.drop(f"{self._name}/order/{before}")
            self._leader.posted = False
        self._number += 1
        self._order = None
        self._late = False

    def _from_all(self, what: str, decoder: msgspec.json.Decoder[Any]) -> list[Any] | None:
        """The messages of all ranks, or None while one is missing."""
        found = []
        for rank in range(self._world_size):
            raw = self._messages.look(f"{self._name}/{what}/{rank}")
            if raw is None:
                return None
            found.append(decoder.decode(raw))
        return found
