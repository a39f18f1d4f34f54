"""Searches of section clocks: exact without noise, and seldom wrong with it."""

import math

import pytest

from kilter.app.bench.section_jobs import SECTION_SCENARIOS, SectionJob, SectionScenario, step_error
from kilter.app.bench.sections import play
from kilter.clocks.plan.guard import Contract
from kilter.clocks.plan.section_search import SearchTarget, Seen, search, stepwise
from kilter.clocks.section_card import card_of
from kilter.device.sim.profile import load_profile

CARD = card_of(load_profile("h200"), levels=12)
CONTRACT = Contract(max_slowdown=0.01)
ONE = SearchTarget(key="s", share=0.5, roles=((0, 1),), wait=(0.0, 0.0))


def drive(orders, block):
    """Run a search against a function from depths to (step, lengths of sections)."""
    tried = []
    try:
        trials = next(orders)
        while True:
            tried += trials
            seen = map(block, trials)
            trials = orders.send(tuple(Seen(step_s=step, section_s=own) for step, own in seen))
    except StopIteration as end:
        return end.value.depths, tried


def noiseless(harmless):
    """The section takes 0.5 s down to a depth, and 10 % more for each step below."""

    def block(depths):
        over = max(0, max(depths[0]) - harmless)
        return 0.5 + 0.5 * 1.1**over, (0.5 * 1.1**over,)

    return block


@pytest.mark.parametrize("harmless", range(13))
def test_without_noise_both_searches_find_the_lowest_harmless_clock(harmless):
    ours, _ = drive(search([ONE], lowest=12, contract=CONTRACT), noiseless(harmless))
    literal, _ = drive(stepwise([ONE], lowest=12, threshold=0.01), noiseless(harmless))
    assert ours == ((harmless, harmless),)
    assert literal == ours


def test_the_reference_is_the_default_and_interleaved():
    _, tried = drive(search([ONE], lowest=12, contract=CONTRACT), noiseless(6))
    default = ((0, 0),)
    pairs = list(zip(tried[::2], tried[1::2], strict=True))
    assert all((a == default) != (b == default) for a, b in pairs)
    assert {a == default for a, _ in pairs} == {True, False}


def test_losses_below_the_bound_add_up_in_the_literal_search_only():
    def creeping(depths):
        return 1.009 ** max(depths[0]), (1.0,)

    literal, _ = drive(stepwise([ONE], lowest=12, threshold=0.01), creeping)
    ours, _ = drive(search([ONE], lowest=12, contract=CONTRACT), creeping)
    assert literal == ((12, 12),)
    assert max(ours[0]) <= 1


def test_a_short_section_is_rejected_by_its_own_time():
    """20 % more of a section that is 2 % of the iteration is invisible in the step's noise."""
    short = SearchTarget(key="s", share=0.02, roles=((0,),), wait=(0.0,))
    noise = iter([1.0 + 0.03 * math.sin(17.0 * i) for i in range(100_000)])

    def block(depths):
        longer = 1.5 if depths[0][0] > 2 else 1.0
        return (1.0 + 0.02 * (longer - 1.0)) * next(noise), (0.02 * longer,)

    found, tried = drive(search([short], lowest=12, contract=CONTRACT), block)
    assert found[0][0] <= 2
    assert len(tried) < 800


def test_ranks_that_wait_go_deeper_alone():
    target = SearchTarget(key="s", share=0.5, roles=((0, 1, 2),), wait=(0.0, 0.5, 0.5))

    def block(depths):
        over = max(0, depths[0][0] - 3, max(depths[0][1:]) - 8)
        return 0.5 + 0.5 * 1.1**over, (0.5 * 1.1**over,)

    found, _ = drive(search([target], lowest=12, contract=CONTRACT), block)
    assert found == ((3, 8, 8),)


def test_what_harms_behind_the_section_only_is_given_back():
    """Two sections that are harmless alone and slow the step together."""
    targets = [
        SearchTarget(key=name, share=0.3, roles=((0,),), wait=(0.0,))
        for name in ("first", "second")
    ]

    def block(depths):
        both = depths[0][0] > 4 and depths[1][0] > 4
        return 1.05 if both else 1.0, (0.3, 0.3)

    found, _ = drive(search(targets, lowest=12, contract=CONTRACT), block)
    assert min(found[0][0], found[1][0]) <= 4


def test_nothing_to_search_is_no_trial():
    assert drive(search([], lowest=12, contract=CONTRACT), None) == ((), [])
    assert drive(stepwise([], lowest=12, threshold=0.01), None) == ((), [])


def test_sections_below_the_break_even_are_left_alone():
    row = play(
        "x", SECTION_SCENARIOS["ddp_nvlink_2"], CARD, "kilter", seed=0, noise=0.01, bound=0.01
    )
    assert (row.iterations, row.saving, row.slowdown) == (0, 0.0, 0.0)


def test_the_oracle_keeps_each_sections_share_and_one_step_more_breaks_it():
    for seed in range(20):
        job = SectionJob(SECTION_SCENARIOS["fsdp_8"], CARD, seed=seed, noise=0.0)
        truth = job.lowest_harmless(0.01)
        for j, row in enumerate(truth):
            alone = [(0,) * 8 for _ in truth]
            alone[j] = row
            least = job.slowdown(tuple(alone))
            assert least <= 0.01 / 4 + 1e-3
            if row[0] < job.lowest:
                alone[j] = tuple(depth + 1 for depth in row)
                assert job.slowdown(tuple(alone)) > least


def test_with_noise_the_search_is_near_the_truth_and_harms_seldom():
    small = SectionScenario(
        what="two sections of 4 GPUs", iteration_s=3.0, shares=(0.2, 0.06), roles=((0, 1), (2, 3))
    )
    rows = [
        play("x", small, CARD, "kilter", seed=seed, noise=0.01, bound=0.01) for seed in range(15)
    ]
    assert sum(row.found_step_error <= 1 for row in rows) >= 13
    assert sum(row.accepted_harmful for row in rows) <= 1


def test_step_error_is_the_largest_distance():
    assert step_error(((1, 5), (2, 2)), ((1, 3), (2, 3))) == 2
    assert step_error((), ()) == 0
