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

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import msgspec

from kilter.clocks.plan.guard import Contract
from kilter.clocks.plan.section_job import (
    BLOCK,
    SETTLING,
    Expected,
    RankOffer,
    expected,
    found_of,
    known_depths,
    own_depths,
    signature,
    targets_of,
)
from kilter.clocks.plan.section_search import (
    Depths,
    FoundDepths,
    Outcomes,
    SearchTarget,
    Seen,
    Trials,
    default_depths,
    search,
    watch,
)
from kilter.clocks.plan.worth import ClockCosts
from kilter.clocks.section_rehearsal import SimulatedRanks, finish, slowest
from kilter.core.messages import RankMessages
from kilter.core.section_record import SectionsFound

LEAST_AHEAD_S = 0.3
"""How far ahead of its first iteration an order is given: three looks of every rank."""
MOST_AHEAD_S = 10.0
WATCHED_SHARE = 0.01
"""Of the iterations after the search: run at the default, to see whether the bound still holds."""

FollowDepths = Callable[[Sequence[int], Sequence[tuple[int, Sequence[int]]]], None]
"""Has the conductor follow these depths of this rank's stretches, and others from the iterations on
that begin with these iteration ends."""


class BlockMeter(Protocol):
    """What a rank sees of its iterations."""

    def block(self, first: int, count: int) -> Seen | None:
        """Of the iterations that begin with these iteration ends; None: something else than the
        job's rhythm was in them, and they do not count."""


class TryBlocks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order: blocks one after the other."""

    first: int
    """The iteration end with which the first one begins."""
    arms: tuple[Depths, ...]

    @property
    def end(self) -> int:
        """The iteration end with which the last one is over."""
        return self.first + len(self.arms) * (SETTLING + BLOCK)


class HoldFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order: what stands from here on."""

    found: SectionsFound


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 has made of the offers."""

    targets: tuple[SearchTarget, ...]


class BlocksSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank saw of an order's blocks."""

    blocks: tuple[Seen | None, ...]
    late: bool = False
    """The order came too late to this rank."""
    refused: str | None = None
    """Why this rank sets nothing any more."""


_ORDERS = msgspec.json.Decoder(TryBlocks | HoldFound)
_SEEN = msgspec.json.Decoder(BlocksSeen)
_OFFER = msgspec.json.Decoder(RankOffer)
_TARGETS = msgspec.json.Decoder(Targets)


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
            targets = Targets(targets=self._leader.begin(offers))
            self._messages.post(f"{self._name}/targets", msgspec.json.encode(targets))
        raw = self._messages.look(f"{self._name}/targets")
        if raw is None:
            return False
        self._targets = _TARGETS.decode(raw).targets
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


