"""How long a block has to be for the error of its period to be small against the contract."""

import math

from hypothesis import given
from hypothesis import strategies as st

from kilter.clocks.plan import rhythm as plan
from kilter.core.plan import FREE_MARGIN, Goal
from kilter.model.period import JobPace


def seen(period_s, jitter, edge_s):
    return JobPace(
        iteration_s=period_s,
        error_s=0.0,
        iterations=30,
        begin_s=0.0,
        end_s=30 * period_s,
        jitter_s=jitter * period_s,
        edge_s=edge_s,
        interrupted=False,
    )


@given(
    st.floats(0.3, 60.0),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.1),
    st.sampled_from((0.0, 0.02, 0.1)),
)
def test_a_block_is_as_long_as_the_contract_asks_for(period_s, jitter, edge_s, bound):
    steady = plan.rhythm(seen(period_s, jitter, edge_s), 300.0, Goal(max_slowdown=bound))
    n, tolerated = steady.block_iterations, 0.25 * math.log1p(max(bound, FREE_MARGIN))
    assert n >= 12
    assert n * period_s >= 5.0 - 1e-9
    long = n * period_s > 120.0 - period_s
    assert steady.pair_error <= tolerated or long
    one_less = math.sqrt(2 * (jitter**2 / (n - 1) + 2 * (edge_s / period_s / (n - 1)) ** 2))
    assert n == 12 or (n - 1) * period_s < 5.0 or one_less > tolerated or long


def test_its_sentence_says_how_exact_a_pair_is():
    text = str(plan.rhythm(seen(1.2, 0.01, 0.0), 300.0, Goal(max_slowdown=0.02)))
    assert "iterations of 1.2 s" in text
    assert "1.0 %" in text
    assert "blocks of 12 iterations (14 s)" in text
    assert "standard error of 0.41 %" in text
