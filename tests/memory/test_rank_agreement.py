"""All ranks change at the same iteration end, whatever is late; or none of them does."""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec import structs

from kilter.core.messages import LocalMessages, MessagesGone
from kilter.core.ranks import Ranks
from kilter.memory import rank_agreement
from kilter.memory.iteration_times import IterationTimes
from kilter.memory.kept_calls import KeptCall, KeptCalls
from kilter.memory.kept_recompute import KeptRecompute, RecomputeWay
from kilter.memory.rank_agreement import ROUNDS, RankAgreement, TurnNote

ITERATION_S = 0.05


@pytest.fixture(autouse=True)
def one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is a process of its own, and counts the sessions there."""
    monkeypatch.setattr(rank_agreement, "_sessions", itertools.repeat(0))


class Store(LocalMessages):
    gone = False

    def look(self, name: str) -> bytes | None:
        if self.gone:
            raise MessagesGone("the store has left")
        return super().look(name)

    settle_asked = 0

    def settle(self, name: str, proposal: bytes) -> bytes:
        if self.gone:
            raise MessagesGone("the store has left")
        self.settle_asked += 1
        return super().settle(name, proposal)


class Rank:
    """A program that says a note in every turn, and goes on when it hears the others'."""

    def __init__(self, store: Store, rank: int, world_size: int, note: TurnNote) -> None:
        self.times = IterationTimes()
        self.agreement = RankAgreement(lambda: store, Ranks(rank, world_size), self.times)
        self.note = note
        self.heard: list[tuple[int, TurnNote]] = []
        self.agreement.say(note)

    def iterate(self) -> None:
        self.times.index += 1
        heard = self.agreement.heard()
        if heard is not None:
            self.heard.append((self.times.index, heard))
            self.agreement.say(self.note)


def note(
    seconds: float | None = ITERATION_S, share: float = 0.5, why_not: str = "", tensors: int = 9
) -> TurnNote:
    return TurnNote(models="Net", share=share, tensors=tensors, seconds=seconds, why_not=why_not)


def job(*notes: TurnNote) -> tuple[Store, list[Rank]]:
    store = Store()
    return store, [Rank(store, rank, len(notes), each) for rank, each in enumerate(notes)]


def run(ranks: list[Rank], iterations: int, ticks: int = 2) -> None:
    for _ in range(iterations):
        for rank in ranks:
            rank.iterate()
            for _ in range(ticks):
                rank.agreement.tick()


def test_what_rank_0_has_found_of_an_earlier_run_all_ranks_hear() -> None:
    calls = KeptCalls("events", (KeptCall("Block", 1, 4, (2, 3)),), 1000, 0.2, 0.1)
    kept = KeptRecompute(
        day="2026-11-26",
        way=RecomputeWay.CALLS,
        models="Net",
        events="events",
        share=0.5,
        each_s=1e-4,
        calls=(calls,),
    )
    _, ranks = job(structs.replace(note(None), kept=kept), note(None), note(None))
    run(ranks, 40)
    assert [rank.heard[0][1].kept for rank in ranks] == [kept] * 3
    assert len({rank.heard[0][0] for rank in ranks}) == 1


def test_the_slowest_rank_and_the_one_that_is_shortest_of_memory_count() -> None:
    _, ranks = job(note(0.05, 0.2), note(0.07, 0.9), note(0.06, 0.1, tensors=20))
    run(ranks, 40)
    assert ranks[0].heard[0][1] == note(0.07, 0.9, tensors=20)
    assert ranks[0].heard == ranks[1].heard == ranks[2].heard


def test_what_one_rank_cannot_do_is_done_by_none() -> None:
    _, ranks = job(note(), note(None, why_not="no plan in time"))
    run(ranks, 40)
    assert [rank.heard[0][1] for rank in ranks] == [note(None, why_not="no plan in time")] * 2
    _, ranks = job(note(), TurnNote(models="Other", share=0.5, tensors=9, seconds=1.0, why_not=""))
    run(ranks, 200)
    assert ranks[1].heard[0][1].why_not == "the ranks train different models"


def test_ranks_with_short_iterations_hear_of_each_other_before_a_turn_was_measured() -> None:
    """Our threads look at what was said once in 50 iterations; the first round has no turn behind
    it, but iterations were timed."""
    _, ranks = job(note(None), note(None))
    for rank in ranks:
        rank.times.mixed_s.append(0.002)
    for _ in range(40):
        run(ranks, 50, ticks=0)
        for rank in ranks:
            rank.agreement.tick()
    assert not any(rank.agreement.lost for rank in ranks)
    assert ranks[0].heard
    assert ranks[0].heard == ranks[1].heard


@pytest.mark.parametrize("seed", range(40))
def test_all_ranks_change_at_the_same_iteration_end_whatever_is_late(seed: int) -> None:
    """Threads of ours that sleep, programs that run ahead, in any order."""
    chance = random.Random(seed)
    store, ranks = job(*(note() for _ in range(3)))
    lazy = [chance.choice((0.02, 0.1, 0.6)) for _ in ranks]
    for _ in range(6000):
        number = chance.randrange(3)
        behind = ranks[number].times.index - min(rank.times.index for rank in ranks)
        if chance.random() < lazy[number]:
            ranks[number].agreement.tick()
        elif behind < 20:
            ranks[number].iterate()
    if len({bool(rank.agreement.lost) for rank in ranks}) == 1:
        least = min(len(rank.heard) for rank in ranks)
        assert least > 0 or ranks[0].agreement.lost
    for turn in itertools.zip_longest(*(rank.heard for rank in ranks)):
        assert len({index for index, _ in filter(None, turn)}) <= 1
    assert store.settle_asked > 0


def test_a_rank_that_never_answers_keeps_all_as_they_are() -> None:
    _, ranks = job(note(), note(), note())
    run(ranks[:2], 300)
    assert [rank.heard for rank in ranks] == [[], [], []]


def test_a_rank_that_is_always_late_ends_the_search_on_all() -> None:
    """It says what it has to say, and reads the answer when the iteration end has passed."""
    _, ranks = job(note(), note())
    for _ in range(4 * 2**ROUNDS * 12):
        for rank in ranks:
            rank.iterate()
        ranks[0].agreement.tick()
        now, answered = ranks[1].agreement._round, ranks[0].agreement._round
        assert now is not None
        assert answered is not None
        waits = now.said and now.name == answered.name and answered.settled is None
        begin = None if answered.answer is None else answered.answer[0]
        if not waits or (begin is not None and ranks[1].times.index > begin):
            ranks[1].agreement.tick()
    assert [rank.heard for rank in ranks] == [[], []]
    assert ranks[0].agreement.lost == ranks[1].agreement.lost != ""


def test_without_the_store_nothing_changes() -> None:
    store, ranks = job(note(), note())
    run(ranks, 1, ticks=1)
    store.gone = True
    run(ranks, 40)
    assert [rank.heard for rank in ranks] == [[], []]
    assert [rank.agreement.lost for rank in ranks] == ["the store has left"] * 2


def test_a_rank_alone_goes_on_at_once() -> None:
    _, (rank,) = job(note())
    rank.iterate()
    assert rank.heard == [(0, note())]
