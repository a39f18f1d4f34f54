"""The ranks of a job search together: the true harmless clocks, and every way that can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kilter.clocks.plan.cover import Cover
from kilter.clocks.plan.guard import Contract
from kilter.clocks.plan.section_job import RankOffer, key_of, targets_of
from kilter.clocks.plan.section_search import SearchTarget
from kilter.clocks.plan.worth import LowStretch, Worth
from kilter.clocks.section_agreement import SectionAgreement
from kilter.clocks.section_card import card_of
from kilter.clocks.section_leader import SectionLeader
from kilter.clocks.section_meters import SimulatedMeter
from kilter.clocks.section_rehearsal import SimulatedRank, SimulatedRanks
from kilter.core.messages import LocalMessages
from kilter.core.section_record import SectionsFound
from kilter.device.sim.profile import load_profile
from kilter.observe.end_times import Iteration

H200 = load_profile("h200")
CARD = card_of(H200, levels=12)
CONTRACT = Contract(max_slowdown=0.01)
T = 1.0
"""Seconds of an iteration."""


def offer(
    rank: int, *, sections: dict[str, float], stretches: Sequence[str] = (), role: str = ""
) -> RankOffer:
    """Sections one after the other, 0.1 s apart, with a stretch over each that is named."""
    lengths, low, at = [], [], 0.05
    for key, length_s in sections.items():
        lengths.append((key, at, length_s))
        if key in stretches:
            low.append(stretch(key, at, length_s))
        at += length_s + 0.1
    compute_s = T - sum(sections.values())
    found = Worth(
        rank=rank,
        exposed_share=1.0 - compute_s,
        longest_s=max(sections.values(), default=0.0),
        iteration_s=T,
        compute_s=compute_s,
        iteration_j=compute_s * CARD.computing_w + (T - compute_s) * CARD.waiting_w,
        stretches=tuple(low),
        refused=(),
    )
    return RankOffer(rank=rank, role=role, found=found, lengths=tuple(lengths))


def stretch(key: str, start_s: float, length_s: float) -> LowStretch:
    return LowStretch(
        first=key,
        last=key,
        sections=1,
        sm_clock_hz=CARD.levels[-1].sm_clock_hz,
        start_s=start_s,
        end_s=start_s + length_s,
        down_at_s=start_s - CARD.down.quantile(0.05),
        up_at_s=start_s + length_s - CARD.up.quantile(0.95),
        computed_s=0.0,
        saved_j=CARD.levels[-1].saved_w * length_s,
        delay_s=0.001,
    )


class SlowedRank(SimulatedRank):
    """Below the harmless clock of a section, over the highest, its communication takes longer."""

    def __init__(self, *args: Any, harmless: dict[str, float]) -> None:
        super().__init__(*args)
        self._harmless = harmless

    def _stretch(self, stretch: LowStretch, depth: int) -> tuple[float, float, float]:
        length_s, delay_s, joules = super()._stretch(stretch, depth)
        if depth == 0:
            return length_s, delay_s, joules
        level = CARD.levels[depth - 1]
        longer = max(1.0, self._harmless.get(key_of(stretch), 0.0) * level.stretch) - 1.0
        longer_s = (stretch.end_s - stretch.start_s - stretch.computed_s) * longer
        return length_s + longer_s, delay_s + longer_s, joules - level.waiting_w * longer_s


class Job:
    """Ranks in one process, each with its own conductor (a list of what it was told)."""

    def __init__(
        self,
        offers: Sequence[RankOffer],
        harmless: dict[str, float] | None = None,
        saved: SectionsFound | None = None,
        delayed: Callable[[int, int], bool] = lambda rank, index: False,
    ) -> None:
        self.offers = offers
        self.kept: dict[str, SectionsFound] = {}
        self.messages = LocalMessages()
        self.told: list[list[Any]] = [[] for _ in offers]
        self.index = 0
        self._delayed = delayed
        self._harmless = harmless or {}
        self._meters: dict[int, SimulatedMeter] = {}
        self.leader = SectionLeader(
            CARD,
            CONTRACT,
            device="sim",
            saved=lambda signature: saved,
            save=self.kept.__setitem__,
        )
        self.ranks = [self._begin(each) for each in offers]

    def _begin(self, mine: RankOffer) -> SectionAgreement:
        def meter(targets: Sequence[SearchTarget]) -> SimulatedMeter:
            rank = SlowedRank(mine, targets, CARD, H200.switch, harmless=self._harmless)
            self._meters[mine.rank] = SimulatedMeter(rank, (0,) * len(mine.keys))
            return self._meters[mine.rank]

        def follow(now: Sequence[int], arms: Sequence[tuple[int, Sequence[int]]]) -> None:
            self.told[mine.rank].append((tuple(now), [(n, tuple(d)) for n, d in arms]))
            self._meters[mine.rank].follow(now, arms)

        return SectionAgreement(
            self.messages,
            mine,
            generation=0,
            world_size=len(self.offers),
            meter=meter,
            follow=follow,
            leader=self.leader if mine.rank == 0 else None,
        )

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.index += 1
            end = Iteration(self.index, self.index * T, T, "host")
            for number, rank in enumerate(self.ranks):
                if number in self._meters:
                    self._meters[number].iteration(end)
                if not self._delayed(number, self.index):
                    rank.step(self.index)

    def until_found(self, most: int = 20_000) -> SectionsFound:
        while any(rank.found is None for rank in self.ranks):
            self.iterate(1)
            assert self.index < most, "the search does not end"
        found = self.ranks[0].found
        assert found is not None
        assert all(rank.found == found for rank in self.ranks)
        return found


def ddp(ranks: int = 2, length_s: float = 0.6) -> list[RankOffer]:
    return [offer(r, sections={"ar/1": length_s}, stretches=["ar/1"]) for r in range(ranks)]


@pytest.mark.parametrize("harmless", [3, 7, 12])
def test_the_ranks_find_and_hold_the_lowest_harmless_clock(harmless: int) -> None:
    """Below that clock the section takes 16 % longer with every step, so none of them passes."""
    ratio = CARD.levels[harmless - 1].sm_clock_hz / H200.knobs.sm_highest_hz
    job = Job(ddp(), {"ar/1": ratio})
    found = job.until_found()
    assert found.taken == "sections"
    assert all(abs(depth - harmless) <= 1 and depth <= harmless for depth in found.depths[0])
    assert len(set(found.depths[0])) == 1  # one role: they move together
    assert found.time_ratio is not None
    assert found.time_ratio < 1.01
    assert found.energy_ratio is not None
    assert found.energy_ratio < 0.99
    assert [told[-1][0] for told in job.told] == [(found.depths[0][0],)] * 2
    assert list(job.kept.values()) == [found]


def test_ranks_switch_at_the_same_iterations_and_the_default_stands_between() -> None:
    job = Job(ddp(3))
    job.until_found()
    assert job.told[0] == job.told[1] == job.told[2]
    for now, arms in job.told[0][:-2]:
        assert now == (0,)
        assert arms[-1][1] == (0,)
        begins = [begin for begin, _ in arms]
        assert begins == list(range(begins[0], begins[-1] + 1, 6))


def test_waiting_ranks_of_a_role_go_deeper_than_the_one_that_is_late() -> None:
    """Rank 0 comes late and computes until its short section; no stretch is worth its while."""
    late = offer(0, sections={"ar/1": 0.02})
    waiting = [offer(r, sections={"ar/1": 0.5}, stretches=["ar/1"]) for r in (1, 2)]
    job = Job([late, *waiting])
    (target,) = targets_of([late, *waiting])
    assert target.roles == ((1, 2),)
    assert target.wait[0] == 0.0
    assert target.wait[1] == target.wait[2] == pytest.approx(0.96)
    found = job.until_found()
    assert found.depths[0][0] == 0
    assert min(found.depths[0][1:]) > 0


def test_roles_are_searched_apart() -> None:
    stages = [
        offer(r, sections={"ar/1": 0.4}, stretches=["ar/1"], role=f"stage {r // 2}")
        for r in range(4)
    ]
    (target,) = targets_of(stages)
    assert target.roles == ((0, 1), (2, 3))


def test_a_later_run_only_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Job(ddp()).until_found()
    second = Job(ddp(), saved=first)
    found = second.until_found()
    assert found.known
    assert found.depths == first.depths
    assert found.blocks < first.blocks / 2


def test_what_was_saved_and_does_not_hold_any_more_is_given_back() -> None:
    saved = Job(ddp()).until_found()
    found = Job(ddp(), {"ar/1": 0.9}, saved=saved).until_found()
    assert max(found.depths[0]) < min(saved.depths[0])


@pytest.mark.parametrize(
    "change", [{"clocks_hz": (1e9,)}, {"keys": ("other",)}, {"depths": ((1,),)}, {"depths": ()}]
)
def test_settings_of_another_job_are_not_used(change: dict[str, Any]) -> None:
    saved = msgspec.structs.replace(Job(ddp()).until_found(), **change)
    job = Job(ddp(), saved=saved)
    assert not job.until_found().known


def test_an_order_that_a_rank_reads_too_late_is_repeated() -> None:
    """Rank 1 looks at every 40th iteration alone."""
    job = Job(ddp(), delayed=lambda rank, index: rank == 1 and index % 40 != 0)
    found = job.until_found()
    assert found.taken == "sections"
    for (_, mine), (_, others) in zip(job.told[0][-3:], job.told[1][-3:], strict=True):
        assert mine == others


def test_a_rank_that_cannot_set_ends_the_search_for_all() -> None:
    job = Job(ddp())
    job.iterate(20)
    job.ranks[1].refused = "no permission"
    found = job.until_found()
    assert found.taken == "default"
    assert "rank 1: no permission" in found.reason
    assert not found.held
    assert [told[-1] for told in job.told] == [((0,), [])] * 2


def test_what_is_held_is_undone_when_it_becomes_slower() -> None:
    job = Job(ddp(), {"ar/1": 0.0})
    assert job.until_found().held
    job._harmless["ar/1"] = 1.0
    job.iterate(5000)
    found = job.ranks[1].found
    assert found is not None
    assert not found.held
    assert "while it was held" in found.reason


def test_the_default_is_run_in_one_of_a_hundred_iterations_while_a_clock_is_held() -> None:
    job = Job(ddp())
    job.until_found()
    begin, told = job.index, len(job.told[0])
    job.iterate(5000)
    orders = job.told[0][told:]
    assert orders
    assert 6 * len(orders) <= 0.013 * (job.index - begin)


def test_one_clock_for_the_whole_job_is_taken_where_it_pays_more() -> None:
    job = Job([offer(r, sections={"ar/1": 0.15}, stretches=["ar/1"]) for r in range(2)])
    job.leader._contract = Contract(max_slowdown=0.05)
    found = job.until_found()
    assert found.taken == "whole job"
    assert found.whole_job_saving is not None
    assert found.sections_saving is not None
    assert found.whole_job_saving > found.sections_saving
    assert all(told[-1] == ((0,), []) for told in job.told)


def test_nothing_to_slow_down_ends_at_once() -> None:
    job = Job([offer(0, sections={"ar/1": 0.99}), offer(1, sections={"ar/1": 0.99})])
    found = job.until_found(most=5)
    assert found.taken in ("default", "whole job")
    assert found.blocks == 0


def test_after_the_death_of_a_rank_the_others_are_back_at_the_default() -> None:
    """Whatever block was running: its arms end with the default, and no order follows."""
    for dies_at in (4, 20, 30, 45, 60):
        job = Job(ddp(3), delayed=lambda rank, index, at=dies_at: rank == 1 and index >= at)
        job.iterate(300)
        for told in (job.told[0], job.told[2]):
            now, arms = told[-1] if told else ((0,), [])
            assert now == (0,)
            assert not arms or arms[-1][1] == (0,)
            assert not arms or arms[-1][0] < 150
        assert job.ranks[0].found is None


def test_a_change_that_one_rank_sees_reaches_all() -> None:
    job = Job(ddp())
    job.iterate(5)
    assert not job.ranks[0].reopened
    job.ranks[1].reopen()
    assert all(rank.reopened for rank in job.ranks)


def test_a_search_goes_on_with_simulated_ranks_after_the_script() -> None:
    offers = ddp()
    job = Job(offers)
    job.iterate(40)
    assert job.leader.found is None
    found = job.leader.rehearse(SimulatedRanks(offers, job.leader.targets, CARD, H200.switch))
    assert found is not None
    assert found.rehearsed
    assert found.taken == "sections"


def test_keys_of_a_stretch_over_several_sections_name_both_ends() -> None:
    one = stretch("a", 0.0, 0.5)
    assert key_of(one) == "a"
    assert key_of(msgspec.structs.replace(one, last="b")) == "a to b"


def test_computation_before_a_section_is_slower_without_effect_as_far_as_it_has_slack() -> None:
    """The search does not go below the clock at which it would delay the communication."""
    section = stretch("ar/1", 0.35, 0.6)
    own = ddp()[0]
    for slack in (2, 7):
        cover = Cover(
            after="ar/0", lead_s=0.2, compute_s=0.2, stretch=CARD.levels[slack - 1].stretch
        )
        low = msgspec.structs.replace(
            section,
            cover=cover,
            start_s=section.start_s - cover.lead_s,
            down_at_s=section.down_at_s - cover.lead_s,
        )
        taken = msgspec.structs.replace(own.found, stretches=(low,))
        offers = [msgspec.structs.replace(own, rank=rank, found=taken) for rank in (0, 1)]
        found = Job(offers).until_found()
        assert all(abs(depth - slack) <= 1 for depth in found.depths[0]), (slack, found.depths)
        assert found.time_ratio is not None
        assert found.time_ratio < 1.01
