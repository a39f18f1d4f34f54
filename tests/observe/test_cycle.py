"""Which optimizer's step ends an iteration."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kilter.observe.stepped_optimizers import Cycle


def iteration_ends(steps):
    """The positions in a sequence of steps that are iteration ends."""
    cycle = Cycle()
    return [i for i, name in enumerate(steps) if cycle.step(hash(name))]


def settled(steps, period):
    """Borders of the second half, and whether they come once per `period` steps."""
    late = [i for i in iteration_ends(steps) if i >= len(steps) // 2]
    return late, all(b - a == period for a, b in pairwise(late))


def test_every_step_of_a_single_optimizer():
    assert iteration_ends("aaaa") == [0, 1, 2, 3]


@given(st.integers(2, 20))
def test_the_critic_that_steps_n_times_for_one_step_of_the_generator(n):
    steps = ("c" * n + "g") * 10
    late, regular = settled(steps, n + 1)
    assert regular
    assert late
    assert {steps[i] for i in late} == {"g"}


def test_equals_take_turns_and_the_last_ends_the_iteration():
    steps = "gd" * 10
    late, regular = settled(steps, 2)
    assert regular
    assert {steps[i] for i in late} == {"d"}


def test_one_optimizer_for_each_parameter():
    steps = [f"p{i}" for i in range(200)] * 6
    late, regular = settled(steps, 200)
    assert regular
    assert {steps[i] for i in late} == {"p199"}


def test_a_changed_pattern_is_learnt_again():
    steps = "ccccg" * 8 + "cg" * 20 + "c" * 60
    found = iteration_ends(steps)
    assert {steps[i] for i in found if 20 <= i < 80} == {"g"}
    assert [i for i in found if i >= 110] == list(range(110, 140))


def test_a_rare_optimizer_does_not_make_its_rest_an_iteration():
    steps = ("a" * 500 + "q") * 4
    late = [i for i in iteration_ends(steps) if i > 1600]
    assert all(b - a <= 2 for a, b in pairwise(late))


def test_an_interval_across_a_change_is_known_as_one():
    cycle = Cycle()
    for name in "aaab":
        cycle.step(hash(name))
    assert cycle.changed == 1
