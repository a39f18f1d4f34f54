"""Rank 0's part in the search of section clocks: which blocks are run next, and what is held.

Orders and results are messages between the ranks (`section_agreement`); the search itself is pure
(`plan/section_search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence

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
    planned_depths,
    signature_of,
    targets_of,
)
from kilter.clocks.plan.section_search import (
    Depths,
    FoundDepths,
    Outcomes,
    SearchTarget,
    Seen,
    Trials,
    search,
    watch,
)
from kilter.clocks.plan.worth import ClockCosts
from kilter.clocks.section_rehearsal import SimulatedRanks, finish, slowest
from kilter.core.section_record import SectionsFound

LEAST_AHEAD_S = 0.3
"""How far ahead of its first iteration an order is given: three looks of every rank."""
MOST_AHEAD_S = 10.0
WATCHED_SHARE = 0.01
"""This share of iterations runs at the default, to see whether the bound still holds."""


class TryBlocks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order: blocks one after the other."""

    first: int
    """The first one begins with this iteration end."""
    arms: tuple[Depths, ...]

    @property
    def end(self) -> int:
        """The iteration end with which the last one is over."""
        return self.first + len(self.arms) * (SETTLING + BLOCK)


class HoldFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An order: what stands from here on."""

    found: SectionsFound


class BlocksSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank saw of an order's blocks."""

    blocks: tuple[Seen | None, ...]
    late: bool = False
    """The order came too late to this rank."""
    refused: str | None = None
    """Why this rank sets nothing any more."""


class SectionLeader:
    """Rank 0's part: drives the search, and afterwards watches what is held.

    `saved` looks for what an earlier run of the job with this signature has found; `save` keeps
    what this one has confirmed. It has many attributes because it goes through three stages (offers
    of the ranks, search, watching what is held), each with a state of its own.
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
        """The other ranks are told of it next."""
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
        self._signature = signature_of(
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
            known=self._known or planned_depths(offers, self.targets),
            back=self._card.back,
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
        return TryBlocks(first=index + ahead, arms=self._trials)

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
            found_of(end, self.targets, self._card, self._expected, noun=self._noun),
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
    def _noun(self) -> str:
        return "part" if any(offer.operations for offer in self.offers) else "section"

    @property
    def over(self) -> bool:
        """There is nothing more to order."""
        return self._hold is None and self._searching is None and self._watching is None
