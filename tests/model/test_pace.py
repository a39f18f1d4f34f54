"""The mean iteration time of a stretch of telemetry, against iterations whose ends are known."""

import math

import numpy as np
import pytest

from kilter.model.period import Telemetry, pace


def job(lengths, update_s=0.1, noise=0.01, seed=0):
    """Three phases of unequal power per iteration, as sensors show them."""
    rng = np.random.default_rng(seed)
    edges, levels, t = [0.0], [], 0.0
    for length in lengths:
        for share, power in ((0.5, 600.0), (0.35, 400.0), (0.15, 120.0)):
            t += share * length
            edges.append(t)
            levels.append(power)
    total = np.concatenate([[0.0], np.cumsum(np.diff(edges) * np.array(levels))])
    at = np.arange(update_s, edges[-1], update_s)
    energy = np.interp(at, edges, total)
    power = (energy - np.interp(at - update_s / 4, edges, total)) / (update_s / 4)
    return Telemetry(
        t_s=at,
        power_w=power * (1 + rng.normal(0.0, noise, len(at))),
        sm_utilisation=np.empty(0),
        memory_utilisation=np.empty(0),
        energy_j=energy,
    )


@pytest.mark.parametrize("about", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("period_s", [0.47, 1.0, 1.31, 4.2])
def test_the_mean_is_that_of_the_iterations(period_s, about):
    """Also where the expectation is off, as after a change of the clock."""
    rng = np.random.default_rng(1)
    lengths = period_s * (1 + rng.normal(0.0, 0.01, 20))
    found = pace(job(lengths), about * period_s)
    assert found is not None
    assert found.iteration_s == pytest.approx(lengths.mean(), rel=0.01)
    assert found.iterations >= 17
    assert not found.interrupted


def test_the_standard_error_is_honest():
    """Over many stretches, the means differ from the truth by as much as they claim."""
    rng = np.random.default_rng(2)
    standardised = []
    for seed in range(60):
        found = pace(job(1 + rng.normal(0.0, 0.01, 16), seed=seed), 1.0)
        assert found is not None
        standardised.append((found.iteration_s - 1.0) / found.error_s)
    assert 0.6 < math.sqrt(np.mean(np.square(standardised))) < 1.6


def test_a_pause_is_no_iteration():
    lengths = [1.0] * 10 + [5.0] + [1.0] * 10
    telemetry = job(lengths)
    quiet = (telemetry.t_s > 10.0) & (telemetry.t_s < 15.0)
    telemetry.power_w[quiet] = 90.0
    telemetry = Telemetry(
        t_s=telemetry.t_s,
        power_w=telemetry.power_w,
        sm_utilisation=np.empty(0),
        memory_utilisation=np.empty(0),
        energy_j=np.empty(0),
    )
    found = pace(telemetry, 1.0)
    assert found is not None
    assert found.interrupted
    assert found.iteration_s == pytest.approx(1.0, rel=0.01)


def test_noise_and_another_period_have_none():
    rng = np.random.default_rng(3)
    at = np.arange(0.1, 30.0, 0.1)
    nothing = np.empty(0)
    noise = Telemetry(
        t_s=at,
        power_w=rng.normal(400.0, 50.0, len(at)),
        sm_utilisation=nothing,
        memory_utilisation=nothing,
        energy_j=nothing,
    )
    assert pace(noise, 1.0) is None
    assert pace(job([1.0] * 20), 3.0) is None or pace(job([1.0] * 20), 3.0).iteration_s > 2.0
    assert pace(job([1.0] * 3), 1.0) is None
