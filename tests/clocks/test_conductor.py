"""Several ranks in one process: conductors that share a board, each with hands of its own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.clocks.block_messages import below, height
from kilter.clocks.conductor import Conductor, GovernorProgram, watching
from kilter.clocks.plan.governor import BlockOutcome, Order, Phase
from kilter.core.errors import DeviceError, DeviceLost, FileError, NotObeyed
from kilter.core.events import AnyEvent, Block, Refused
from kilter.core.messages import LocalMessages
from kilter.core.plan import Goal
from kilter.core.setting import Sample, Setting, Supported
from kilter.observe.end_times import Iteration

FOUND = Setting()
LOW = Setting(sm_clock_hz=1.0e9)
SENSOR_S = 0.01
"""Blocks of a second: the least."""


@dataclass
class Actuator:
    """A card of one watt for each tenth of a gigahertz; remembers what it was asked."""

    power_w: float = 100.0
    asked: list[Setting] = field(default_factory=list)
    apply_error: Exception | None = None
    check_error: Exception | None = None
    slow: bool = False
    """Settles only when told to."""
    unknown: bool = False

    def apply(self, setting: Setting) -> None:
        if self.apply_error is not None and setting != Setting():
            raise self.apply_error
        self.asked.append(setting)

    def check(self) -> None:
        if self.check_error is not None:
            raise self.check_error

    def settled(self) -> bool:
        return not self.slow

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        assert end_s > begin_s
        return None if self.unknown else self.power_w

    def sustained(self) -> Setting:
        return Setting(sm_clock_hz=1.5e9)

    def recent(self) -> Sequence[Sample]:
        return ()


class Script:
    """Orders: a warm block, then pairs for ever. Keeps the outcomes and what was thrown."""

    def __init__(self, found: Setting = FOUND) -> None:
        self.found = found
        self.outcomes: list[BlockOutcome] = []
        self.thrown: list[str] = []

    def orders(self) -> Generator[Order, BlockOutcome, None]:
        try:
            yield from self._pairs()
        except DeviceError as error:
            self.thrown.append(str(error))
            for order in watching(self.found):
                self.outcomes.append((yield order))

    def _pairs(self) -> Generator[Order, BlockOutcome, None]:
        pair = 0
        self.outcomes.append((yield self._order(Phase.WARM, True, None)))
        while True:
            pair += 1
            for baseline in (True, False):
                self.outcomes.append((yield self._order(Phase.PROBE, baseline, pair)))

    def _order(self, phase: Phase, baseline: bool, pair: int | None) -> Order:
        setting = self.found if baseline else self.found.with_(sm_clock_hz=LOW.sm_clock_hz)
        return Order(phase=phase, setting=setting, baseline=baseline, pair=pair, reason="test")


class Job:
    """Ranks in lockstep or apart; rank k's iterations last `times[k]`."""

    def __init__(
        self,
        ranks: int,
        *,
        times: list[float] | None = None,
        actuators: list[Actuator] | None = None,
        found: Setting = FOUND,
        own: list[Setting] | None = None,
    ) -> None:
        self.actuators = actuators or [Actuator() for _ in range(ranks)]
        self.times = times or [0.1] * ranks
        self.script = Script(found)
        self.events: list[list[AnyEvent]] = [[] for _ in range(ranks)]
        self.messages = LocalMessages()
        self.done = [0] * ranks
        self.now_s = [0.0] * ranks
        self.conductors = [
            Conductor(
                self.actuators[rank],
                self.messages,
                found=own[rank] if own else found,
                rank=rank,
                world_size=ranks,
                sensor_period_s=SENSOR_S,
                orders=self.script.orders() if rank == 0 else None,
                record=self.events[rank].append,
                clock=lambda rank=rank: self.now_s[rank],  # type: ignore[misc]
            )
            for rank in range(ranks)
        ]

    def iterate(self, rank: int, seconds: float | None = None) -> None:
        lasted = self.times[rank] if seconds is None else seconds
        self.now_s[rank] += lasted
        self.conductors[rank].iteration(Iteration(self.done[rank], self.now_s[rank], lasted))
        self.done[rank] += 1

    def all(self, count: int) -> None:
        for _ in range(count):
            for rank in range(len(self.actuators)):
                self.iterate(rank)

    @property
    def blocks(self) -> list[Block]:
        return [event for event in self.events[0] if isinstance(event, Block)]

    def refusals(self, rank: int) -> list[str]:
        return [event.reason for event in self.events[rank] if isinstance(event, Refused)]


def test_the_slowest_rank_gives_the_time_and_all_of_them_the_energy() -> None:
    job = Job(3, times=[0.1, 0.3, 0.2], actuators=[Actuator(100.0), Actuator(50.0), Actuator(10.0)])
    job.all(200)
    assert len(job.blocks) > 10
    for outcome in job.script.outcomes:
        assert outcome.iteration_s == pytest.approx(0.3)
        assert outcome.energy_j == pytest.approx(100 * 0.1 + 50 * 0.3 + 10 * 0.2)


