"""Clocks per operation: against brute force, against HiGHS, and the limits of switching."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.clocks.plan.operations import (
    OperationsProblem,
    assignment,
    best_static,
    by_operation,
    plan,
)
from kilter.core.errors import PlanError


def problem(seed, operations, choices, switch_s, max_slowdown):
    """Operations between compute-bound and memory-bound on a device with one clock."""
    random = np.random.default_rng(seed)
    clock = np.linspace(1.0, 0.4, choices)
    compute, memory = random.uniform(0.0, 1e-3, (2, operations, 1))
    time_s = np.maximum(compute / clock, memory) + 1e-6
    energy_j = time_s * (60.0 + 150.0 * clock**2) + compute * 200.0 * clock**2
    return OperationsProblem(
        time_s=time_s,
        energy_j=energy_j,
        waiting_w=60.0 + 150.0 * clock**2,
        switch_s=switch_s,
        bound_s=float(time_s[:, 0].sum()) * (1.0 + max_slowdown),
    )


PROBLEMS = st.builds(
    problem,
    seed=st.integers(0, 10**6),
    operations=st.integers(1, 40),
    choices=st.integers(1, 6),
    switch_s=st.sampled_from([0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1.0, math.inf]),
    max_slowdown=st.sampled_from([0.0, 0.005, 0.02, 0.1, 0.5]),
)


@given(PROBLEMS)
@settings(deadline=None)
def test_never_worse_than_the_best_single_setting_and_within_the_bound(p):
    found = plan(p)
    assert found.best.energy_j <= best_static(p).energy_j
    assert found.best.time_s <= p.limit_s
    assert found.lower_bound_j <= found.best.energy_j * (1 + 1e-9)
    again = assignment(p, found.best.path)
    assert again.energy_j == found.best.energy_j


@given(
    seed=st.integers(0, 10**6),
    operations=st.integers(1, 6),
    switch_s=st.sampled_from([0.0, 1e-4, 1e-3]),
    max_slowdown=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
)
@settings(deadline=None, max_examples=60)
def test_brute_force_lies_between_the_lower_bound_and_the_plan(
    seed, operations, switch_s, max_slowdown
):
    p = problem(seed, operations, 3, switch_s, max_slowdown)
    every = (np.array(path) for path in itertools.product(range(3), repeat=operations))
    best_j = min(a.energy_j for path in every if (a := assignment(p, path)).time_s <= p.limit_s)
    found = plan(p)
    assert found.lower_bound_j <= best_j * (1 + 1e-9)
    assert (
        best_j * (1 - 1e-9)
        <= found.best.energy_j
        <= best_j * (1 + found.gap + 1e-9) / (1 - found.gap + 1e-12)
    )


def test_the_plan_is_the_optimum_in_most_small_cases():
    equal = 0
    for seed in range(60):
        p = problem(seed, 6, 3, (0.0, 1e-4, 3e-4)[seed % 3], (0.02, 0.05, 0.1)[seed // 3 % 3])
        every = (np.array(path) for path in itertools.product(range(3), repeat=6))
        best_j = min(a.energy_j for path in every if (a := assignment(p, path)).time_s <= p.limit_s)
        equal += plan(p).best.energy_j <= best_j * (1 + 1e-9)
    assert equal >= 54


def test_without_a_cost_of_switching_a_loose_bound_gives_every_operation_its_best():
    p = problem(3, 50, 5, 0.0, 10.0)
    assert plan(p).best.energy_j == pytest.approx(p.energy_j.min(axis=1).sum())


@pytest.mark.parametrize("switch_s", [1e9, math.inf])
def test_with_an_infinite_cost_of_switching_the_plan_is_the_best_single_setting(switch_s):
    p = problem(4, 200, 6, switch_s, 0.05)
    found = plan(p)
    assert found.best.switches == 0
    assert found.best.energy_j == best_static(p).energy_j


def test_switches_become_fewer_as_they_cost_more():
    counts = [
        plan(problem(5, 300, 6, switch_s, 0.02)).best.switches
        for switch_s in (0.0, 1e-5, 1e-4, 1e-3, 1e-2)
    ]
    assert counts[0] > 100
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] <= 2


def test_large_problems_are_solved_within_a_small_gap():
    p = problem(6, 5000, 30, 1e-5, 0.02)
    found = plan(p)
    assert found.gap < 0.001
    assert found.best.switches > 1000


@pytest.mark.parametrize("switch_s", [0.0, 2e-4])
def test_highs_finds_no_better_plan_than_the_lower_bound_allows(switch_s):
    highspy = pytest.importorskip("highspy")
    p = problem(7, 12, 4, switch_s, 0.03)
    n, k = p.time_s.shape
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("mip_rel_gap", 1e-9)
    chosen = [[model.addBinary() for _ in range(k)] for _ in range(n)]
    moved = {
        (i, a, b): model.addVariable(lb=0.0, ub=1.0)
        for i in range(n)
        for a in range(k)
        for b in range(k)
        if a != b
    }
    for i in range(n):
        model.addConstr(sum(chosen[i]) == 1)
        for a, b in itertools.permutations(range(k), 2):
            model.addConstr(moved[i, a, b] >= chosen[i - 1][a] + chosen[i][b] - 1)
    time_s = sum(chosen[i][j] * float(p.time_s[i, j]) for i in range(n) for j in range(k))
    model.addConstr(time_s + sum(moved.values()) * switch_s <= p.bound_s)
    energy_j = sum(chosen[i][j] * float(p.energy_j[i, j]) for i in range(n) for j in range(k))
    for (_, a, b), variable in moved.items():
        energy_j += variable * float(switch_s * (p.waiting_w[a] + p.waiting_w[b]) / 2)
    model.minimize(energy_j)
    best_j = model.getObjectiveValue()
    found = plan(p)
    assert found.lower_bound_j <= best_j * (1 + 1e-6)
    assert best_j * (1 - 1e-6) <= found.best.energy_j <= best_j * 1.01


def test_exhaustive_search_keeps_each_operation_within_its_share():
    p = problem(8, 40, 6, 0.0, 0.02)
    found = by_operation(p, 0.02)
    rows = np.arange(40)
    assert (p.time_s[rows, found.path] <= 1.02 * p.time_s[:, 0] * (1 + 1e-9)).all()
    assert plan(p).best.energy_j <= found.energy_j * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"switch_s": -1.0}, "cannot take"),
        ({"switch_s": math.nan}, "cannot take"),
        ({"bound_s": 1e-9}, "longer than the bound"),
        ({"waiting_w": np.zeros(2)}, "for every setting"),
        ({"energy_j": np.full((5, 3), np.nan)}, "finite"),
    ],
)
def test_wrong_problems_are_refused(change, words):
    p = problem(1, 5, 3, 0.0, 0.1)
    fields = {name: getattr(p, name) for name in OperationsProblem.__struct_fields__}
    with pytest.raises(PlanError, match=words):
        plan(OperationsProblem(**{**fields, **change}))