class SectionLeader:
    """Rank 0's part: drives the search, and afterwards watches what is held.

    `saved` looks for what an earlier run of the job with this signature has found; `save` keeps
    what this one has confirmed.
    """

    def __init__(
        self,
        card: ClockCosts,
        contract: Contract,
        *,
        device: str,
        saved: Callable[[str], SectionsFound | None],
        save: Callable[[str, SectionsFound], None],
        seed: int = 0,
    ) -> None:
        self._card = card
        self._contract = contract
        self._device = device
        self._saved, self._save = saved, save
        self._seed = seed
        self.offers: list[RankOffer] = []
        self.targets: tuple[SearchTarget, ...] = ()
        self._expected: Expected | None = None
        self._signature = ""
        self._known: Depths | None = None
        self._searching: Generator[Trials, Outcomes, FoundDepths] | None = None
        self._watching: Generator[Trials, Outcomes, str] | None = None
        self._trials: Trials = ()
        self._hold: SectionsFound | None = None
        """To be told next."""
        self._ahead_s = LEAST_AHEAD_S
        self.posted = False
        self.blocks = 0
        self.found: SectionsFound | None = None

    def begin(self, offers: Sequence[RankOffer]) -> tuple[SearchTarget, ...]:
        """What is searched, from what the ranks offer."""
        self.offers = list(offers)
        before = expected(offers, self._card, max_slowdown=self._contract.max_slowdown)
        self._expected = before
        self.targets = targets_of(offers)
        self._signature = signature(
            offers, device=self._device, max_slowdown=self._contract.max_slowdown
        )
        if before.taken != "sections":
            self._end(
                SectionsFound(
                    taken=before.taken,
                    reason=before.reason,
                    sections_saving=before.sections,
                    whole_job_saving=before.whole_job,
                )
            )
            return self.targets
        self._known = known_depths(self._saved(self._signature), self.targets, self._card)
        self._searching = search(
            self.targets,
            lowest=len(self._card.levels),
            contract=self._contract,
            seed=self._seed,
            known=self._known,
        )
        self._go_on(None)
        return self.targets

    def order(self, index: int) -> TryBlocks | HoldFound:
        """The next one, when the iteration end `index` has passed."""
        self.posted = True
        if self._hold is not None:
            found, self._hold = self._hold, None
            return HoldFound(found=found)
        iteration_s = max(offer.found.iteration_s for offer in self.offers)
        ahead = 2 + math.ceil(self._ahead_s / iteration_s)
        if self._watching is not None:
            ahead = max(ahead, math.ceil(BLOCK / WATCHED_SHARE))
        return TryBlocks(first=index + ahead, arms=tuple(trial.depths for trial in self._trials))

    def conclude(self, results: Sequence[BlocksSeen]) -> None:
        """All ranks have reported."""
        refused = next(
            (f"rank {n}: {seen.refused}" for n, seen in enumerate(results) if seen.refused), None
        )
        if refused is not None:
            self._stop(refused)
            return
        if any(seen.late for seen in results):
            self._ahead_s = min(2 * self._ahead_s, MOST_AHEAD_S)
            return
        blocks = [seen.blocks for seen in results]
        outcomes = []
        for of_ranks in zip(*blocks, strict=True):
            known = [seen for seen in of_ranks if seen is not None]
            if len(known) < len(of_ranks):
                return  # disturbed: once more
            outcomes.append(slowest(known))
        self.blocks += len(outcomes)
        self._go_on(tuple(outcomes))

    def rehearse(
        self, ranks: SimulatedRanks, goes_on: Callable[[], bool] = lambda: True
    ) -> SectionsFound | None:
        """The script is over and the search is not: go on with simulated ranks alone."""
        if self._searching is None:
            return self.found
        end, blocks = finish(self._searching, self._trials, ranks, goes_on)
        self.blocks += blocks
        self._searching = None
        if end is not None:
            self._conclude_search(end, rehearsed=True)
        return self.found

    def _go_on(self, outcomes: Outcomes | None) -> None:
        if self._searching is not None:
            try:
                self._trials = (
                    next(self._searching) if outcomes is None else self._searching.send(outcomes)
                )
            except StopIteration as end:
                self._searching = None
                self._conclude_search(end.value, rehearsed=False)
        elif self._watching is not None and outcomes is not None:
            try:
                self._trials = self._watching.send(outcomes)
            except StopIteration as end:
                self._watching = None
                self._stop(end.value)

    def _conclude_search(self, end: FoundDepths, *, rehearsed: bool) -> None:
        assert self._expected is not None
        found = msgspec.structs.replace(
            found_of(end, self.targets, self._card, self._expected),
            blocks=self.blocks,
            known=self._known is not None,
            rehearsed=rehearsed,
        )
        self._save(self._signature, found)
        self._end(found)

    def _end(self, found: SectionsFound) -> None:
        """Tell all ranks the result and hold it. Lowered clocks are compared with the default from
        time to time."""
        self.found = self._hold = found
        if found.held:
            self._watching = watch(
                found.depths, self.targets, contract=self._contract, seed=self._seed + 1
            )
            self._trials = next(self._watching)

    def _stop(self, why: str) -> None:
        """Back to the default, for the rest of the run."""
        self._searching = self._watching = None
        self.found = self._hold = SectionsFound(
            taken="default", reason=why, keys=tuple(t.key for t in self.targets), blocks=self.blocks
        )

    @property
    def over(self) -> bool:
        """There is nothing more to order."""
        return self._hold is None and self._searching is None and self._watching is None