def test_energy_is_unknown_if_one_rank_does_not_know_it() -> None:
    job = Job(2, actuators=[Actuator(), Actuator(unknown=True)])
    job.all(30)
    assert {outcome.energy_j for outcome in job.script.outcomes} == {None}


def test_all_ranks_are_asked_for_the_same_in_the_same_order() -> None:
    job = Job(4)
    job.all(300)
    assert len(job.actuators[0].asked) > 10
    assert LOW in job.actuators[0].asked
    for actuators in job.actuators[1:]:
        assert actuators.asked == job.actuators[0].asked


def test_a_knob_that_ranks_have_found_differently_is_left_as_it_is() -> None:
    mine, others = Setting(power_limit_w=300.0), Setting(power_limit_w=250.0)
    job = Job(2, found=mine, own=[mine, others])
    job.all(100)
    assert {block.setting for block in job.blocks} == {mine, mine.with_(sm_clock_hz=1.0e9)}
    for actuators in job.actuators:
        assert set(actuators.asked) == {Setting(), LOW}


def test_a_late_rank_is_waited_for_without_waiting() -> None:
    job = Job(3)
    for _ in range(50):
        job.iterate(0)
        job.iterate(1)
    assert job.blocks == []
    for _ in range(60):
        job.iterate(2)
    job.all(60)
    assert len(job.blocks) > 2


def test_a_rank_that_never_answers_again_leaves_the_others_at_the_default() -> None:
    job = Job(3)
    job.all(30)
    seen = len(job.blocks)
    assert seen > 0
    for _ in range(1500):
        job.iterate(0)
        job.iterate(1)
    assert job.script.thrown == ["rank 2 does not answer any more"]
    for actuator in job.actuators[:2]:
        assert actuator.asked[-1] == FOUND
    assert len(job.blocks) > seen + 10, "the others go on without it"
    job.iterate(2)
    for _ in range(1500):
        job.iterate(2)  # it comes back, and finds no order any more
    assert job.actuators[2].asked[-1] == FOUND


def test_without_rank_0_the_others_go_back_to_the_default() -> None:
    job = Job(2)
    while job.actuators[1].asked[-1:] != [LOW]:
        job.all(1)
    for _ in range(1500):
        job.iterate(1)
    assert job.actuators[1].asked[-1] == FOUND
    refused = [e.reason for e in job.events[1] if isinstance(e, Refused)]
    assert refused == ["rank 1 has heard nothing of the other ranks for too long"]


def test_many_ranks_report_through_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilter.clocks.block_messages.FAN_OUT", 3)
    job = Job(30, times=[0.1] * 29 + [0.13])
    posted: list[str] = []
    post = job.messages.post

    def counted(name: str, message: bytes) -> None:
        posted.append(name)
        post(name, message)

    monkeypatch.setattr(job.messages, "post", counted)
    job.all(40)
    assert len(job.blocks) > 1
    assert all(block.iteration_s == pytest.approx(0.13) for block in job.blocks)
    assert all(block.energy_j == pytest.approx(100.0 * (29 * 0.1 + 0.13)) for block in job.blocks)
    assert not any(name.startswith(("ready/0/0", "result/0/0")) for name in posted)
    for kind in ("ready", "result"):
        assert sum(name.startswith(f"{kind}/0/") for name in posted) == 29
    assert [list(below(rank, 30)) for rank in (0, 1, 9, 10)] == [
        [1, 2, 3],
        [4, 5, 6],
        [28, 29],
        [],
    ]
    assert [height(rank, 30) for rank in (0, 1, 9, 10)] == [3, 2, 1, 0]


def test_a_rank_whose_card_settles_late_delays_the_block_of_all() -> None:
    job = Job(2, actuators=[Actuator(), Actuator(slow=True)])
    job.all(50)
    assert job.blocks == []
    job.actuators[1].slow = False
    job.all(20)
    first = job.blocks[0]
    assert first.device_begin_s > 50 * 0.1


def test_iterations_that_began_before_the_setting_acted_do_not_count() -> None:
    job = Job(1)
    job.iterate(0)
    begin = int(job.messages.look("begin/0") or b"")
    assert begin == 2, "0 ended before, 1 was running"


def test_a_block_with_a_stall_is_done_again_and_at_most_twice() -> None:
    job = Job(2)
    job.all(40)
    seen = len(job.blocks)
    while len(job.blocks) < seen + 5:
        for _ in range(4):
            job.all(1)
        job.iterate(0)
        job.iterate(1, seconds=2.0)  # a checkpoint, on one rank only
    first = next(i for i, block in enumerate(job.blocks) if not block.clean)
    again = job.blocks[first : first + 3]
    assert [block.clean for block in again] == [False, False, True]
    assert {block.setting for block in again} == {again[0].setting}
    assert {block.pair for block in again} == {again[0].pair}
    assert len(job.script.outcomes) == sum(block.clean for block in job.blocks)


