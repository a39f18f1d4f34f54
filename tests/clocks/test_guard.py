"""The contract on synthetic iteration times: the tables of a naive and of the sequential test."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.clocks.plan.guard import Contract, Verdict, looks

CAP_PAIRS = 60  # 600 iterations in blocks of 5


def job(rng, n, white):
    """Noise of iteration times: AR(1) drift (rho 0.9, sd 1 %), white noise, 2 % outliers."""
    drift, rho = np.empty(n), 0.9
    drift[0] = rng.normal(0, 0.01)
    for i in range(1, n):
        drift[i] = rho * drift[i - 1] + rng.normal(0, 0.01 * math.sqrt(1 - rho**2))
    late = (rng.random(n) < 0.02) * rng.exponential(0.1, n)
    return 1 + drift + rng.normal(0, white, n) + late


def pairs(rng, slowdown, white):
    times = job(rng, CAP_PAIRS * 10, white).reshape(CAP_PAIRS, 2, 5)
    blocks = np.median(times, axis=2)
    order = rng.random(CAP_PAIRS) < 0.5
    base = np.where(order, blocks[:, 0], blocks[:, 1])
    candidate = np.where(order, blocks[:, 1], blocks[:, 0]) * (1 + slowdown)
    return np.log(candidate / base)


def accepted(bound, slowdown, white, repeats=80):
    """Share of runs that end with "safe", and the median number of iterations to any verdict."""
    rng = np.random.default_rng(7)
    contract = Contract(max_slowdown=bound)
    safe, lengths = 0, []
    for _ in range(repeats):
        ratios = pairs(rng, slowdown, white)
        verdict, n = Verdict.UNDECIDED, 0
        for n in range(2, CAP_PAIRS + 1):
            verdict = contract.judge(ratios[:n], error_probability=0.05, most=CAP_PAIRS)
            if verdict is not Verdict.UNDECIDED:
                break
        safe += verdict is Verdict.SAFE
        lengths.append(10 * n)
    return safe / repeats, float(np.median(lengths))


@pytest.mark.parametrize(
    ("bound", "slowdown", "white", "low", "high", "most_iterations"),
    [
        (0.01, 0.0, 0.005, 0.93, 1.0, 150),
        (0.01, 0.01, 0.005, 0.0, 0.11, 600),  # on the bound, with a narrow zone: slow
        (0.01, 0.02, 0.02, 0.0, 0.03, 200),
        (0.05, 0.0, 0.01, 0.97, 1.0, 90),
        (0.05, 0.04, 0.01, 0.85, 1.0, 250),  # against 0 instead of bound - zone: 0.08
        (0.05, 0.05, 0.01, 0.0, 0.11, 500),
        (0.05, 0.06, 0.01, 0.0, 0.03, 200),
    ],
)
def test_acceptance(bound, slowdown, white, low, high, most_iterations):
    share, iterations = accepted(bound, slowdown, white)
    assert low <= share <= high
    assert iterations <= most_iterations


def test_a_naive_before_after_test_fails_where_ours_does_not():
    """Five iterations before, five after, threshold at the bound of 1 %: wrong half the time."""
    rng = np.random.default_rng(3)
    times = [job(rng, 10, 0.005) for _ in range(300)]
    naive = np.mean([x[5:].mean() * 1.01 / x[:5].mean() - 1 <= 0.01 for x in times])
    ours, _ = accepted(0.01, 0.01, 0.005)
    assert naive > 0.3
    assert ours < 0.11


@given(st.floats(0, 0.5), st.integers(1, 30))
def test_shares_never_add_up_to_more_than_the_contract(slowdown, tests):
    contract = Contract(max_slowdown=slowdown)
    assert sum(contract.share(k) for k in range(1, tests + 1)) < contract.error_probability


def test_a_bound_of_zero_still_finds_free_settings():
    """`--max-slowdown 0`: a truly free setting is accepted, a 1 % slower one is not."""
    contract = Contract(max_slowdown=0.0)
    rng = np.random.default_rng(4)
    free = rng.normal(0.0, 0.004, 60)
    assert any(
        contract.judge(free[:n], error_probability=0.05, most=60) is Verdict.SAFE
        for n in range(2, 61)
    )
    slow = rng.normal(0.01, 0.004, 60)
    verdicts = {contract.judge(slow[:n], error_probability=0.05, most=60) for n in range(2, 61)}
    assert Verdict.SAFE not in verdicts
    assert Verdict.DEGRADED in verdicts


def test_no_evidence_is_no():
    contract = Contract(max_slowdown=0.05)
    assert contract.judge([], error_probability=0.05, most=9) is Verdict.UNDECIDED
    assert contract.judge([0.0], error_probability=0.05, most=9) is Verdict.UNDECIDED
    assert not contract.broken([0.2])


@given(st.integers(0, 10_000), st.sampled_from([6, 12, 25, 40]), st.sampled_from([0.015, 0.035]))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_a_setting_beyond_the_bound_is_taken_no_more_often_than_promised(seed, most, share):
    """Settings exactly at the bound, the worst case, asked after every pair."""
    rng = np.random.default_rng(seed)
    contract = Contract(max_slowdown=0.05)
    repeats, wrong = 400, 0
    for _ in range(repeats):
        ratios = contract.bound + rng.normal(0.0, 0.01, most)
        wrong += any(
            contract.judge(ratios[:n], error_probability=share, most=most) is Verdict.SAFE
            for n in range(2, most + 1)
        )
    assert wrong <= repeats * share + 4 * math.sqrt(repeats * share)


def test_a_test_ends_with_a_verdict():
    contract = Contract(max_slowdown=0.05)
    ratios = [0.049, 0.051] * 20
    assert contract.judge(ratios, error_probability=0.05, most=40) is not Verdict.UNDECIDED
    assert looks(40)[-1] == 40
