"""The communication sections of all ranks of a job, put together for one search. Pure.

Every rank plans for itself (`worth`) and offers what it could slow down. From the offers come the
targets of the search: which ranks share a section, which of them do the same work, how long each
waits for the others, and whether one clock for the whole job would pay more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kilter.clocks.plan.section_search import Depths, FoundDepths, SearchTarget
from kilter.clocks.plan.sections import RankSections
from kilter.clocks.plan.worth import ClockCosts, LowStretch, Worth, job, whole_job
from kilter.core.section_record import SectionsFound, Taken
from kilter.core.signature import signature
from kilter.core.units import show_clock, show_count, show_fraction
from kilter.model.stats import paired_ratio

BLOCK = 5
"""So many iterations of a block count."""
SETTLING = 1
"""So many iterations before them do not count: the clocks change in the first one."""
LEAST_EXPECTED_SAVING = 0.01
"""What is expected to save less than this share of the energy is not searched."""


class PlannedOperations(msgspec.Struct, frozen=True, kw_only=True):
    """Of an offer whose stretches are of operations: the plan, which is only to be confirmed."""

    depths: tuple[int, ...]
    """Each stretch has one."""
    whole_job_saving: float
    """One clock for the whole job saves this share of the energy by the same tables."""


class RankOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank could slow down, in its own times."""

    rank: int
    role: str
    """Ranks of one role do the same work: the stage of a pipeline, for example."""
    found: Worth
    lengths: tuple[tuple[str, float, float], ...]
    """Each of its sections has its key, start and median length in it."""
    operations: PlannedOperations | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key_of(stretch) for stretch in self.found.stretches)

    def inside(self, stretch: LowStretch) -> list[tuple[str, float]]:
        """Keys and lengths of the sections of a stretch."""
        end_s = stretch.end_s
        return [(k, s) for k, begin, s in self.lengths if stretch.start_s <= begin < end_s]


def offer_of(rank: RankSections, found: Worth, role: str) -> RankOffer:
    lengths = tuple((s.key, s.start_s, s.length_s) for s in rank.sections)
    return RankOffer(rank=rank.rank, role=role, found=found, lengths=lengths)


def key_of(stretch: LowStretch) -> str:
    """The name of a stretch on all ranks that have it."""
    return stretch.first if stretch.first == stretch.last else f"{stretch.first} to {stretch.last}"


def targets_of(offers: Sequence[RankOffer]) -> tuple[SearchTarget, ...]:
    """What is to be searched, in the order of the ranks that have it. Offers by rank."""
    shortest: dict[str, float] = {}
    for offer in offers:
        for key, _, length_s in offer.lengths:
            shortest[key] = min(shortest.get(key, length_s), length_s)
    by_key: dict[str, list[tuple[RankOffer, LowStretch]]] = {}
    for offer in offers:
        for stretch in offer.found.stretches:
            by_key.setdefault(key_of(stretch), []).append((offer, stretch))
    return tuple(_target(key, having, shortest, offers) for key, having in by_key.items())


def _target(
    key: str,
    having: Sequence[tuple[RankOffer, LowStretch]],
    shortest: Mapping[str, float],
    offers: Sequence[RankOffer],
) -> SearchTarget:
    roles: dict[str, list[int]] = {}
    wait = [0.0] * len(offers)
    for offer, stretch in having:
        roles.setdefault(offer.role, []).append(offer.rank)
        waited_s = sum(length_s - shortest[k] for k, length_s in offer.inside(stretch))
        wait[offer.rank] = min(1.0, waited_s / (stretch.end_s - stretch.start_s))
    share = max((s.end_s - s.start_s) / offer.found.iteration_s for offer, s in having)
    return SearchTarget(
        key=key, share=share, roles=tuple(map(tuple, roles.values())), wait=tuple(wait)
    )


