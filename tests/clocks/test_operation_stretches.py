"""Stretches of operations for the conductor: what is worth switching, and what is set when."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.clocks.operation_plan import ordered_operations
from kilter.clocks.plan.guard import Contract
from kilter.clocks.plan.operation_stretches import (
    OperationStretches,
    OrderedOperations,
    as_set,
    operation_stretches,
)
from kilter.clocks.plan.section_job import PlannedOperations, RankOffer
from kilter.clocks.plan.timing import Commanded, at_depths, schedule
from kilter.clocks.plan.worth import ClockCosts, LevelEffect
from kilter.clocks.section_card import card_of
from kilter.clocks.section_conductor import Follow, SectionConductor
from kilter.clocks.section_leader import SectionLeader
from kilter.clocks.section_rehearsal import SimulatedRanks
from kilter.core.label import Label
from kilter.core.section_record import SectionsFound
from kilter.core.setting import CLOCKS, Setting
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.device.sim.cards import names
from kilter.device.sim.profile import Profile, load_profile

H200, RTX = load_profile("h200"), load_profile("rtx3080ti")
BOUND = 0.02
RIDGE = 200.0
"""About the FLOP per byte at which an H200 computes as long as its memory moves."""


def card(switch_s: float, profile: Profile = H200) -> ClockCosts:
    memory = profile.knobs.memory_clocks_hz
    return card_of(profile, switch_s=switch_s, levels=6, memory_clocks_hz=memory)


def trace(*parts: tuple[float, bool | None]) -> IterationTrace:
    """Operations of these lengths; True: they compute, False: they move memory, None: waiting."""
    operations, start_s = [], 0.0
    for length_s, computes in parts:
        layer = Operation(
            name="layer",
            kind=Kind.FORWARD,
            start_s=start_s,
            duration_s=length_s,
            flops=1e12 if computes else 1e9,
            bytes_moved=1e12 / RIDGE / (100.0 if computes else 1.0),
        )
        gap = Operation(name="gap", kind=Kind.GAP, start_s=start_s, duration_s=length_s)
        operations.append(gap if computes is None else layer)
        start_s += length_s
    return IterationTrace(
        iteration_s=start_s,
        operations=tuple(operations),
        timeline="host",
        device="cpu",
        label=Label.MEASURED,
    )


def planned(
    *parts: tuple[float, bool | None],
    switch_s: float = 0.01,
    max_slowdown: float = BOUND,
    profile: Profile = H200,
) -> tuple[OperationStretches, OrderedOperations, ClockCosts]:
    costs = card(switch_s, profile)
    ordered = ordered_operations(profile, trace(*parts), costs)
    return operation_stretches(ordered, costs, max_slowdown=max_slowdown), ordered, costs


COMPUTES, MOVES, WAITS = True, False, None
WAITING = [(0.5, COMPUTES), (0.1, MOVES), (0.8, WAITS), (0.1, MOVES), (0.5, COMPUTES)]


def test_operations_that_wait_for_memory_get_a_lower_clock_in_one_stretch() -> None:
    made, ordered, _ = planned((0.5, COMPUTES), (0.1, MOVES), (0.1, MOVES), (0.5, COMPUTES))
    (stretch,) = made.found.stretches
    assert (stretch.first, stretch.last) == ("forward layer #2", "forward layer #3")
    assert (stretch.start_s, stretch.end_s) == pytest.approx((0.5, 0.7))
    assert stretch.sections == 2
    assert made.pays
    assert made.found.saving > made.whole_job_saving
    assert made.found.slowdown <= BOUND
    assert "1 stretch of operations would save" in made.summary
    assert len(set(ordered.names)) == 4


@pytest.mark.parametrize(
    ("parts", "switch_s", "max_slowdown", "words"),
    [
        (
            [(0.35, COMPUTES), (0.1, MOVES), (0.35, COMPUTES)],
            0.2,
            BOUND,
            "the longest stretch takes 350 ms, below the break-even of 400 ms.",
        ),
        (
            [(0.05, COMPUTES), (0.02, MOVES), (0.05, COMPUTES)],
            0.0001,
            BOUND,
            "an iteration of 120 ms is too short for two clock calls at 10 per second.",
        ),
        ([(0.5, MOVES)], 0.01, 0.0, "no operation saves energy within the bound."),
    ],
)
def test_where_nothing_is_worth_switching_a_sentence_says_why(
    parts: list[tuple[float, bool]], switch_s: float, max_slowdown: float, words: str
) -> None:
    made, *_ = planned(*parts, switch_s=switch_s, max_slowdown=max_slowdown)
    assert not made.found.stretches
    assert not made.pays
    assert f"Nothing is worth switching: {words}" in made.summary
    assert "One clock for the whole iteration would save" in made.summary


def test_operations_that_compute_get_a_lower_memory_clock_where_that_saves_more() -> None:
    parts = [(1.0, COMPUTES), (0.1, MOVES), (1.0, COMPUTES)]
    made, *_ = planned(*parts, profile=RTX)
    sm_alone = card_of(RTX, switch_s=0.01, levels=6)
    without = operation_stretches(
        ordered_operations(RTX, trace(*parts), sm_alone), sm_alone, max_slowdown=BOUND
    )
    assert [stretch.memory_clock_hz for stretch in made.found.stretches] == [5.001e9, 5.001e9]
    assert made.found.saving > 5.0 * without.found.saving
    assert made.found.slowdown <= BOUND


def test_memory_clocks_are_those_of_the_device_and_never_an_idle_one() -> None:
    knobs = RTX.knobs
    lower_hz = {hz for level in card(0.01, RTX).levels if (hz := level.memory_clock_hz)}
    assert lower_hz == {9.251e9, 5.001e9}
    assert {8.1e8, *lower_hz} < set(knobs.memory_clocks_hz)
    other = card_of(RTX, levels=6, memory_clocks_hz=(1e9, 5.001e9))
    assert [level.memory_clock_hz for level in other.levels] == [None] * 6 + [5.001e9] * 7


@pytest.mark.parametrize("name", names())
def test_a_step_back_lowers_neither_clock_and_leads_to_the_default(name: str) -> None:
    profile = load_profile(name)
    costs = card(0.01, profile)
    for depth, level in enumerate(costs.levels, 1):
        back = costs.back(depth)
        gentler = costs.levels[back - 1].setting if back else Setting()
        for knob in CLOCKS:
            now_hz, then_hz = getattr(level.setting, knob), getattr(gentler, knob)
            assert then_hz is None or (now_hz is not None and now_hz <= then_hz)
        assert 0 <= back < depth
        if level.memory_clock_hz is None:
            assert back == depth - 1


@pytest.mark.parametrize("name", ["v100", "a100"])
def test_with_one_memory_clock_there_are_no_pairs(name: str) -> None:
    profile = load_profile(name)
    assert card(0.01, profile) == card_of(profile, switch_s=0.01, levels=6)
    assert {level.setting.calls for level in card(0.01, profile).levels} == {1}


def test_a_wait_between_computing_and_memory_traffic_gets_both_clocks() -> None:
    made, _, costs = planned(*WAITING, profile=RTX)
    taken = [costs.level_of(stretch).setting for stretch in made.found.stretches]
    memory = Setting(memory_clock_hz=5.001e9)
    assert taken == [memory, Setting(sm_clock_hz=6.3e8, memory_clock_hz=5.001e9), memory]


def test_where_one_clock_saves_more_it_is_preferred() -> None:
    made, *_ = planned((0.5, MOVES), (0.001, COMPUTES), (0.5, MOVES))
    assert made.whole_job_saving > 0.0
    assert not made.pays


PARTS = st.lists(
    st.tuples(st.floats(1e-5, 0.5), st.sampled_from([COMPUTES, MOVES, WAITS])),
    min_size=1,
    max_size=12,
).map(
    lambda parts: [
        b for a, b in pairwise([(0.0, COMPUTES), *parts]) if (a[1], b[1]) != (WAITS,) * 2
    ]
)
"""A wait that follows a wait is the same one."""


@given(
    parts=PARTS,
    profile=st.sampled_from([H200, RTX]),
    switch_s=st.sampled_from([1e-6, 1e-3, 0.01, 0.1, 10.0]),
    max_slowdown=st.sampled_from([0.0, 0.005, 0.02, 0.2]),
)
@settings(deadline=None, max_examples=15)
def test_every_plan_keeps_the_bound_the_break_even_and_the_rate_of_calls(
    parts: list[tuple[float, bool | None]], profile: Profile, switch_s: float, max_slowdown: float
) -> None:
    made, ordered, costs = planned(
        *parts, profile=profile, switch_s=switch_s, max_slowdown=max_slowdown
    )
    stretches = made.found.stretches
    assert made.found.slowdown <= max_slowdown + 1e-12
    assert made.found.saving >= 0.0
    calls = sum(costs.level_of(stretch).setting.calls for stretch in stretches)
    assert 2 * calls <= costs.calls_per_s * ordered.iteration_s
    commands = schedule(stretches, costs, ordered.iteration_s).commands
    assert [c.edge for c in commands] == ["down", "up"] * len(stretches)
    for stretch, depth in zip(stretches, made.depths, strict=True):
        level = costs.level_of(stretch)
        assert stretch.end_s - stretch.start_s >= level.setting.calls * costs.break_even_s
        assert costs.level_of(stretch) == costs.levels[depth - 1]
        assert stretch.saved_j > 0.0
        # What a stretch does is what the tables say of its operations.
        first, last = (ordered.names.index(name) for name in (stretch.first, stretch.last))
        inside = ordered.time_s[first : last + 1]
        effect = stretch.effects[depth - 1]
        assert effect.delay_s == pytest.approx(float((inside[:, depth] - inside[:, 0]).sum()))


@given(
    parts=PARTS,
    profile=st.sampled_from([H200, RTX]),
    switch_s=st.sampled_from([1e-6, 0.01, 0.1]),
    max_slowdown=st.sampled_from([0.0, 0.02, 0.2]),
)
@settings(deadline=None, max_examples=6)
def test_pairs_of_clocks_never_make_a_plan_worse(
    parts: list[tuple[float, bool | None]], profile: Profile, switch_s: float, max_slowdown: float
) -> None:
    made, *_ = planned(*parts, profile=profile, switch_s=switch_s, max_slowdown=max_slowdown)
    every = card(switch_s, profile)
    one = tuple(level for level in every.levels if level.setting.calls == 1)
    sm_alone = tuple(level for level in one if level.memory_clock_hz is None)
    for levels in (one, sm_alone):
        fewer = msgspec.structs.replace(every, levels=levels)
        ordered = ordered_operations(profile, trace(*parts), fewer)
        without = operation_stretches(ordered, fewer, max_slowdown=max_slowdown)
        assert made.found.saving >= without.found.saving - 1e-12


@given(lengths=st.lists(st.floats(0.05, 0.4), min_size=3, max_size=3))
@settings(deadline=None, max_examples=10)
def test_one_stretch_is_as_good_as_the_best_of_all(lengths: list[float]) -> None:
    """Switches cost nothing, and there are calls for one stretch: against every first and last
    operation and every clock."""
    parts = list(zip(lengths, (COMPUTES, MOVES, COMPUTES), strict=True))
    made, ordered, costs = planned(*parts, switch_s=0.0)
    budget_s = BOUND * float(ordered.time_s[:, 0].sum())
    best_j = 0.0
    for first in range(3):
        for last in range(first, 3):
            change_s = (ordered.time_s - ordered.time_s[:, :1])[first : last + 1].sum(axis=0)
            saved_j = (ordered.energy_j[:, :1] - ordered.energy_j)[first : last + 1].sum(axis=0)
            best_j = max(best_j, float(saved_j[change_s <= budget_s].max()))
    if costs.calls_per_s * ordered.iteration_s >= 2:
        found_j = made.found.saving * made.found.iteration_j
        assert found_j >= best_j * (1.0 - 1e-6)


def test_later_stretches_move_by_what_the_ones_before_cost() -> None:
    made, *_ = planned(
        *[(0.5, COMPUTES), (0.2, MOVES), (0.5, COMPUTES), (0.2, MOVES), (0.5, COMPUTES)]
    )
    first, second = (
        msgspec.structs.replace(s, effects=(LevelEffect(delay_s=0.01, saved_j=1.0),) * 6)
        for s in made.found.stretches
    )
    one, other = as_set((first, second), (2, 1))
    assert one.start_s == first.start_s
    assert one.end_s == pytest.approx(first.end_s + 0.01)
    assert other.start_s == pytest.approx(second.start_s + 0.01)
    assert other.up_at_s == pytest.approx(second.up_at_s + 0.02)
    assert as_set((first, second), (0, 0)) == (first, second)


class Clock:
    """A setter that remembers, on a clock of the test."""

    sets = True

    def __init__(self) -> None:
        self.now_s = 0.0
        self.low: list[tuple[float, Setting]] = []

    def down(self, low: Setting, hold_s: float) -> None:
        self.low.append((self.now_s, low))

    def up(self) -> None:
        self.low.append((self.now_s, Setting()))


@pytest.mark.parametrize(
    ("profile", "parts"),
    [
        (H200, [(0.5, COMPUTES), (0.3, MOVES), (0.5, COMPUTES), (0.3, MOVES), (0.5, COMPUTES)]),
        (RTX, [(0.3, COMPUTES), (0.5, MOVES), (0.5, COMPUTES), (0.5, MOVES), (0.3, COMPUTES)]),
        (RTX, [(0.1, MOVES), *WAITING, (0.1, MOVES)]),
    ],
)
def test_the_conductor_of_sections_sets_the_clocks_of_operations_in_every_iteration(
    profile: Profile, parts: list[tuple[float, bool | None]]
) -> None:
    made, ordered, costs = planned(*parts, profile=profile)
    assert len(made.depths) >= 2
    clock = Clock()
    log: list[Commanded] = []
    conductor = SectionConductor(clock, log.append, lambda: clock.now_s)  # type: ignore[arg-type]
    stretches = at_depths(made.found.stretches, made.depths, costs)
    conductor.follow(Follow(schedule=schedule(stretches, costs, ordered.iteration_s)))
    for iteration in range(3):
        end_s = (iteration + 1) * ordered.iteration_s
        conductor.passed(iteration, clock.now_s)
        while conductor.due_s < end_s:
            clock.now_s = conductor.due_s
            conductor.act()
        clock.now_s = end_s
    wanted = [
        (iteration * ordered.iteration_s + at_s, setting)
        for iteration in range(3)
        for stretch in stretches
        for at_s, setting in (
            (stretch.down_at_s, costs.level_of(stretch).setting),
            (stretch.up_at_s, Setting()),
        )
    ]
    assert [setting for _, setting in clock.low] == [setting for _, setting in wanted]
    assert [t for t, _ in clock.low] == pytest.approx([t for t, _ in wanted])
    assert {line.state for line in log} == {"set"}


def judged(offer: RankOffer, truth: RankOffer, costs: ClockCosts) -> SectionsFound | None:
    """What the joint comparison with plain iterations makes of an offer in a job of this truth."""
    leader = SectionLeader(
        costs,
        Contract(max_slowdown=BOUND),
        device="test",
        saved=lambda signature: None,
        save=lambda signature, found: None,
    )
    targets = leader.begin([offer])
    return leader.rehearse(SimulatedRanks([truth], targets, costs, H200.switch))


def offered() -> tuple[RankOffer, ClockCosts]:
    made, _, costs = planned((0.5, COMPUTES), (0.4, MOVES), (0.5, COMPUTES), switch_s=0.03)
    planned_operations = PlannedOperations(
        depths=made.depths, whole_job_saving=made.whole_job_saving
    )
    offer = RankOffer(rank=0, role="", found=made.found, lengths=(), operations=planned_operations)
    return offer, costs


def test_the_plan_is_confirmed_against_plain_iterations_before_it_stands() -> None:
    offer, costs = offered()
    found = judged(offer, offer, costs)
    assert found is not None
    assert found.taken == "sections"
    assert found.depths == ((offer.operations.depths[0],),)  # type: ignore[union-attr]
    assert found.time_ratio is not None
    assert found.time_ratio <= 1.0 + BOUND
    assert found.energy_ratio == pytest.approx(1.0 - offer.found.saving, abs=0.02)
    assert not found.known
    assert "in 1 part on 1 rank" in found.reason


def test_a_plan_that_slows_the_job_down_is_given_back() -> None:
    """The operations follow the clock, other than the tables say."""
    offer, costs = offered()
    (stretch,) = offer.found.stretches
    slow = tuple(LevelEffect(delay_s=0.1, saved_j=0.0) for _ in stretch.effects)
    harmful = msgspec.structs.replace(stretch, effects=slow)
    truth = msgspec.structs.replace(
        offer, found=msgspec.structs.replace(offer.found, stretches=(harmful,))
    )
    found = judged(offer, truth, costs)
    assert found is not None
    assert found.taken == "default"
    assert not found.held


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(0.5, MOVES), (4.0, WAITS), (0.5, COMPUTES)], "765 MHz with memory 5001 MHz"),
        ([(0.5, MOVES), (4.0, COMPUTES), (0.5, MOVES)], "memory 9251 MHz"),
    ],
)
def test_of_clocks_that_slow_the_job_down_one_step_is_given_back(
    parts: list[tuple[float, bool | None]], words: str
) -> None:
    made, _, costs = planned(*parts, profile=RTX, switch_s=0.03)
    (stretch,), (depth,) = made.found.stretches, made.depths
    operations = PlannedOperations(depths=made.depths, whole_job_saving=made.whole_job_saving)
    offer = RankOffer(rank=0, role="", found=made.found, lengths=(), operations=operations)
    effects = [LevelEffect(delay_s=0.0, saved_j=stretch.saved_j)] * len(costs.levels)
    effects[depth - 1] = LevelEffect(delay_s=0.1, saved_j=0.0)
    harmful = msgspec.structs.replace(stretch, effects=tuple(effects))
    truth = msgspec.structs.replace(
        offer, found=msgspec.structs.replace(offer.found, stretches=(harmful,))
    )
    found = judged(offer, truth, costs)
    assert found is not None
    assert found.depths == ((costs.back(depth),),)
    assert found.reason == f"{words} in 1 part on 1 rank"


def test_tables_keep_the_measured_times_and_never_go_above_the_default_clock() -> None:
    parts = [(0.5, COMPUTES), (0.1, MOVES)]
    ordered = ordered_operations(H200, trace(*parts), card(0.01))
    assert ordered.time_s[:, 0] == pytest.approx([length_s for length_s, _ in parts], rel=1e-3)
    assert (ordered.time_s >= ordered.time_s[:, :1]).all()
