"""Intervals and evidence agree with scipy, and keep their promise when looked at all the time."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as oracle

from kilter.model import stats


@given(st.floats(-50, 50), st.integers(1, 200))
def test_t_cdf_is_scipys(t, nu):
    assert stats.t_cdf(t, nu) == pytest.approx(oracle.t.cdf(t, nu), abs=1e-9)


@given(st.floats(0.001, 0.999), st.integers(1, 120))
def test_t_quantile_is_scipys(p, nu):
    assert stats.t_quantile(p, nu) == pytest.approx(oracle.t.ppf(p, nu), rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(-0.2, 0.2), min_size=2, max_size=40), st.floats(-0.1, 0.1))
@settings(max_examples=60)
def test_evidence_is_the_mixture_of_t_density_ratios(ratios, bound):
    x = bound - np.asarray(ratios)
    if x.std(ddof=1) < 1e-6:
        return
    n = len(x)
    t = x.mean() * math.sqrt(n) / x.std(ddof=1)
    if abs(t) > 30:
        return
    mixture = [oracle.nct.pdf(t, n - 1, e * math.sqrt(n)) for e in stats.EFFECTS]
    central = oracle.t.pdf(t, n - 1)
    if min(mixture) < 1e-250 or not np.all(np.isfinite(mixture)):
        return
    want = math.log(np.mean(mixture) / central)
    # scipy's own noncentral t is only good to a few digits far in the tail
    assert stats.log_evidence_below(ratios, bound) == pytest.approx(want, rel=1e-3, abs=1e-3)


def test_noise_free_pairs_need_several_to_convince():
    """Equal values must not divide by zero, nor convince at once."""
    assert stats.log_evidence_below([0.0] * 2, 0.05) < math.log(20)
    assert stats.log_evidence_below([0.0] * 12, 0.05) > math.log(20)
    assert stats.log_evidence_below([0.05] * 12, 0.05) <= 0.0


@pytest.mark.parametrize("spread", [0.005, 0.05])
def test_ville_holds_on_the_border(spread):
    """True mean exactly on the bound, looked at after each of 60 pairs: false 'below' <= 5 %."""
    rng = np.random.default_rng(1)
    runs, wrong = 200, 0
    for _ in range(runs):
        pairs = rng.normal(0.02, spread, size=60)
        wrong += any(stats.log_evidence_below(pairs[:n], 0.02) > math.log(20) for n in range(2, 61))
    # 5 % of 200 is 10; three standard deviations of a binomial above it is 19
    assert wrong <= 19


def test_interval_covers_at_its_rate():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(600):
        estimate = stats.paired_ratio(list(rng.normal(-0.1, 0.02, size=8)))
        covered += estimate.low <= math.exp(-0.1) <= estimate.high
    assert 0.92 <= covered / 600 <= 0.98


def test_no_pairs_no_estimate_and_one_pair_no_bounds():
    assert stats.paired_ratio([]) is None
    one = stats.paired_ratio([0.1])
    assert (one.low, one.high) == (0.0, math.inf)


@pytest.mark.parametrize(("count", "critical"), [(1, 1.645), (2, 1.875), (5, 2.122), (10, 2.270)])
def test_constant_limits_of_several_looks_are_those_published(count, critical):
    """Pocock's constants (Jennison and Turnbull 2000, table 2.1, two-sided 10 %)."""
    looks = tuple(range(8, 8 * count + 1, 8))
    assert stats.critical_values(looks, 0.05, shape=0.5) == pytest.approx(
        [critical] * count, abs=3e-3
    )


@pytest.mark.parametrize("hope", [0.5, 1.0, math.inf])
@pytest.mark.parametrize(
    ("looks", "error"), [((4, 7, 14, 28), 0.03), ((6, 12), 0.012), ((5,), 0.05)]
)
def test_several_looks_together_are_wrong_as_often_as_they_may_be(looks, error, hope):
    """Against 40,000 simulated walks; later limits are lower than earlier ones. Walks without hope
    of the last limit are given up."""
    limits = stats.critical_values(looks, error, hope=hope)
    assert list(limits) == sorted(limits, reverse=True)
    walks = np.random.default_rng(5).normal(size=(40_000, looks[-1])).cumsum(axis=1)
    crossed = np.zeros(len(walks), dtype=bool)
    left = np.ones(len(walks), dtype=bool)
    last = limits[-1] / math.sqrt(looks[-1])
    for n, limit in zip(looks, limits, strict=True):
        at = walks[:, n - 1]
        crossed |= left & (at >= limit * math.sqrt(n))
        left &= at / n + hope / math.sqrt(n) >= last
    assert crossed.mean() == pytest.approx(error, abs=4 * math.sqrt(error / len(walks)))


@given(st.integers(0, 400), st.integers(1, 400))
@settings(max_examples=50, deadline=None)
def test_a_binomial_interval_is_the_exact_one(events, trials):
    events = min(events, trials)
    expected = oracle.binomtest(events, trials).proportion_ci(0.95, "exact")
    found = stats.binomial_interval(events, trials)
    assert found == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_the_usual_time_survives_an_outlier():
    assert stats.usual_time([1.0, 1.1, 0.9, 1.0, 9.0]) == pytest.approx(1.0)
    assert stats.usual_time([2.0]) == 2.0