def own_depths(
    targets: Sequence[SearchTarget], depths: Depths, offer: RankOffer
) -> tuple[int, ...]:
    """The depth of each of a rank's stretches."""
    by_key = {t.key: row[offer.rank] for t, row in zip(targets, depths, strict=True)}
    return tuple(by_key[key] for key in offer.keys)


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What pays more, before anything was tried."""

    taken: Taken
    reason: str
    sections: float
    whole_job: float


def expected(offers: Sequence[RankOffer], card: ClockCosts, *, max_slowdown: float) -> Expected:
    """Sections or one clock for the whole job, by what each is expected to save."""
    found = [offer.found for offer in offers]
    sections, _ = job(found)
    planned = [offer.operations for offer in offers if offer.operations is not None]
    if planned:
        whole = min(each.whole_job_saving for each in planned)
    else:
        whole = whole_job(found, card, max_slowdown=max_slowdown)
    what = "stretches of operations" if planned else "sections"
    both = (
        f"{show_fraction(sections)} expected of the {what}, {show_fraction(whole)} of one clock "
        "for the whole job"
    )
    taken: Taken = "sections"
    if max(sections, whole) < LEAST_EXPECTED_SAVING:
        taken = "default"
    elif whole > sections:
        taken = "whole job"
    return Expected(taken=taken, reason=both, sections=sections, whole_job=whole)


def signature_of(offers: Sequence[RankOffer], *, device: str, max_slowdown: float) -> str:
    """Of the job that makes these offers."""
    program = [f"{o.rank}:{o.role}:{'|'.join(_all_keys(o))}" for o in offers]
    return signature(device=device, max_slowdown=max_slowdown, program=program)


def _all_keys(offer: RankOffer) -> Sequence[str]:
    return offer.keys if offer.operations else [key for key, _, _ in offer.lengths]


def planned_depths(offers: Sequence[RankOffer], targets: Sequence[SearchTarget]) -> Depths | None:
    """The depths that the ranks have planned themselves; None where they are to be searched."""
    rows = [
        dict(zip(offer.keys, offer.operations.depths, strict=True))
        for offer in offers
        if offer.operations is not None
    ]
    if len(rows) < len(offers):
        return None
    return tuple(tuple(row.get(target.key, 0) for row in rows) for target in targets)


def known_depths(
    saved: SectionsFound | None, targets: Sequence[SearchTarget], card: ClockCosts
) -> Depths | None:
    """What an earlier run has found, if that is about the same sections, ranks and clocks."""
    if saved is None or (saved.clocks_hz, saved.memory_clocks_hz) != _clocks(card):
        return None
    rows = dict(zip(saved.keys, saved.depths, strict=False))
    chosen = tuple(rows.get(target.key, ()) for target in targets)
    lowest = len(card.levels)
    usable = all(
        len(row) == len(target.wait) and all(0 <= depth <= lowest for depth in row)
        for row, target in zip(chosen, targets, strict=True)
    )
    return chosen if usable else None


def found_of(
    end: FoundDepths,
    targets: Sequence[SearchTarget],
    card: ClockCosts,
    before: Expected,
    *,
    noun: str = "section",
) -> SectionsFound:
    """The end of a search as it is held, told and kept."""
    clocks_hz, memory_clocks_hz = _clocks(card)
    time, energy = paired_ratio(end.log_time), paired_ratio(end.log_energy)
    held = any(depth for row in end.depths for depth in row)
    return SectionsFound(
        taken="sections" if held else "default",
        reason=_words(end.depths, card, noun)
        if held
        else "no lower clock passed the contract's test",
        keys=tuple(target.key for target in targets),
        depths=end.depths,
        clocks_hz=clocks_hz,
        memory_clocks_hz=memory_clocks_hz,
        sections_saving=before.sections,
        whole_job_saving=before.whole_job,
        pairs=len(end.log_time),
        time_ratio=None if time is None else time.ratio,
        time_ratio_ci95=None if time is None else (time.low, time.high),
        energy_ratio=None if energy is None else energy.ratio,
    )


def _clocks(card: ClockCosts) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    """Of the SMs and of the memory, by depth. Empty: the memory's stays."""
    memory = tuple(level.memory_clock_hz for level in card.levels)
    return tuple(level.sm_clock_hz for level in card.levels), memory if any(memory) else ()


def _words(depths: Depths, card: ClockCosts, noun: str) -> str:
    """ "345 MHz in 1 section of 3 ranks, ...", the lowest clock first."""
    places: dict[int, list[tuple[int, int]]] = {}
    for j, row in enumerate(depths):
        for rank, depth in enumerate(row):
            if depth:
                places.setdefault(depth, []).append((j, rank))
    parts = []
    for depth in sorted(places, reverse=True):
        sections = show_count(len({j for j, _ in places[depth]}), noun)
        ranks = show_count(len({rank for _, rank in places[depth]}), "rank")
        level = card.levels[depth - 1]
        named = [show_clock(level.sm_clock_hz)] if level.sm_clock_hz else []
        named += [f"memory {show_clock(hz)}"] if (hz := level.memory_clock_hz) else []
        parts.append(f"{' with '.join(named)} in {sections} on {ranks}")
    return ", ".join(parts)
