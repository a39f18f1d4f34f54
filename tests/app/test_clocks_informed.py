"""What a search could keep at best: the bound for any search, and one that knows the curves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.app.bench import clocks
from kilter.app.bench.clocks_informed import most_saving
from kilter.core.plan import Goal
from kilter.core.setting import Setting
from kilter.device.sim.replay import RecordedRow, RecordedWorkload

GOAL = Goal(max_slowdown=0.05, price_of_time=0.0)
CURVES = st.lists(
    st.tuples(st.floats(-0.1, 0.3), st.floats(-0.5, 0.2)), min_size=1, max_size=8
)  # log ratios of time and energy


def curve(ratios: list[tuple[float, float]]) -> dict[Setting, tuple[float, float]]:
    return {Setting(sm_clock_hz=1e9 - 1e7 * n): ratio for n, ratio in enumerate(ratios)}


def workload(ratios: list[tuple[float, float]]) -> RecordedWorkload:
    rows = [
        RecordedRow(
            setting=setting,
            time_s=math.exp(time),
            power_w=100.0 * math.exp(energy - time),
            energy_j=100.0 * math.exp(energy),
        )
        for setting, (time, energy) in (
            {Setting(sm_clock_hz=1.1e9): (0.0, 0.0)} | curve(ratios)
        ).items()
    ]
    return RecordedWorkload(source="made", gpu="A", name="job", rows=tuple(rows), default=rows[0])


@given(CURVES, st.integers(1, 500), st.floats(0.001, 0.1))
def test_the_bound_is_below_the_oracle_and_grows_with_the_pairs(ratios, pairs, sd):
    true = curve(ratios)
    kept = [-math.expm1(e) for t, e in ratios if t <= math.log1p(0.05) + 1e-9]
    oracle = max(0.0, *kept, 0.0)
    bound = most_saving(true, GOAL, pairs=pairs, sd=sd)
    assert 0.0 <= bound <= oracle + 1e-9
    assert bound <= most_saving(true, GOAL, pairs=pairs + 1, sd=sd) + 1e-9
    far = {setting: (t - 1.0, e) for setting, (t, e) in true.items()}
    sure = max(0.0, *(-math.expm1(e) for _, e in ratios), 0.0)
    assert most_saving(far, GOAL, pairs=500, sd=0.001) == pytest.approx(sure)


def test_one_setting_at_the_bound_is_held_as_often_as_the_contract_may_break():
    true = curve([(math.log1p(0.05), math.log(0.8))])
    assert most_saving(true, GOAL, pairs=70, sd=0.01) == pytest.approx(0.05 * 0.2)


def test_an_informed_search_takes_the_best_setting_that_it_can_prove():
    made = workload([(0.01, math.log(0.9)), (0.03, math.log(0.8)), (0.06, math.log(0.7))])
    (result,) = clocks.play({"t": [made]}, ["informed"], GOAL, seeds=1, noise=0.001)
    assert result.saving == pytest.approx(0.2)
    assert not result.violated
    assert result.saving <= result.oracle_saving
    summary = clocks.summarise(
        clocks.play({"t": [made]}, ["informed", "oracle"], GOAL, seeds=1, noise=0.01)
    )
    assert 0.9 < summary["informed"]["most_of_oracle"] <= 1.0