def test_an_iteration_that_was_not_timed_leaves_a_hole_and_no_more() -> None:
    """A skipped optimizer step, or a switch of streams."""
    job = Job(1)
    for index in range(300):
        if index % 7 == 3:
            job.done[0] += 1
            job.now_s[0] += 0.1
        else:
            job.iterate(0)
    assert len(job.blocks) > 10
    for outcome in job.script.outcomes:
        assert outcome.iteration_s == pytest.approx(0.1)
        assert outcome.energy_j == pytest.approx(10.0)


def test_a_block_of_which_nothing_was_timed_ends_too() -> None:
    job = Job(1)
    job.all(3)
    job.done[0] += 1000
    job.now_s[0] += 100.0
    job.all(30)
    assert len(job.blocks) > 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [DeviceLost("gone"), FileError("full"), NotObeyed("a lie")])
@pytest.mark.parametrize("where", ["apply", "check"])
def test_a_rank_that_cannot_set_stops_the_setting_on_all(
    rank: int, error: Exception, where: str
) -> None:
    job = Job(2)
    job.all(60)
    setattr(job.actuators[rank], f"{where}_error", error)
    seen = len(job.blocks)
    job.all(100)
    assert job.conductors[rank].refused == str(error)
    assert job.refusals(rank) == [str(error)]
    assert job.script.thrown == [f"rank {rank}: {error}"]
    unclean = [block for block in job.blocks[seen:] if not block.clean]
    assert [block.why_not for block in unclean] == [f"rank {rank}: {error}"]
    after = job.blocks[job.blocks.index(unclean[0]) + 1 :]
    assert len(after) > 3
    assert {block.arm for block in after} == {"baseline"}
    assert job.actuators[1 - rank].asked[-1] == Setting()
    asked = len(job.actuators[rank].asked)
    job.all(30)
    assert len(job.actuators[rank].asked) == asked, "the lease is over: it is not asked again"


def test_a_rank_that_may_not_set_from_the_start() -> None:
    job = Job(2)
    job.conductors[1].refused = "no permission"
    job.all(60)
    assert job.actuators[1].asked == []
    assert set(job.actuators[0].asked) == {Setting()}
    assert job.script.thrown == ["rank 1: no permission"]


def test_the_program_gives_its_choice_up() -> None:
    supported = Supported(sm_clocks_hz=(0.9e9, 1.2e9, 1.5e9))
    program = GovernorProgram(Goal(max_slowdown=0.02), Setting(), supported, Actuator(), seed=0)
    orders = program.orders()
    order = next(orders)
    for _ in range(5):
        order = orders.send(BlockOutcome(iteration_s=1.0, energy_j=1.0))
    order = orders.throw(DeviceError("refused"))
    assert (order.setting, order.baseline) == (Setting(), True)
    assert program.choice.setting == Setting()
    assert program.choice.reason == "the default stands: refused"


def test_messages_are_dropped() -> None:
    job = Job(2, times=[1.0, 1.0])
    job.all(200)
    notes = len(job.messages._messages)
    job.all(3000)
    assert len(job.blocks) > 400
    assert len(job.messages._messages) <= notes + 4
    assert all(len(conductor._seen) < 20 for conductor in job.conductors)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4))
def test_any_interleaving_gives_the_same_blocks(data: st.DataObject, ranks: int) -> None:
    """Ranks drift apart by as much as a collective allows, and look at the board when they like:
    all measure the same iterations under the same setting, none waits, and none gets lost."""
    actuators = [Actuator() for _ in range(ranks)]
    job = Job(ranks, actuators=actuators)
    for _ in range(data.draw(st.integers(10, 120), label="rounds")):
        order = data.draw(st.permutations(range(ranks)), label="order")
        late = data.draw(st.sets(st.sampled_from(range(ranks)), max_size=1), label="late")
        for rank in order:
            actuators[rank].slow = rank in late
        for rank in order:
            for _ in range(data.draw(st.integers(1, 3))):
                if job.done[rank] <= min(job.done) + 2:
                    job.iterate(rank)
        for rank in data.draw(st.lists(st.sampled_from(range(ranks)), max_size=3)):
            job.conductors[rank].step()
    for rank in range(ranks):
        actuators[rank].slow = False
    while min(job.done) < max(job.done):
        job.iterate(job.done.index(min(job.done)))
    before = len(job.blocks)
    job.all(60)
    assert len(job.blocks) > before, "it goes on"
    numbers = [block.number for block in job.blocks]
    assert numbers == list(range(len(numbers)))
    shortest = min(len(hand.asked) for hand in actuators)
    assert {tuple(hand.asked[:shortest]) for hand in actuators} == {
        tuple(actuators[0].asked[:shortest])
    }
    assert max(len(hand.asked) for hand in actuators) - shortest <= 1
    ends = [block.device_end_s for block in job.blocks]
    begins = [block.device_begin_s for block in job.blocks]
    assert all(begin >= end - 1e-9 for begin, end in zip(begins[1:], ends, strict=False))
